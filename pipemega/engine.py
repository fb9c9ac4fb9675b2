"""The engine: one config, one model, and one rank's part of the work.

Every method is collective unless it says otherwise: all ranks call it, in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.checkpoint import Checkpoints, Counters, LoadOptions
from pipemega.config import Batch, Config
from pipemega.data.loader import BatchLoader
from pipemega.errors import ConfigError, PipemegaError
from pipemega.evaluation import forward, mean_loss, outputs_of, totals
from pipemega.failure import FailureBoard
from pipemega.feed import Feed
from pipemega.mesh import Mesh
from pipemega.monitor import MultiTimer
from pipemega.nonfinite import Examiner
from pipemega.optimizer import LRSchedule, OptimizerStep, PostValidatedStep, StepReport
from pipemega.pipeline.ahead import RunAhead
from pipemega.pipeline.build import LocalModel
from pipemega.pipeline.executor import Executor, MicroBatches, Results
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.module import Draws
from pipemega.pipeline.recorder import OFF, WorkRecorder
from pipemega.pipeline.simulate import Timeline
from pipemega.pipeline.trace import Trace
from pipemega.pipeline.whole import whole_tensors
from pipemega.random import preserve_rng
from pipemega.replicas import check_replicas
from pipemega.tracer import Tracer
from pipemega.tuning import ScheduleTuner


class Engine:
    """One rank of a training run; made by `pipemega.initialize`.

    Attributes:
        config, mesh, batch: what it was made from; `batch` is the solved batch equation.
        module: the local stages, an `nn.ModuleList` in the order of the model.
        optimizer: torch's optimizer, over master weights where there are any.
        lr_scheduler: stepped by `train_batch`; None for a constant rate.
        loader: over the training data; None where the caller brings iterators.
        plan: what every pipeline rank does in a step.
        global_steps: batches trained on, skipped ones included.
        consumed_samples: samples trained on, over all data ranks.
        stop_wished: some rank's `wants_to_stop` said yes in the last `train_batch`; on every rank.
        examiner: finds out where inf and nan in a step came from.
        last_trace: the last step that was timed, instruction by instruction; on rank 0 only.
        timers: data, forward, backward, communication, optimizer; on with wall_clock_breakdown.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        batch: Batch,
        model: LocalModel,
        executor: Executor,
        plan: Plan,
        step: OptimizerStep | None,
        loader: BatchLoader | None,
        timers: MultiTimer,
        tracer: Tracer | None = None,
        tuner: ScheduleTuner | None = None,
    ) -> None:
        self.config, self.mesh, self.batch = config, mesh, batch
        self.plan, self.loader, self.timers = plan, loader, timers
        self.module = nn.ModuleList(model.stages.values())
        self.global_steps = 0
        self.consumed_samples = 0
        self.stop_wished = False
        self.last_trace: Trace | None = None
        self._model, self._executor, self._step = model, executor, step
        self._ahead = RunAhead(executor)
        self._checkpoints = Checkpoints(config, mesh, model, step, loader)
        self._failures = FailureBoard(mesh.world)
        self._tracer, self._tuner = tracer or Tracer(mesh), tuner
        gradients = step.gradients if step else None
        self.examiner = Examiner(mesh, executor, gradients, model.bounds[-1], config.fp16.enabled)
        self._work = WorkRecorder(mesh.device) if config.training.stragglers.factor else OFF
        is_first, self._is_last = (mesh.pipeline.rank == plan.rank_of_stage[s] for s in (0, -1))
        self._feed = Feed(
            mesh, batch.num_microbatches, loader, reads_inputs=is_first, reads_labels=self._is_last
        )

    @property
    def optimizer(self) -> Optimizer | None:
        return self._step.optimizer if self._step else None

    @property
    def lr_scheduler(self) -> LRSchedule | None:
        return self._step.schedule if self._step else None

    @property
    def last_step(self) -> StepReport | None:
        """What the last `train_batch` saw and did; None before the first. Not collective.

        With `pipeline.optimizer_sync: "post_validate"` this waits for the norm of the step.
        """
        return self._step.last if self._step else None

    @property
    def skipped_steps(self) -> int:
        """So far; waits as `last_step` does."""
        return self._step.skipped_so_far if self._step else 0

    def take_reports(self) -> list[StepReport]:
        """Of the steps whose norm became known since the last call, in order, without waiting."""
        return self._step.take_reports() if self._step else []

    def settle(self) -> None:
        """Makes parameters, optimizer and learning rate those after the last step.

        With `pipeline.optimizer_sync: "post_validate"` they may still be taken back after
        `train_batch` has returned, and with `zero_optimization.overlap_comm` slices of them may
        still be on their way to this rank. Evaluating, saving, loading and `parameter_state`
        settle by themselves; whoever reads `module`, `optimizer` or `lr_scheduler` calls this
        before.

        Raises:
            PipelineError, LossScaleError: what the fenced step would have raised.
        """
        with self._failures.failing_together("settle"), self.examiner.naming():
            if not self._stands():
                self.examiner.look_at(self.last_step)

    def _stands(self) -> bool:
        """Settles; whether parameters stay as they were."""
        if self._step is None:
            return True
        try:
            return self._step.settle()
        except PipemegaError as error:
            if error.on_every_rank:
                # As if the step had waited, and `train_batch` had never come to its end.
                self.global_steps -= 1
                self.consumed_samples -= self.batch.train_batch_size
            raise

    def check_replicas(self) -> None:
        """Compares all copies of each parameter, bit by bit.

        Raises:
            ReplicaError: some differ; on every rank.
        """
        with self._failures.failing_together("check_replicas"):
            self._stands()
            check_replicas(self._model, self.mesh)

    @property
    def work_seconds(self) -> float:
        """What this rank took in its last step to read its batch and to compute; not collective."""
        return self._work.seconds() + self._feed.seconds

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping; None before the first. Not collective."""
        return self.last_step.grad_norm if self.last_step else None

    def trace_next_step(self, memory: bool = False) -> None:
        """Lets the next `train_batch` leave its times in `last_trace`, whatever the config says.

        Args:
            memory: also weigh what each instruction leaves in memory.
        """
        self._tracer.trace_next_step(memory)

    @property
    def last_timeline(self) -> Timeline | None:
        """The compute steps of the last step that was timed; on rank 0 only. Not collective."""
        return self.last_trace.timeline if self.last_trace else None

    # Training and evaluation

    def train_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        *,
        wants_to_stop: Callable[[], bool] = lambda: False,
    ) -> float:
        """One optimizer step on one global batch.

        Args:
            data_iter: yields the (inputs, labels) of this data rank's micro-batches; read on the
                pipeline ranks of the first and the last stage. None: the training data given to
                `initialize`.
            wants_to_stop: asked once, late in the step; `stop_wished` says if any rank's said yes.

        Returns:
            the loss, averaged over the whole batch; the same on every rank.

        Raises:
            StopIteration: the data ended with the batch before.
            DataError: the data ended within this batch.
            PipelineError: a layer, or another rank, failed; or what `settle` raises.
        """
        with self._failures.failing_together("train_batch"), self.examiner.naming():
            if self._step is None:
                raise ConfigError(
                    "train_batch needs an optimizer: add the section 'optimizer'",
                    on_every_rank=True,
                )
            self._step.asks = wants_to_stop
            inputs, labels = self._next_batch(data_iter)
            if self._tuner is not None:
                self._tuner.prepare_step(self._tracer)
            with preserve_rng(self.mesh.device):
                results = self._run(inputs, labels)
            with self.timers("optimizer"):
                report = self._step(*totals(results, self.mesh))
            self.stop_wished = report.votes > 0
            self.examiner.look_at(report)
            trace = self._tracer.finish(self.global_steps + 1, self._executor.plan)
            self.last_trace = trace or self.last_trace
            if self._tuner is not None:
                self.plan = self._tuner.after_step(trace) or self.plan
            self.global_steps += 1
            self.consumed_samples += self.batch.train_batch_size
            return report.loss

    def _next_batch(self, data_iter: Iterator[Any] | None) -> tuple[list[Any], list[Any]]:
        with self.timers("data"):
            try:
                return self._feed.batch(data_iter)
            except StopIteration:
                # Whoever trains to the end of the data comes back to a last step that stands.
                self._stands()
                raise

    def _run(self, inputs: list[Any], labels: list[Any]) -> Results:
        """All forwards and backwards of a step."""
        step, count = self._step, self.batch.num_microbatches
        assert step is not None

        def batch() -> MicroBatches:
            # By its place in the global batch, so that dropout is the same on every mesh.
            places = (m * self.mesh.data.size + self.mesh.data.rank for m in range(count))
            return MicroBatches(
                inputs=inputs,
                labels=labels,
                draws=[Draws(self.config.seed, self.global_steps, place) for place in places],
                loss_factor=step.loss_scale.scale / count,
            )

        recorder = self._tracer.begin(self.global_steps + 1)
        recorder = self._work if recorder is OFF else recorder
        if not isinstance(step, PostValidatedStep):
            results = self._executor.run(self.plan, batch(), recorder)
        else:
            results = self._ahead.run(
                self.plan,
                batch,
                self._stands,
                lambda results: step.forwards_done(*totals(results, self.mesh)),
                recorder,
                lambda: self.examiner.look_at(self.last_step),
            )
        self.examiner.remember(self.plan, batch())
        return results

    def eval_batch(
        self,
        data_iter: Iterable[Any],
        num_micro_batches: int | None = None,
        *,
        return_outputs: bool = False,
    ) -> Any:
        """The loss on some micro-batches, without gradients; between any two training steps.

        Args:
            data_iter: as for `train_batch`; micro-batches may have any size.
            num_micro_batches: how many to read; by default as many as a training step has.
            return_outputs: also return what the last layer gave.

        Returns:
            the loss, the same on every rank; or (loss, outputs), where outputs is a list on the
            ranks of the last stage (a slice per tensor rank if the layer gives slices) and None
            elsewhere.
        """
        with self._failures.failing_together("eval_batch"):
            self._stands()
            count = num_micro_batches or self.batch.num_microbatches
            inputs, labels = self._feed.read(iter(data_iter), count)
            results = self._forward(inputs, labels, return_outputs)
            loss = mean_loss(results, self.mesh)
            return (loss, outputs_of(results, self._is_last)) if return_outputs else loss

    def infer(self, inputs: Sequence[Any]) -> list[Any] | None:
        """What the last layer gives for each micro-batch, on the ranks of the last stage."""
        with self._failures.failing_together("infer"):
            self._stands()
            results = self._forward(self._feed.to_device(inputs), (), keep_outputs=True)
            return outputs_of(results, self._is_last)

    def _forward(self, inputs: Sequence[Any], labels: Sequence[Any], keep_outputs: bool) -> Results:
        ranks = self.plan.rank_of_stage
        return forward(self._executor, ranks, inputs, labels, self.mesh, keep_outputs)

    # State

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> Path | str:
        """Writes everything that the next step depends on; returns the checkpoint's folder.

        With `checkpoint.async` it returns when a copy is made; `finish_saving` waits for the rest.
        An error in the background is logged by the next save, which then does not return before
        it has saved; or raised by `finish_saving`.

        Args:
            save_dir: a folder that all ranks see, or a URL that fsspec knows.
            tag: its name; `global_step<N>` by default.
            client_state: the caller's own, given back by `load_checkpoint`: tensors and plain
                values, the same on every rank.
            save_latest: make it the one that is loaded by default.

        Raises:
            CheckpointError: a rank could not write; what was saved before is untouched.
        """
        with self._failures.failing_together("save_checkpoint"):
            self._stands()
            counters = Counters(self.global_steps, self.consumed_samples)
            return self._checkpoints.save(save_dir, tag, client_state, counters, point=save_latest)

    def finish_saving(self) -> None:
        """Waits until what `checkpoint.async` writes in the background is on the disk.

        Raises:
            CheckpointError: a rank could not write; what was saved before is untouched.
        """
        with self._failures.failing_together("finish_saving"):
            self._checkpoints.finish()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        strict: bool = True,
    ) -> tuple[Path | str, Any]:
        """Continues where a checkpoint was written, on whatever mesh; or takes a part of it.

        Args:
            tag: which one; by default the newest that is whole, with a warning if others are not.
            load_module_only: parameters and buffers alone; the run begins at step 0.
            load_optimizer_states: False: the optimizer goes on with what it has.
            load_lr_scheduler_states: False: so does the learning rate.
            strict: False: load what fits of another model's, and list every difference.

        Returns:
            the checkpoint's folder, and its client_state.

        Raises:
            CheckpointError: it is missing, half-written, damaged, of another model, or of a run
                whose config had another model or order of the data.
        """
        options = LoadOptions(
            module_only=load_module_only,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            strict=strict,
            verify=self.config.checkpoint.verify,
            allow_changes=self.config.checkpoint.allow_changes,
        )
        with self._failures.failing_together("load_checkpoint"):
            self._stands()
            loaded = self._checkpoints.load(load_dir, tag, options)
            if loaded.counters is not None:
                self.global_steps = loaded.counters.global_steps
                self.consumed_samples = loaded.counters.consumed_samples
        return loaded.path, loaded.client

    @torch.no_grad()
    def parameter_state(self) -> dict[str, Tensor]:
        """Logical name -> the whole tensor, on the CPU of every rank; for tests and small models.

        With bf16 or fp16 it is the fp32 master.
        """
        with self._failures.failing_together("parameter_state"):
            self._stands()
            values = {n: p.detach() for n, p in self._model.parameters.items()}
            if self._step is not None:
                values |= self._step.targets.whole_masters()
            return whole_tensors(values, self._model, self.mesh)

"""Steps, evaluation and checkpoints of a model; each process holds the engine of its rank.

Every method is collective, unless its docstring says otherwise: all ranks call it, in one order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.checkpoint import Checkpointer, Counters, LoadOptions
from pipemega.config import Config
from pipemega.diagnostics.nan_origin import NonFiniteLocator
from pipemega.diagnostics.replica_check import check_replicas
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.mesh import Mesh
from pipemega.engine.batch_reader import BatchReader
from pipemega.engine.components import Components
from pipemega.engine.loss import mean_loss
from pipemega.engine.schedule_tuner import ScheduleTuner
from pipemega.engine.step_callbacks import MeasureBusyTime, StepCallback, TraceSteps
from pipemega.engine.step_runner import StepRunner
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor.step_phases import PIPELINE, StepPhases
from pipemega.optimizer import LRSchedule, StepReport
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.gather_tensors import gather_full_tensors
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import Timeline
from pipemega.pipeline.schedules import forward_only
from pipemega.profiling.trace import Trace
from pipemega.random import preserve_rng

# Reports kept for `take_reports`: a loop that calls it after each step finds two at most.
_MAX_REPORTS = 8


class StepEngine:
    """Trains single steps, evaluates, saves and loads; `Engine` adds what belongs to a run.

    Attributes:
        config, mesh, batch: as given; `batch` is the solved batch equation.
        module: the local stages, an `nn.ModuleList` in the order of the model.
        optimizer: torch's optimizer, over the master weights if they exist; None without training.
        lr_scheduler: stepped by `train_batch`; None if the learning rate is constant.
        loader: of the training data; None if the caller passes iterators.
        num_parameters: of the whole model; tied copies count once.
        plan: what every pipeline rank runs in a step.
        global_steps: training steps so far, skipped ones included.
        consumed_samples: samples of these steps, over all data ranks.
        stop_requested: a callback on some rank asked to stop after the last `train_batch`.
        timers: data, forward, backward, communication, optimizer; enabled by wall_clock_breakdown.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        plan: Plan,
        components: Components,
        tuner: ScheduleTuner | None = None,
    ) -> None:
        model, executor = components.model, components.executor
        self.config, self.mesh, self.plan = config, mesh, plan
        self.batch = config.batch(mesh.data.size)
        self.module = nn.ModuleList(model.stages.values())
        self.loader, self.timers = components.loader, components.timers
        self.num_parameters = components.num_parameters
        self.global_steps, self.consumed_samples, self.stop_requested = 0, 0, False
        self._model, self._executor = model, executor
        self._step = step = components.optimizer_step
        if step is not None:
            step.refuse_other_steps()
        self.optimizer: Optimizer | None = step.optimizer if step else None
        self.lr_scheduler: LRSchedule | None = step.schedule if step else None
        self._runner: StepRunner | None = None
        if step is not None:
            self._runner = StepRunner(
                executor,
                step,
                mesh,
                config.seed,
                on_rollback=self._report_final_steps,
                on_failure=lambda: self._count_steps(-1),
            )
        self._phases = step.phases if step is not None else StepPhases()
        self._reports: deque[StepReport] = deque(maxlen=_MAX_REPORTS)
        self._checkpoints = Checkpointer(config, mesh, model, step, self.loader)
        self._failures = failure_reporter()
        stages, count = plan.rank_of_stage, self.batch.num_microbatches
        self._reader = BatchReader(mesh, stages, count, self.loader, config.data.compare_every)
        self._is_last = mesh.pipeline.rank == stages[-1]
        self._tracing = TraceSteps(config.monitor.trace, mesh, executor, self._phases)
        self._busy_time = MeasureBusyTime(mesh.device, config.training.stragglers.factor > 0)
        gradients, num_layers = step.gradients if step else None, model.bounds[-1]
        self._locator = NonFiniteLocator(mesh, executor, gradients, num_layers, config.fp16.enabled)
        self._callbacks: list[StepCallback] = [self._tracing, self._busy_time]
        if tuner is not None:
            self._callbacks.insert(0, tuner)

    # Reports of steps

    @property
    def last_step(self) -> StepReport | None:
        """Report of the last step; None before the first. Not collective.

        With `pipeline.optimizer_sync: "post_validate"` this waits for the gradient norm.
        """
        return self._step.last if self._step else None

    @property
    def skipped_steps(self) -> int:
        """Skipped steps so far; waits as `last_step` does. Not collective."""
        return self._step.skipped_so_far if self._step else 0

    def take_reports(self) -> list[StepReport]:
        """Return the reports of steps that became final since the last call, in order.

        Not collective; does not wait. Only these reports have `origin`: where inf or nan arose.
        """
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step before clipping; None before the first. Not collective."""
        return self.last_step.grad_norm if self.last_step else None

    @property
    def work_seconds(self) -> float:
        """Seconds that this rank read data and computed in its last step. Not collective."""
        return self._busy_time.seconds

    def add_callback(self, callback: StepCallback) -> None:
        """Call `callback` in each step from now on. Not collective."""
        self._callbacks.append(callback)

    def trace_next_step(self, memory: bool = False) -> None:
        """Trace the next `train_batch`; `memory`: also what each instruction allocates."""
        self._tracing.tracer.trace_next_step(memory)

    @property
    def last_trace(self) -> Trace | None:
        """The last traced step, with the times of each instruction; on rank 0 only."""
        return self._tracing.last_trace

    @property
    def last_timeline(self) -> Timeline | None:
        """The timeline of the last traced step; on rank 0 only. Not collective."""
        return self.last_trace.timeline if self.last_trace else None

    # Training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> float:
        """Train one step, as `Engine.train_batch`, without records, saves and policies."""
        with self._failures.propagate_errors("train_batch"), self._locator.add_origin_to_errors():
            runner = self._runner
            if runner is None or self._model.loss_fn is None:
                needed = "a loss: give PipelineModule(layers, loss_fn=...)"
                if runner is None:
                    needed = "an optimizer: add the section 'optimizer'"
                raise ConfigError(f"train_batch needs {needed}", on_every_rank=True)
            self._phases.start(exact=self._tracing.tracer.is_due(self.global_steps + 1))
            inputs, labels = self._read_batch(data_iter)
            step = runner.new_step(self.global_steps + 1, self.plan, inputs, labels)
            for callback in self._callbacks:
                callback.before_step(step)
            with preserve_rng(self.mesh.device), self._phases(PIPELINE):
                results = runner.forward_backward(step)
            self._locator.record_step(step.plan, step.micro_batches())
            with self.timers("optimizer"):
                report = runner.optimizer_step(results)
            self._report_final_steps()
            step.phases = self._phases.stop()
            for callback in reversed(self._callbacks):
                callback.after_step(step)
            self.plan = step.next_plan or self.plan
            self.stop_requested = report.stop_votes > 0
            self._count_steps(1)
            return report.loss

    def _read_batch(self, data_iter: Iterator[Any] | None) -> tuple[list[Any], list[Any]]:
        with self.timers("data"), self._phases("data"), self._busy_time.reading():
            try:
                return self._reader.next_step(data_iter)
            except StopIteration:
                # After the end of the data no step follows that would settle the last one.
                self._settle()
                raise

    def _count_steps(self, number: int) -> None:
        self.global_steps += number
        self.consumed_samples += number * self.batch.train_batch_size

    def settle(self) -> None:
        """Complete the last step, so that parameters, optimizer and learning rate are final.

        With `pipeline.optimizer_sync: "post_validate"` the last step may still be undone after
        `train_batch` has returned; with `zero_optimization.overlap_comm` this rank may still be
        gathering parameters. The engine's own methods settle first. Call it before you read
        `module`, `optimizer` or `lr_scheduler`.

        Raises:
            NonFiniteError, LossScaleError: as `train_batch` without post-validation.
        """
        with self._failures.propagate_errors("settle"), self._locator.add_origin_to_errors():
            self._settle()

    def _settle(self) -> None:
        if self._runner is not None:
            self._runner.settle()
        # What follows reads parameters on the host.
        synchronize()
        if self._step is not None:
            # The caller may change parameters and masters, as loading does.
            self._step.wait_for_copies()
        self._report_final_steps()

    def _report_final_steps(self) -> None:
        for unchecked in self._step.take_reports() if self._step else ():
            report = replace(unchecked, origin=self._locator.check(unchecked))
            self._reports.append(report)
            for callback in self._callbacks:
                callback.on_report(report)

    def check_replicas(self) -> None:
        """Compare all copies of each parameter bit by bit.

        Raises:
            ReplicaError: copies differ; on every rank.
        """
        with self._failures.propagate_errors("check_replicas"):
            self._settle()
            check_replicas(self._model, self.mesh)

    # Evaluation

    def eval_batch(
        self,
        data_iter: Iterable[Any],
        num_micro_batches: int | None = None,
        *,
        return_outputs: bool = False,
    ) -> Any:
        """Compute the loss, as `Engine.eval_batch`, without a record."""
        with self._failures.propagate_errors("eval_batch"):
            self._settle()
            count = num_micro_batches or self.batch.num_microbatches
            inputs, labels = self._reader.next_evaluation(iter(data_iter), count)
            results = self._forward(inputs, labels, keep_outputs=return_outputs)
            loss = mean_loss(results, self.mesh)
            return (loss, self._outputs(results)) if return_outputs else loss

    def infer(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the output of the last layer for each micro-batch; None on other stages' ranks."""
        with self._failures.propagate_errors("infer"):
            self._settle()
            results = self._forward(self._reader.to_device(inputs), (), keep_outputs=True)
            return self._outputs(results)

    def _forward(
        self, inputs: Sequence[Any], labels: Sequence[Any], *, keep_outputs: bool
    ) -> Results:
        count = max(len(inputs), len(labels))
        plan = lower(forward_only(self.plan.rank_of_stage, count))
        with preserve_rng(self.mesh.device):
            batch = MicroBatches(inputs, labels, keep_outputs=keep_outputs)
            return self._executor.run(plan, batch)

    def _outputs(self, results: Results) -> list[Any] | None:
        outputs = results.outputs
        return [outputs[m] for m in sorted(outputs)] if self._is_last else None

    # Checkpoints and parameters

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> Path | str:
        """Save a checkpoint, as `Engine.save_checkpoint`, even if this step is saved already."""
        with self._failures.propagate_errors("save_checkpoint"):
            self._settle()
            counters = Counters(self.global_steps, self.consumed_samples, self._run_state())
            return self._checkpoints.save(
                save_dir, tag, client_state, counters, set_latest=save_latest
            )

    def _run_state(self) -> dict[str, Any]:
        """Return the state of the run that is saved with a checkpoint, as JSON values."""
        return {}

    def finish_saving(self) -> None:
        """Wait until background writes of `checkpoint.async` are complete.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are unchanged.
        """
        with self._failures.propagate_errors("finish_saving"):
            self._checkpoints.wait()

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
        """Load a checkpoint; see `Engine.load_checkpoint`."""
        options = LoadOptions(
            module_only=load_module_only,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            strict=strict,
            verify=self.config.checkpoint.verify,
            allow_changes=self.config.checkpoint.allow_changes,
        )
        with self._failures.propagate_errors("load_checkpoint"):
            self._settle()
            loaded = self._checkpoints.load(load_dir, tag, options)
            if loaded.counters is not None:
                self.global_steps = loaded.counters.global_steps
                self.consumed_samples = loaded.counters.consumed_samples
                self._restore_run_state(loaded.counters.run)
        return loaded.path, loaded.client

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        """Restore what `_run_state` returned; {} if a run without state has saved."""

    @torch.no_grad()
    def parameter_state(self) -> dict[str, Tensor]:
        """Return logical name -> full parameter, on the CPU of every rank; for small models.

        With bf16 or fp16, the fp32 master weight.
        """
        with self._failures.propagate_errors("parameter_state"):
            self._settle()
            values = {n: p.detach() for n, p in self._model.parameters.items()}
            if self._step is not None:
                values |= self._step.masters.gather_masters()
            return gather_full_tensors(values, self._model, self.mesh)

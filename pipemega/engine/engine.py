"""The engine that `pipemega.initialize` returns: the public methods of one rank of a training.

    train_batch   -> TrainingRun.train_step -> StepRunner.train -> reader, executor, optimizer step
    evaluate      -> Evaluator
    checkpoints   -> TrainingRun -> Checkpointer

Every method is collective, unless its docstring says otherwise: all ranks call it, in one order.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import gather_objects, on_all_ranks
from pipemega.engine.evaluation import OnOutput
from pipemega.engine.run.batch_reader import StepData
from pipemega.engine.run.training_data import evaluation_loader
from pipemega.engine.step_runner import StepRunner
from pipemega.engine.train_step import StepFeature
from pipemega.engine.training_run import TrainingRun
from pipemega.errors import ConfigError, StopTraining
from pipemega.fault_tolerance.error_propagation import failure_reporter, register_progress
from pipemega.optimizer import LRSchedule, StepReport
from pipemega.optimizer.lr_schedules import SchedulerMaker, TorchSchedule
from pipemega.pipeline.model.stages import gather_full_tensors
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import Timeline

_Outputs = TypeVar("_Outputs")


class Engine:
    """Trains a model; returned by `pipemega.initialize`.

    `train_batch` also does what the config asks of a run (docs/long_runs.md): it writes records,
    saves checkpoints, applies `training.on_nonfinite`, and ends the run after a signal or at a time
    limit. If no such key is set, it only trains.

    Attributes:
        config, mesh, batch: as given; `batch` is the solved batch equation.
        optimizer: torch's optimizer, over the master weights if they exist; None without training.
        num_parameters: parameters of the whole model; tied copies count once.
        timers: data, forward, backward, communication, optimizer; enabled by wall_clock_breakdown.
        steps: runs the steps of this rank.
        run: records, counters and checkpoints of the run.
    """

    def __init__(self, steps: StepRunner) -> None:
        self.config, self.mesh, self.batch = steps.config, steps.mesh, steps.batch
        self.timers, self.num_parameters = steps.timers, steps.num_parameters
        self.steps, self.run, self._failures = steps, TrainingRun(steps), failure_reporter()
        step = steps.optimizer_step
        self.optimizer: Optimizer | None = step.optimizer if step else None
        register_progress(self.run.progress)

    def train_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        *,
        batch: Any = None,
        return_outputs: bool = False,
    ) -> Any:
        """Train one step on one global batch.

        With `training.on_nonfinite.policy: "rollback"`, a step with inf or nan loads the newest
        checkpoint, and the next batch is trained: `global_steps` may be lower afterwards.

        Args:
            data_iter: yields the (inputs, labels) of this data rank's micro-batches; read on the
                pipeline ranks of the first and the last stage. None: the training data given to
                `initialize`.
            batch: instead of an iterator: (inputs, labels), pytrees of tensors with the
                train_batch_size / mesh.data samples of this data rank along dim 0, which are cut
                into micro-batches.
            return_outputs: also return the outputs of the last layer.

        Returns:
            the loss, averaged over the whole batch; the same on every rank. Or (loss, outputs):
            a list with the detached outputs of each micro-batch that has samples on the ranks of
            the last stage (a shard per tensor rank if the layer returns shards), else None.

        Raises:
            StopIteration: no data is left.
            ConfigError: there is no data, or `batch` cannot be cut into the micro-batches of a
                step; on every rank.
            StopTraining: a signal or `training.exit_after_minutes` ends the run; it is saved.
            DataError: the data ended within this batch; or the ranks of a data rank have read
                different data (config key data.compare_every).
            PipelineError: a layer or another rank failed; or as `settle`.
            ReplicaError: copies of a parameter differ (`training.check_replicas_every`).
        """
        run = self.run
        with self._failures.propagate_errors("train_batch"):
            if batch is not None and data_iter is not None:
                raise ConfigError("train_batch() takes an iterator or a batch, not both")
            loss, outputs = run.train_step(
                partial(
                    self.steps.train,
                    data_iter,
                    batch,
                    keep_outputs=return_outputs,
                    should_stop=run.should_stop,
                ),
                data_iter,
                has_next=batch is None,
            )
        if run.stopped:
            raise StopTraining(run.stopped)
        return (loss, outputs) if return_outputs else loss

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the calls of a loop without a pipeline: `engine(x)`, `backward`, `step`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "engine(x), engine.forward, engine.backward and engine.step do not exist with a "
            "pipeline: train_batch() does them for all micro-batches of a step; for outputs use "
            "infer(x), for a loss without gradients eval_batch(iterator)"
        )

    forward = backward = step = __call__

    def eval_batch(
        self,
        data_iter: Iterable[Any] | None = None,
        num_micro_batches: int | None = None,
        *,
        batch: Any = None,
        return_outputs: bool = False,
        on_output: OnOutput | None = None,
        split: str = "validation",
    ) -> Any:
        """Compute the loss on some micro-batches, without gradients, and record it.

        Args:
            data_iter: as for `train_batch`; micro-batches may have any size.
            num_micro_batches: how many to read; by default as many as in a training step.
            batch: instead of an iterator: (inputs, labels), pytrees of tensors with any number of
                samples along dim 0. They are cut into micro-batches; the last may be smaller.
            return_outputs: also return the outputs of the last layer.
            on_output: called with the (outputs, labels) of each micro-batch, in order, on the ranks
                of the last stage.
            split: name of the data in the records: "validation" or "test".

        Returns:
            the loss, the same on every rank; or (loss, outputs). `outputs` is a list on the ranks
            of the last stage (a shard per tensor rank if the layer returns shards), else None. A
            mean loss is the mean over the samples of a `batch`, or over the micro-batches of an
            iterator.
        """

        def evaluate() -> tuple[float, list[Any] | None]:
            if (data_iter is None) == (batch is None):
                raise ConfigError(
                    "eval_batch() needs either an iterator over micro-batches (inputs, labels), or "
                    "batch=(inputs, labels)"
                )
            if data_iter is None:
                data = self.steps.reader.evaluation_batch(batch)
            else:
                count = num_micro_batches or self.batch.num_microbatches
                data = self.steps.reader.next_evaluation(iter(data_iter), count)
            evaluator = self.steps.evaluator
            return evaluator.batch(data, keep_outputs=return_outputs, on_output=on_output)

        loss, outputs = self._recorded("eval_batch", evaluate, split)
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self,
        data: Any,
        num_batches: int | None = None,
        *,
        on_output: OnOutput | None = None,
        on_batch: Callable[[int], object] | None = None,
        numbers: Callable[[], Mapping[str, float]] | None = None,
        split: str = "validation",
    ) -> float:
        """Compute the loss on a data set, one global batch after the other, and record it once.

        Args:
            data: a dataset, iterable or DataLoader, as the `training_data` of `initialize`, read in
                its own order; or a BatchLoader, which continues at its position.
            num_batches: global batches to read; the data repeats if it has fewer. None: read the
                data once, with a partial batch at its end.
            on_output: as for `eval_batch`.
            on_batch: called on every rank after each global batch, with its number of samples.
            numbers: called on every rank after the last micro-batch; returns numbers for the
                record, by name.
            split: name of the data in the records.

        Returns:
            the mean over all samples (or over the weights of a WeightedLoss), the same on every
            rank.

        Raises:
            ConfigError: a BatchLoader that repeats its data, without `num_batches`.
            StopIteration: a BatchLoader ended before `num_batches`.
        """

        def evaluate() -> tuple[float, None]:
            if isinstance(data, BatchLoader):
                return self.steps.evaluator.over(data, num_batches, on_output, on_batch), None
            whole = num_batches is None
            with closing(evaluation_loader(self.config, self.mesh, data, whole=whole)) as loader:
                return self.steps.evaluator.over(loader, num_batches, on_output, on_batch), None

        return self._recorded("evaluate", evaluate, split, numbers)[0]

    def _recorded(
        self,
        name: str,
        evaluate: Callable[[], tuple[float, _Outputs]],
        split: str,
        numbers: Callable[[], Mapping[str, float]] | None = None,
    ) -> tuple[float, _Outputs]:
        """Call `evaluate` when the last step is final, and record the loss that it returns."""
        self.run.settle_before_evaluation()
        started = time.perf_counter()
        with self._failures.propagate_errors(name):
            self.steps.settle()
            loss, outputs = evaluate()
            metrics = {} if numbers is None else numbers()
        self.run.add_evaluation(loss, time.perf_counter() - started, split, metrics)
        return loss, outputs

    def infer(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the output of the last layer for each micro-batch; None on other stages' ranks."""
        with self._failures.propagate_errors("infer"):
            self.steps.settle()
            data = StepData(self.steps.reader.to_device(inputs), [], len(inputs))
            return self.steps.evaluator.outputs(data)

    def reset_shapes(self) -> None:
        """Let the next micro-batches have other shapes than the ones before; on every rank.

        For `pipeline.shapes: "cached"`, in which a change of the shapes is an error otherwise.
        """
        self.steps.settle()
        self.steps.executor.forget_shapes()

    def set_lr_scheduler(self, lr_scheduler: SchedulerMaker) -> None:
        """Replace the learning-rate schedule, as `initialize(lr_scheduler=...)`.

        Raises:
            ConfigError: there is no optimizer, or it returns no scheduler over `optimizer`.
        """
        with self._failures.propagate_errors("set_lr_scheduler"):
            self.steps.settle()
            step = self.steps.optimizer_step
            if step is None:
                raise ConfigError(
                    "set_lr_scheduler() needs an optimizer: add the section 'optimizer'",
                    on_every_rank=True,
                )
            by = "step" if self.config.scheduler is None else self.config.scheduler.by
            make = partial(TorchSchedule, step.optimizer, lr_scheduler, by)
            step.schedule = on_all_ranks(self.mesh.world, make)

    @torch.no_grad()
    def parameter_state(self) -> dict[str, Tensor]:
        """Return logical name -> full parameter, on the CPU of every rank; for small models.

        With bf16 or fp16, the fp32 master weight.
        """
        with self._failures.propagate_errors("parameter_state"):
            self.steps.settle()
            values = {n: p.detach() for n, p in self.steps.model.parameters.items()}
            if self.steps.optimizer_step is not None:
                values |= self.steps.optimizer_step.masters.gather_masters()
            return gather_full_tensors(values, self.steps.model, self.mesh)

    @torch.no_grad()
    def buffer_state(self) -> dict[str, Tensor]:
        """Return logical name -> persistent buffer of the first data rank, on every rank's CPU."""
        with self._failures.propagate_errors("buffer_state"):
            buffers = self.steps.model.persistent_buffers
            is_first = self.mesh.is_first_replica
            local = {n: b.cpu() for n, b in buffers.items()} if is_first else {}
            parts = gather_objects(local, self.mesh.world)
            return {name: buffer.clone() for part in parts for name, buffer in part.items()}

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> Path | str:
        """Save a checkpoint with the complete state of the run; return its path.

        With `checkpoint.async` this method copies the state and returns; a background thread writes
        the files. If writing fails, the next call reports it: `finish_saving` raises the error,
        `save_checkpoint` logs it and then saves synchronously.

        If `checkpoint.interval` has just saved this step in this folder, and neither `tag` nor
        `client_state` is given, nothing is written again.

        Args:
            save_dir: a folder on a file system that all ranks share, or an fsspec URL.
            tag: name of the checkpoint; default: `global_step<N>`.
            client_state: state of the caller, returned by `load_checkpoint`: tensors and plain
                values, the same on every rank; None: the attribute `client_state`.
            save_latest: make this the checkpoint that `load_checkpoint` loads by default.

        Raises:
            ConfigError: `save_dir` is no path.
            CheckpointError: a rank could not write its files; earlier checkpoints are unchanged.
        """
        if not isinstance(save_dir, str | os.PathLike):
            raise ConfigError(
                f"save_checkpoint() takes a folder as save_dir, not {save_dir!r}: give a path"
            )
        if tag is None and client_state is None:
            saved = self.run.saved_automatically(save_dir)
            if saved is not None:
                return saved
        return self.run.save_checkpoint(save_dir, tag, client_state, save_latest)

    def finish_saving(self) -> None:
        """Wait until background writes of `checkpoint.async` are complete.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are unchanged.
        """
        with self._failures.propagate_errors("finish_saving"):
            self.run.checkpointer.wait()

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
        """Load a checkpoint; a run on another mesh may have saved it.

        The records continue after the step of the checkpoint: lines of later steps are dropped.

        Args:
            load_dir: the `save_dir` of `save_checkpoint`.
            tag: name of the checkpoint; default: the newest complete one. If newer ones are
                incomplete or damaged, a warning lists them.
            load_module_only: load only parameters and buffers; the run starts at step 0.
            load_optimizer_states: if False, keep the current optimizer state.
            load_lr_scheduler_states: if False, keep the current learning rate.
            strict: if False, load the parameters that match, and log every difference.

        Returns:
            the path of the checkpoint, and its client_state.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged, or it was saved with
                another model or another order of the data.
        """
        with self._failures.propagate_errors("load_checkpoint"):
            return self.run.load_checkpoint(
                load_dir,
                tag,
                module_only=load_module_only,
                optimizer_states=load_optimizer_states,
                lr_scheduler_states=load_lr_scheduler_states,
                strict=strict,
            )

    def close(self) -> None:
        """End the run: write the last records, save to `checkpoint.save` if this step was not
        saved, and close the sinks.

        `pipemega.run` calls it when the script ends without an error. Without `pipemega.run`, call
        it after the last step.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are unchanged.
        """
        with self._failures.propagate_errors("close"):
            self.run.close()
            self.run.checkpointer.wait()

    def check_replicas(self) -> None:
        """Compare all copies of each parameter bit by bit.

        Raises:
            ReplicaError: copies differ; on every rank.
        """
        with self._failures.propagate_errors("check_replicas"):
            self.run.check_replicas()

    def settle(self) -> None:
        """Complete the last step, so that parameters, optimizer and learning rate are final.

        With `pipeline.optimizer_sync: "post_validate"` the last step may still be undone after
        `train_batch` has returned; with `zero_optimization.overlap_comm` this rank may still be
        gathering parameters. The engine's own methods settle first. Call it before you read
        `module`, `optimizer` or `lr_scheduler`.

        Raises:
            NonFiniteError, LossScaleError: as `train_batch` without post-validation.
        """
        self.run.settle()

    def set_epochs(self, epochs: int) -> None:
        """Set `training.epochs` after `initialize`, before the first step of this process.

        Raises:
            ConfigError: the config has another length, a step was trained, or the data can be read
                only once.
        """
        with self._failures.propagate_errors("set_epochs"):
            self.steps.data.set_epochs(epochs, after_step=self.step_samples > 0)

    def set_training_data(
        self, data: Any, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """Give the engine its training data after `initialize`, which has the same arguments.

        If the run has epochs, call `set_epochs` first. If a checkpoint was loaded, the data
        continue at its position.

        Raises:
            ConfigError: the engine has training data.
            DataError: the checkpoint was saved with other data.
        """
        with self._failures.propagate_errors("set_training_data"):
            loader = self.steps.data.set(data, collate_fn)
            self.run.checkpointer.set_loader(loader)
            self.steps.epoch = self.steps.data.start()

    def add_feature(self, feature: StepFeature) -> None:
        """Let `feature` watch each step from now on. Not collective."""
        self.steps.features.append(feature)

    def trace_next_step(self, memory: bool = False) -> None:
        """Trace the next `train_batch`; `memory`: also what each instruction allocates."""
        self.steps.trace_next_step(memory)

    # Not collective

    @property
    def module(self) -> nn.ModuleList:
        """The local stages, in the order of the model.

        Stages whose `module` was read before the first step do not move
        (`initialize(example=...)`).
        """
        self.steps.stages_were_read = True
        return self.steps.stages

    @property
    def local_stages(self) -> nn.ModuleList:
        """As `module`, for a reader that keeps no reference: the first step may move the stages."""
        return self.steps.stages

    @property
    def plan(self) -> Plan:
        """What every pipeline rank runs in a step."""
        return self.steps.plan

    @property
    def lr_scheduler(self) -> LRSchedule | None:
        """Stepped by `train_batch`; None: the learning rate is constant."""
        return self.steps.schedule

    @property
    def loader(self) -> BatchLoader | None:
        """The loader of the training data; None if the caller passes iterators."""
        return self.steps.loader

    @property
    def client_state(self) -> Any:
        """Saved with each checkpoint for which `save_checkpoint` gets no other state; set by the
        caller, and by `load_checkpoint`."""
        return self.run.client_state

    @client_state.setter
    def client_state(self, state: Any) -> None:
        self.run.client_state = state

    @property
    def global_steps(self) -> int:
        """Training steps so far, skipped ones included."""
        return self.steps.global_steps

    @property
    def consumed_samples(self) -> int:
        """Samples of these steps, over all data ranks."""
        return self.steps.consumed_samples

    @property
    def step_samples(self) -> int:
        """Samples of the last step; fewer than a batch if it was partial."""
        return self.steps.step_samples

    @property
    def epoch(self) -> int:
        """Completed passes over the training data.

        Without `training.epochs` they are counted for map-style data only.
        """
        return self.steps.epoch

    @property
    def stop_requested(self) -> bool:
        """Whether the end of the run was requested on some rank in the last `train_batch`."""
        return self.steps.stop_requested

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None: not known."""
        return self.steps.data.total_steps

    @property
    def epochs(self) -> int | None:
        """Passes over the training data in the whole run; None: it has steps."""
        return self.steps.data.epochs

    @property
    def is_complete(self) -> bool:
        """Whether all steps or epochs of the run are done."""
        return self.steps.is_complete

    @property
    def eval_batches(self) -> int | None:
        """Global batches per evaluation (`training.eval_steps`); None: all."""
        return self.config.training.eval_batches(self.epochs)

    @property
    def last_step(self) -> StepReport | None:
        """Report of the last step; None before the first.

        With `pipeline.optimizer_sync: "post_validate"` this waits for the gradient norm.
        """
        return self.steps.last_step

    @property
    def skipped_steps(self) -> int:
        """Skipped steps so far; waits as `last_step` does."""
        return self.steps.skipped_steps

    def take_reports(self) -> list[StepReport]:
        """Return the reports of steps that became final since the last call, in order.

        Does not wait. Only these reports have `origin`: where inf or nan arose.
        """
        taken = list(self.steps.reports)
        self.steps.reports.clear()
        return taken

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step before clipping; None before the first."""
        return self.last_step.grad_norm if self.last_step else None

    @property
    def work_seconds(self) -> float:
        """Seconds that this rank read data and computed in its last step."""
        return self.steps.busy_time.seconds

    @property
    def last_trace(self) -> Any:
        """The `profiling.step_trace.Trace` of the last traced step, with the times of each
        instruction; None before it, and on other ranks than 0."""
        return self.steps.tracer.last_trace if self.steps.tracer else None

    @property
    def last_timeline(self) -> Timeline | None:
        """The timeline of the last traced step; on rank 0 only."""
        return self.last_trace.timeline if self.last_trace else None

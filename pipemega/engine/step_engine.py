"""Steps, evaluation and checkpoints of a model; each process holds the engine of its rank.

Every method is collective, unless its docstring says otherwise: all ranks call it, in one order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipemega.checkpoint import Checkpointer, Counters, LoadOptions
from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.diagnostics.nan_origin import NonFiniteLocator
from pipemega.diagnostics.replica_check import check_replicas
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.mesh import Mesh
from pipemega.engine.batch_reader import BatchReader, StepData
from pipemega.engine.build_loader import share_of
from pipemega.engine.components import Components
from pipemega.engine.evaluation import Evaluator
from pipemega.engine.schedule_tuner import ScheduleTuner
from pipemega.engine.step_callbacks import MeasureBusyTime, StepCallback, TraceSteps
from pipemega.engine.step_runner import StepRunner
from pipemega.engine.training_data import TrainingData
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor.step_phases import PIPELINE, StepPhases
from pipemega.optimizer import LRSchedule, StepReport
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import Timeline
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
        step_samples: samples of the last step; fewer than a batch if it was partial.
        epoch: completed passes over the training data. Without `training.epochs` they are counted
            for map-style data only.
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
        self.timers = components.timers
        self.num_parameters = components.num_parameters
        self.global_steps, self.consumed_samples, self.stop_requested = 0, 0, False
        self.step_samples, self.epoch = 0, 0
        self._data = TrainingData(config, mesh, components.loader)
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
                on_failure=self._uncount_step,
            )
        self._phases = step.phases if step is not None else StepPhases()
        self._reports: deque[StepReport] = deque(maxlen=_MAX_REPORTS)
        self._checkpoints = Checkpointer(config, mesh, model, step, self.loader, self.total_steps)
        self._failures = failure_reporter()
        stages, share = plan.rank_of_stage, share_of(config, mesh)
        self._reader = BatchReader(mesh, stages, share, config.data.compare_every)
        self._evaluator = Evaluator(mesh, executor, self._reader, stages)
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

    # Length of the run

    @property
    def loader(self) -> BatchLoader | None:
        return self._data.loader

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None: not known. Not collective."""
        return self._data.total_steps

    @property
    def epochs(self) -> int | None:
        """Passes over the training data in the whole run; None: it has steps. Not collective."""
        return self._data.epochs

    @property
    def is_complete(self) -> bool:
        """Whether all steps or epochs of the run are done. Not collective."""
        if self.epochs is not None:
            return self.epoch >= self.epochs
        return self.total_steps is not None and self.global_steps >= self.total_steps

    @property
    def eval_batches(self) -> int | None:
        """Global batches per evaluation (`training.eval_steps`); None: all. Not collective."""
        return self.config.training.eval_batches(self._data.epochs)

    def set_epochs(self, epochs: int) -> None:
        """Set `training.epochs` after `initialize`, before the first step of this process.

        Raises:
            ConfigError: the config has another length, a step was trained, or the data can be read
                only once.
        """
        with self._failures.propagate_errors("set_epochs"):
            self._data.set_epochs(epochs, after_step=self.step_samples > 0)

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
            loader = self._data.set(data, collate_fn)
            self._checkpoints.set_loader(loader)
            self._start_at_epoch(loader.epoch)

    # Training

    def _train_batch(
        self, data_iter: Iterator[Any] | None, batch: Any, keep_outputs: bool
    ) -> tuple[float, list[Any] | None]:
        """Train one step, as `Engine.train_batch`; return the loss, and the outputs if kept."""
        with self._failures.propagate_errors("train_batch"), self._locator.add_origin_to_errors():
            runner = self._runner
            if runner is None or self._model.loss_fn is None:
                needed = "a loss: give PipelineModule(layers, loss_fn=...)"
                if runner is None:
                    needed = (
                        "an optimizer: add the section 'optimizer', or give "
                        "initialize(optimizer=...)"
                    )
                raise ConfigError(f"train_batch needs {needed}", on_every_rank=True)
            self._phases.start(exact=self._tracing.tracer.is_due(self.global_steps + 1))
            data = self._read_batch(data_iter, batch)
            step = runner.new_step(
                self.global_steps + 1, self.plan, data, keep_outputs=keep_outputs
            )
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
            self._count_step(data)
            return report.loss, self._evaluator.kept(results)

    def _read_batch(self, data_iter: Iterator[Any] | None, batch: Any) -> StepData:
        self._data.check_source(data_iter is not None or batch is not None)
        self._data.check_schedule(self.lr_scheduler)
        with self.timers("data"), self._phases("data"), self._busy_time.reading():
            try:
                data = self._reader.next_step(self.loader, data_iter, batch)
            except StopIteration:
                # After the end of the data no step follows that would settle the last one.
                self._settle()
                raise
        self._data.epoch = self._data.epoch if data.epoch is None else data.epoch
        return data

    def _count_step(self, data: StepData) -> None:
        self.global_steps += 1
        self.step_samples = data.num_samples
        self.consumed_samples += data.num_samples
        if self._data.epochs is not None and self._data.epoch > self.epoch:
            self._settle()
            self._end_epochs()
        self.epoch = self._data.epoch

    def _end_epochs(self) -> None:
        """Advance the schedule to the epoch of the data."""
        for _ in range(self.epoch, self._data.epoch):
            if self._step is not None:
                self._step.end_epoch()
        self.epoch = self._data.epoch

    def _start_at_epoch(self, epoch: int) -> None:
        self.epoch = self._data.epoch = epoch

    def _uncount_step(self) -> None:
        self.global_steps -= 1
        self.consumed_samples -= self.step_samples

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
                self._start_at_epoch(0 if self.loader is None else self.loader.epoch)
                self._restore_run_state(loaded.counters.run)
        return loaded.path, loaded.client

    def reload(self, folder: str | Path) -> None:
        """Load the newest checkpoint of a folder; the data continue after the last batch read."""
        position = None if self.loader is None else self.loader.state_dict()
        epoch = self._data.epoch
        self.load_checkpoint(folder)
        if self.loader is not None and position is not None:
            self.loader.load_state_dict(position)
            self._data.epoch = epoch
            self._end_epochs()

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        """Restore what `_run_state` returned; {} if a run without state has saved."""

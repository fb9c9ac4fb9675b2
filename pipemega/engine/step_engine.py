"""Steps of a model; each process holds the engine of its rank.

Every method is collective, unless its docstring says otherwise: all ranks call it, in one order.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipemega.checkpoint import Checkpointer
from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.diagnostics.nan_origin import NonFiniteLocator
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.mesh import Mesh
from pipemega.engine.batch_reader import BatchReader, StepData
from pipemega.engine.comms_logger import CommsLogger
from pipemega.engine.components import Components
from pipemega.engine.evaluation import Evaluator
from pipemega.engine.flops_profiler import FlopsProfiler, LayerSource, layer_sources
from pipemega.engine.running_statistics import BatchNormUpdates
from pipemega.engine.step_callbacks import MeasureBusyTime, StepCallback, TraceSteps, TrainStep
from pipemega.engine.step_runner import StepRunner
from pipemega.engine.training_data import TrainingData, share_of
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor.timers import PIPELINE, StepPhases
from pipemega.optimizer import LRSchedule, PostValidatedStep, StepReport
from pipemega.pipeline.execution_state import Results
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import Timeline
from pipemega.profiling.step_trace import Trace
from pipemega.random import preserve_rng

# Reports kept for `take_reports`: a loop that calls it after each step finds two at most.
_MAX_REPORTS = 8


class StepEngine:
    """Trains single steps; `CheckpointedEngine` saves them, `Engine` adds what belongs to a run.

    Attributes:
        config, mesh, batch: as given; `batch` is the solved batch equation.
        module: the local stages, an `nn.ModuleList` in the order of the model. Stages whose
            `module` was read before the first step do not move (`initialize(example=...)`).
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

    def __init__(self, config: Config, mesh: Mesh, plan: Plan, components: Components) -> None:
        self.config, self.mesh, self.plan = config, mesh, plan
        self.batch = config.batch(mesh.data.size)
        self._stages, self._module_was_read = nn.ModuleList(), False
        self.timers = components.timers
        self.num_parameters = components.num_parameters
        self.global_steps, self.consumed_samples, self.stop_requested = 0, 0, False
        self.step_samples, self.epoch = 0, 0
        self._data = TrainingData(config, mesh, components.loader)
        self._step = step = components.optimizer_step
        if step is not None:
            step.refuse_other_steps()
        self.optimizer: Optimizer | None = step.optimizer if step else None
        self.lr_scheduler: LRSchedule | None = step.schedule if step else None
        self._phases = step.phases if step is not None else StepPhases()
        self._reports: deque[StepReport] = deque(maxlen=_MAX_REPORTS)
        self._checkpoints = Checkpointer(
            config, mesh, components.model, step, self.loader, self.total_steps
        )
        self._failures = failure_reporter()
        self._plans, self._late_choice = components.plans, components.late_choice
        self._tracing = TraceSteps(config.monitor.trace, mesh, self._phases)
        self._busy_time = MeasureBusyTime(mesh.device, config.training.stragglers.factor > 0)
        callbacks = (
            components.tuner,
            self._tracing,
            self._busy_time,
            CommsLogger(config.comms_logger, mesh) if config.comms_logger.enabled else None,
        )
        self._callbacks: list[StepCallback] = [each for each in callbacks if each is not None]
        self._profiler: FlopsProfiler | None = None
        self._use_stages(components.model, components.executor)
        self._mover = components.mover
        if step is not None:
            self._mover.watch(components.model, step)

    def _use_stages(self, model: LocalModel, executor: Executor) -> None:
        """Run, read, evaluate, trace, profile and save with these stages from now on."""
        config, mesh, step = self.config, self.mesh, self._step
        self._model, self._executor = model, executor
        self._batch_norms = BatchNormUpdates(model, mesh.data)
        self._stages._modules.clear()
        self._stages.extend(model.modules)
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
        stages, share = self.plan.rank_of_stage, share_of(config, mesh)
        every, cut = config.data.compare_every, model.vocabulary is not None
        self._reader = BatchReader(
            mesh,
            stages,
            share,
            self._data.sizes,
            every,
            cut,
            lambda: step is not None and step.masters.frozen.have_changed,
            not isinstance(step, PostValidatedStep),
        )
        self._evaluator = Evaluator(mesh, executor, self._reader, stages, cut)
        gradients, num_layers = step.gradients if step else None, model.bounds[-1]
        self._locator = NonFiniteLocator(mesh, executor, gradients, num_layers, config.fp16.enabled)
        self._tracing.executor, self._checkpoints.model = executor, model
        former, self._profiler = self._profiler, self._build_profiler()
        self._callbacks = [each for each in self._callbacks if each is not former]
        if self._profiler is not None:
            self._callbacks.append(self._profiler)

    def _build_profiler(self) -> FlopsProfiler | None:
        section = self.config.flops_profiler
        if not section.enabled:
            return None
        sources = self._layer_sources()
        return FlopsProfiler(
            section, self.mesh, self.batch, sources, self.timers, self.num_parameters
        )

    @property
    def module(self) -> nn.ModuleList:
        self._module_was_read = True
        return self._stages

    @property
    def local_stages(self) -> nn.ModuleList:
        """As `module`, for a reader that keeps no reference: the first step may move the stages."""
        return self._stages

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
        return self._data.is_complete(self.global_steps, self.consumed_samples)

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
            self.epoch = self._data.start()

    # Training

    def _layer_sources(self) -> list[LayerSource]:
        """Return the layers of this rank, and what reports them to an observer."""
        return layer_sources(self._model)

    def _train_batch(
        self, data_iter: Iterator[Any] | None, batch: Any, keep_outputs: bool
    ) -> tuple[float, list[Any] | None]:
        """Train one step, as `Engine.train_batch`; return the loss, and the outputs if kept."""
        with self._failures.propagate_errors("train_batch"):
            self._training_runner("train_batch")
            if self._model.loss_fn is None:
                raise ConfigError(
                    "train_batch needs a loss: give PipelineModule(layers, loss_fn=...)",
                    on_every_rank=True,
                )
            self._phases.start(exact=self._tracing.tracer.is_due(self.global_steps + 1))
            with self._locator.add_origin_to_errors():
                data = self._read_batch(data_iter, batch)
            is_frozen_anew = self._reader.signalled
            data = self._with_final_stages(data)
            self._freeze(is_frozen_anew)
            with self._locator.add_origin_to_errors(), self._batch_norms.dropped_on_error():
                return self._train_on(data, keep_outputs=keep_outputs)

    def _with_final_stages(self, data: StepData) -> StepData:
        """Choose plan and stages of the first step, if its shapes were unknown until now."""
        return data

    def _freeze(self, agreed: bool) -> None:
        """Leave out the parameters that the caller has frozen since the last step; collective.

        Args:
            agreed: all ranks know that some rank has frozen or unfrozen parameters.
        """
        assert self._step is not None
        if not agreed:
            if self._step.masters.frozen.have_changed:
                raise ConfigError(
                    "parameters were frozen or unfrozen between two steps. With "
                    "pipeline.optimizer_sync 'post_validate' and map-style training_data the "
                    "ranks do not wait for each other before a step: set pipeline.optimizer_sync "
                    "to 'fenced', or give train_batch() the data"
                )
            return
        self._reader.signalled = False
        # The last step may still be repeated, with the parameters that it had.
        self._settle()
        self._step.masters.frozen.update(self.mesh)
        # Messages may need a gradient no more, or again.
        self._executor.forget_shapes(declared=True)

    def _train_on(self, data: StepData, *, keep_outputs: bool) -> tuple[float, list[Any] | None]:
        runner = self._training_runner("train_batch")
        step = self._begin_step(runner, data, keep_outputs=keep_outputs)
        with preserve_rng(self.mesh.device), self._phases(PIPELINE):
            results = runner.forward_backward(step)
        self._locator.record_step(step.plan, step.micro_batches())
        # Before the stages may move.
        outputs = self._evaluator.kept(results)
        report = self._finish_step(runner, step, data, results)
        return report.loss, outputs

    def _training_runner(self, caller: str) -> StepRunner:
        if self._runner is None:
            raise ConfigError(
                f"{caller} needs an optimizer: add the section 'optimizer', or give "
                "initialize(optimizer=...)",
                on_every_rank=True,
            )
        return self._runner

    def _begin_step(
        self, runner: StepRunner, data: StepData, *, keep_outputs: bool = False
    ) -> TrainStep:
        self.plan = self._plans.of(self.plan, self._model.bounds, len(data.inputs))
        step = runner.new_step(self.global_steps + 1, self.plan, data, keep_outputs=keep_outputs)
        for callback in self._callbacks:
            callback.before_step(step)
        return step

    def _finish_step(
        self, runner: StepRunner, step: TrainStep, data: StepData, results: Results
    ) -> StepReport:
        """Update the parameters after all backwards of `step`, and count it."""
        self._batch_norms.end_step()
        with self.timers("optimizer"):
            report = runner.optimizer_step(results, data.num_samples)
        self._report_final_steps()
        step.phases = self._phases.stop()
        for callback in reversed(self._callbacks):
            callback.after_step(step)
        self.plan = step.next_plan or self.plan
        self.stop_requested = report.stop_votes > 0
        self._count_step(data)
        return report

    def _read_batch(self, data_iter: Iterator[Any] | None, batch: Any) -> StepData:
        given = data_iter is not None or batch is not None
        self._data.check_source(given)
        self._data.check_schedule(self.lr_scheduler)
        with self.timers("data"), self._phases("data"), self._busy_time.reading():
            try:
                position = self._data.position(self.consumed_samples, given=given)
                data = self._reader.next_step(self.loader, data_iter, batch, position)
            except StopIteration:
                # After the end of the data no step follows that would settle the last one.
                self._settle()
                raise
        self._data.count(data, given=given)
        return data

    def step_started(self) -> float:
        """Return the clock reading from which the seconds of the next step count."""
        return time.perf_counter()

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
            self._batch_norms.on_report(report)
            for callback in self._callbacks:
                callback.on_report(report)

"""The training steps of one rank, on its stages, which may move between two steps.

    read, freeze                      `read`; in the first step the stages may move
    forwards, backwards               the executor runs the plan
    optimizer step, reports           `finish`; with post-validation the report of the step before
    features, next plan, counters     `finish`; the stages may move

Every method is collective, unless its docstring says otherwise.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.diagnostics.nan_origin import NonFiniteLocator
from pipemega.distributed.device_waits import synchronize, wait
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.engine_parts import Components
from pipemega.engine.evaluation import Evaluator
from pipemega.engine.run.batch_reader import BatchReader, StepData
from pipemega.engine.run.training_data import TrainingData, share_of
from pipemega.engine.running_statistics import StatisticsUpdates
from pipemega.engine.stage_mover import BuiltModules, describe_cut
from pipemega.engine.train_step import MeasureBusyTime, PlanChange, StepFeature, TrainStep
from pipemega.errors import ConfigError, PipemegaError
from pipemega.lazy_imports import load_name
from pipemega.monitor import get_logger
from pipemega.monitor.timers import PIPELINE, StepPhases
from pipemega.optimizer import LRSchedule, StepReport
from pipemega.optimizer.post_validation import PostValidatedStep, SpeculativeRunner
from pipemega.pipeline.connections import message_order
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.kernel_warmup import KernelWarmup
from pipemega.pipeline.model.module import RngKey
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.recorder import NULL_RECORDER, Recorder
from pipemega.random import preserve_rng

# Reports kept for `take_reports`: a loop that calls it after each step finds two at most.
_MAX_REPORTS = 8

# Key of the config -> the feature that it enables; imported only then.
_FEATURES = {
    "monitor.trace": "pipemega.profiling.step_tracer:Tracer",
    "comms_logger": "pipemega.profiling.communication:CommsLogger",
    "flops_profiler": "pipemega.profiling.flops_profile:FlopsProfiler",
}


class StepRunner:
    """Runs the training steps of one rank.

    Args:
        config, mesh: the config and the device mesh of the run.
        components: what `initialize` has built.
        in_loop: a loop of the caller runs the one layer, without a plan.

    Attributes:
        stages: the local stages, in the order of the model.
        stages_were_read: the caller may refer to the stages, so that they do not move.
        model, executor, reader, evaluator, locator: they belong to the current stages.
        tracer: traces steps, a `profiling.step_tracer.Tracer`; None: no step was to be traced.
        profiler: the table of `flops_profiler`; None: not enabled.
        features: watch the steps, in this order.
        optimizer_step, schedule: None without training.
        data: the training data, and the length of the run.
        experts: the routers of the whole model.
        global_steps, consumed_samples, step_samples, epoch, stop_requested: as of `Engine`.
        reports: the newest reports of steps that became final.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        components: Components,
        *,
        in_loop: bool = False,
    ) -> None:
        self.config, self.mesh, self.plan = config, mesh, components.first.plan
        self.batch, self.timers = config.batch(mesh.data.size), components.timers
        self.num_parameters, self.experts = components.num_parameters, components.experts
        self.stages, self.stages_were_read = nn.ModuleList(), False
        self.global_steps, self.consumed_samples, self.stop_requested = 0, 0, False
        self.step_samples, self.epoch = 0, 0
        self._weight_per_sample: Callable[[], float] = partial(float, 1)
        self.data = TrainingData(config, mesh, components.loader)
        self.optimizer_step = step = components.optimizer_step
        if step is not None:
            step.refuse_other_steps()
        self.phases = step.phases if step is not None else StepPhases()
        self.reports: deque[StepReport] = deque(maxlen=_MAX_REPORTS)
        self._plans, self._late_choice = components.first.plans, components.late_choice
        self._in_loop = in_loop
        self.busy_time = MeasureBusyTime(mesh.device, config.training.stragglers.factor > 0)
        self.features: list[StepFeature] = [self.busy_time]
        self.tracer: Any = None
        if config.monitor.trace.steps or config.monitor.trace.every:
            self._add_tracer()
        if components.first.tuner is not None:
            self.features.insert(0, components.first.tuner)
        if config.comms_logger.enabled:
            self.features.append(load_name(_FEATURES["comms_logger"])(config.comms_logger, mesh))
        self.profiler: Any = None
        self.mover = components.mover
        self._use_stages(components.model, components.executor)
        if step is not None:
            self.mover.watch(components.model, step)

    def _use_stages(self, model: LocalModel, executor: Executor) -> None:
        """Run, read, evaluate, trace and profile with these stages from now on."""
        config, mesh, step = self.config, self.mesh, self.optimizer_step
        self.model, self.executor = model, executor
        self._statistics = StatisticsUpdates(model, mesh, self.experts)
        self.stages._modules.clear()
        self.stages.extend(model.modules)
        self._speculative: SpeculativeRunner | None = None
        if isinstance(step, PostValidatedStep):
            self._speculative = SpeculativeRunner(executor, self._validate, self._take_reports)
        self.reader = BatchReader(
            mesh,
            executor.ends.reads,
            share_of(config, mesh),
            self.data.sizes,
            config.data.compare_every,
            lambda: step is not None and step.masters.frozen.have_changed,
            step is None or step.is_fenced,
        )
        self._warmup: KernelWarmup | None = None
        has_queues = message_order(mesh.pipeline, mesh.device) == "queues"
        warms_up = has_queues and config.pipeline.warm_up
        if (warms_up or executor.needs_first_run) and not self._in_loop:
            self._warmup = KernelWarmup(executor, mesh.device)
        self.evaluator = Evaluator(mesh, executor, self.reader, self.plan, self._warmup)
        gradients, num_layers = step.gradients if step else None, model.bounds[-1]
        self.locator = NonFiniteLocator(mesh, executor, gradients, num_layers, config.fp16.enabled)
        if self.profiler is not None:
            self.features.remove(self.profiler)
            self.profiler = None
        if config.flops_profiler.enabled:
            self.profiler = load_name(_FEATURES["flops_profiler"])(
                config.flops_profiler,
                mesh,
                self.batch,
                model,
                self.timers,
                self.num_parameters,
                self._in_loop,
            )
            self.features.append(self.profiler)

    # One step

    def train(
        self,
        data_iter: Iterator[Any] | None,
        batch: Any,
        *,
        keep_outputs: bool,
        should_stop: Callable[[], bool],
    ) -> tuple[float, list[Any] | None]:
        """Train one step, as `Engine.train_batch`.

        Args:
            should_stop: called late in the step: does this rank request the end of the run?

        Returns:
            the loss; and the outputs if they are kept, on the ranks of the last stage.
        """
        self.check_training("train_batch")
        if self.model.loss_fn is None:
            raise ConfigError(
                "train_batch needs a loss: give PipelineModule(layers, loss_fn=...)",
                on_every_rank=True,
            )
        is_traced = self.tracer is not None and self.tracer.is_due(self.global_steps + 1)
        self.phases.start(exact=is_traced)
        with self.locator.add_origin_to_errors():
            data = self.read(data_iter, batch)
        is_frozen_anew = self.reader.signalled
        data = self._with_final_stages(data)
        self._freeze(is_frozen_anew)
        self._weight_per_sample = self._start_weight(data)
        with self.locator.add_origin_to_errors(), self._statistics.dropped_on_error():
            self._load_kernels(data)
            step, recorder = self.begin(data)
            micro_batches = partial(self._micro_batches, step, keep_outputs)
            with preserve_rng(self.mesh.device), self.phases(PIPELINE):
                results = self._forward_backward(step, micro_batches, recorder, should_stop)
            self.locator.record_step(step.plan, micro_batches())
            # Before the stages may move.
            outputs = self.evaluator.kept(results)
            report = self.finish(step, results, should_stop)
        return report.loss, outputs

    def check_training(self, caller: str) -> None:
        """Refuse `caller` without an optimizer.

        Raises:
            ConfigError: there is none; on every rank.
        """
        if self.optimizer_step is None:
            raise ConfigError(
                f"{caller} needs an optimizer: add the section 'optimizer', or give "
                "initialize(optimizer=...)",
                on_every_rank=True,
            )

    def read(self, data_iter: Iterator[Any] | None, batch: Any) -> StepData:
        """Read the micro-batches of the next step."""
        given = data_iter is not None or batch is not None
        self.data.check_source(given)
        self.data.check_schedule(self.schedule)
        with self.timers("data"), self.phases("data"), self.busy_time.reading():
            try:
                position = self.data.position(self.consumed_samples, given=given)
                data = self.reader.next_step(self.loader, data_iter, batch, position)
            except StopIteration:
                # After the end of the data no step follows that would settle the last one.
                self.settle()
                raise
        self.data.count(data, given=given)
        return data

    def _freeze(self, agreed: bool) -> None:
        """Leave out the parameters that the caller has frozen since the last step.

        Args:
            agreed: all ranks know that some rank has frozen or unfrozen parameters.
        """
        assert self.optimizer_step is not None
        frozen = self.optimizer_step.masters.frozen
        if not agreed:
            if frozen.have_changed:
                raise ConfigError(
                    "parameters were frozen or unfrozen between two steps. With "
                    "pipeline.optimizer_sync 'post_validate' and map-style training_data the "
                    "ranks do not wait for each other before a step: set pipeline.optimizer_sync "
                    "to 'fenced', or give train_batch() the data"
                )
            return
        self.reader.signalled = False
        # The last step may still be repeated, with the parameters that it had.
        self.settle()
        frozen.update(self.mesh)
        # Messages may need a gradient no more, or again.
        self.executor.forget_shapes(declared=True)

    def _load_kernels(self, data: StepData) -> None:
        """Run micro-batches with new shapes before messages are posted; see `kernel_warmup`."""
        if (warmup := self._warmup) is None:
            return
        plan = self._plans.of(self.plan, self.model.bounds, len(data.inputs))
        if not warmup.is_due(plan, data.shares, data.num_samples):
            return
        # A step that is not final would be repeated with its gradients.
        self.settle()
        assert self.optimizer_step is not None
        step = TrainStep(self.global_steps + 1, plan, data)
        batch = self._micro_batches(step, keep_outputs=False)
        warmup.run(plan, batch, data.num_samples, self.optimizer_step.gradients.zero)

    def begin(self, data: StepData) -> tuple[TrainStep, Recorder]:
        """Return the next step, whose data were read, and what times its instructions."""
        self.plan = self._plans.of(self.plan, self.model.bounds, len(data.inputs))
        step = TrainStep(self.global_steps + 1, self.plan, data)
        for feature in tuple(self.features):
            memory = feature.traces(step)
            if memory is not None:
                self.trace_next_step(memory)
        self._statistics.record_experts(any(each.records_experts for each in self.features))
        recorders = [feature.before_step(step) or NULL_RECORDER for feature in self.features]
        found = (each for each in recorders if each is not NULL_RECORDER)
        return step, next(found, NULL_RECORDER)

    def _micro_batches(self, step: TrainStep, keep_outputs: bool) -> MicroBatches:
        assert self.optimizer_step is not None
        data, axis, count = step.data, self.mesh.data, len(step.data.inputs)
        seed, number = self.config.seed, step.number - 1
        return MicroBatches(
            data.inputs,
            data.labels,
            # Keys have the index in the global batch: dropout is the same on every mesh.
            rng_keys=[RngKey(seed, number, m * axis.size + axis.rank) for m in range(count)],
            # Validating the previous step may change the loss scale.
            loss_factor=self.optimizer_step.loss_scale.scale / count,
            shares=data.shares,
            keep_outputs=keep_outputs,
            counted=data.counted,
            weight_per_sample=self._weight_per_sample,
        )

    def _start_weight(self, data: StepData) -> Callable[[], float]:
        """Start to sum the weights of the losses of a step; return what waits for it.

        Only auxiliary losses need it before the end of the step. Collective over the world, without
        a wait, if the loss depends on the labels that are ignored.
        """
        weight_of = getattr(self.model.loss_fn, "weight_of_labels", None)
        if weight_of is None or self.config.training.loss_reduction == "micro_batch":
            # A mean loss has weight 1.
            return partial(float, 1 / self.batch.micro_batch_size)
        shares, labels = data.shares or (1.0,) * len(data.inputs), data.labels
        if data.pairs is not None:
            labels = [pair[1] for pair in data.pairs]  # on the host
        own = 0.0
        if self.plan.rank_of_stage[-1] == self.mesh.pipeline.rank and self.mesh.tensor.rank == 0:
            own = sum(float(weight_of(x)) for x, share in zip(labels, shares, strict=True) if share)
        weight, world = torch.tensor(own, dtype=torch.float64, device="cpu"), self.mesh.world
        num_samples = data.num_samples  # not the data, which would be kept until the next step
        works = list[dist.Work]()
        if world.size > 1:
            works += [dist.all_reduce(weight, group=world.group, async_op=True)]

        def per_sample() -> float:
            while works:
                wait(works.pop(), "the weights of the losses of a step", world.ranks)
            return weight.item() / num_samples

        return per_sample

    def _forward_backward(
        self,
        step: TrainStep,
        micro_batches: Callable[[], MicroBatches],
        recorder: Recorder,
        should_stop: Callable[[], bool],
    ) -> Results:
        """Run all forwards and backwards of a step; validate the step before, if it needs that."""
        if self._speculative is None:
            return self.executor.run(step.plan, micro_batches(), recorder)
        optimizer_step = self.optimizer_step
        assert isinstance(optimizer_step, PostValidatedStep)

        def start_loss_sums(results: Results) -> None:
            optimizer_step.start_loss_sums(
                *results.losses.totals(self.mesh),
                should_stop(),
                self._statistics.expert_sums(step.data.num_samples),
            )

        return self._speculative.run(step.plan, micro_batches, recorder, start_loss_sums)

    def finish(
        self, step: TrainStep, results: Results, should_stop: Callable[[], bool]
    ) -> StepReport:
        """Update the parameters after all backwards of `step`, count it, and return its report."""
        assert self.optimizer_step is not None
        extra = self._statistics.expert_sums(step.data.num_samples)
        self._statistics.end_step()
        with self.timers("optimizer"):
            report = self.optimizer_step(
                *results.losses.totals(self.mesh),
                samples=step.data.num_samples,
                stop=should_stop(),
                extra=extra,
            )
        self._take_reports()
        step = replace(step, phases=self.phases.stop())
        for feature in reversed(self.features):
            feature.after_step(step)
        bounds = self._change_plan(step)
        self.stop_requested = report.stop_votes > 0
        self._count(step.data)
        if bounds is not None:
            self._move_stages(self.plan, bounds)
        return report

    def trace_next_step(self, memory: bool) -> None:
        """As `Engine.trace_next_step`; without effect in a loop of the caller."""
        if self._in_loop:
            return
        if self.tracer is None:
            self._add_tracer()
        self.tracer.trace_next_step(memory)

    def _add_tracer(self) -> None:
        section, ran = self.config.monitor.trace, lambda: self.executor.plan
        self.tracer = load_name(_FEATURES["monitor.trace"])(section, self.mesh, self.phases, ran)
        # The recorder of a traced step times all that busy times need.
        self.features.insert(self.features.index(self.busy_time), self.tracer)

    def _change_plan(self, step: TrainStep) -> Bounds | None:
        """Use the plan that a feature wants; return the bounds if the stages must move to it."""
        trace = None if self.tracer is None else self.tracer.trace
        for feature in self.features:
            change = feature.next_change(step, trace)
            if change is not None:
                return self._use(change, feature)
        return None

    def _use(self, change: PlanChange, feature: StepFeature) -> Bounds | None:
        obstacle = "" if change.moved is None else self.obstacle_to_move(*change.moved)
        feature.on_change(change, obstacle)
        if change.moved is None or obstacle:
            self.plan = change.plan
            return None
        self.plan, bounds = change.moved
        return bounds

    def _count(self, data: StepData) -> None:
        self.global_steps += 1
        self.step_samples = data.num_samples
        self.consumed_samples += data.num_samples
        if self.data.epochs is not None and self.data.epoch > self.epoch:
            self.settle()
            self.end_epochs()
        self.epoch = self.data.epoch

    def end_epochs(self) -> None:
        """Advance the schedule to the epoch of the data."""
        for _ in range(self.epoch, self.data.epoch):
            if self.optimizer_step is not None:
                self.optimizer_step.end_epoch()
        self.epoch = self.data.epoch

    # Steps that become final

    def settle(self) -> None:
        """Complete the last step, so that parameters, optimizer and learning rate are final.

        Raises:
            NonFiniteError, LossScaleError: as `Engine.settle`.
        """
        if self.optimizer_step is not None:
            self._validate()
        # What follows reads parameters on the host.
        synchronize()
        if self.optimizer_step is not None:
            # The caller may change parameters and masters, as loading does.
            self.optimizer_step.wait_for_copies()
        self._take_reports()

    def _validate(self) -> bool:
        """Validate the last step; return False if this changed the parameters."""
        assert self.optimizer_step is not None
        try:
            return self.optimizer_step.settle()
        except PipemegaError as error:
            if self._speculative is not None and error.on_every_rank:
                # The step fails after it was counted: it has inf or nan and must not be skipped.
                self.global_steps -= 1
                self.consumed_samples -= self.step_samples
            raise

    def _take_reports(self) -> None:
        """Handle the reports of the steps that have become final."""
        for unchecked in self.optimizer_step.take_reports() if self.optimizer_step else ():
            report = replace(unchecked, origin=self.locator.check(unchecked))
            self.reports.append(report)
            self._statistics.on_report(report)
            for feature in self.features:
                feature.on_report(report)

    # Stages that move

    def _with_final_stages(self, data: StepData) -> StepData:
        """Choose plan and stages of the first step, if its shapes were unknown until now."""
        late, self._late_choice = self._late_choice, None
        if late is None:
            return data
        first = late.of(data)
        place, bounds = self.plan.rank_of_stage, self.model.bounds
        if (first.plan.rank_of_stage, first.bounds) != (place, bounds):
            obstacle = self.obstacle_to_move(first.plan, first.bounds, is_first=True)
            if obstacle:
                if self.mesh.rank == 0:
                    wanted = describe_cut(first.bounds, first.plan.rank_of_stage)
                    get_logger().warning(
                        f"the stages stay on layers {describe_cut(bounds, place)}, although "
                        f"{wanted} would be chosen: {obstacle}; give "
                        "initialize(example=(inputs, labels)), so that they are built there"
                    )
                first = late.on(self.plan, bounds)
            else:
                self._move_stages(first.plan, first.bounds, late.built)
        self.plan, self._plans = first.plan, first.plans
        if first.tuner is not None:
            self.features.insert(0, first.tuner)
        return self.reader.for_these_stages(data)

    def obstacle_to_move(self, plan: Plan, bounds: Bounds, *, is_first: bool = False) -> str:
        """Return why the stages cannot move, as a clause; "" if they can.

        Args:
            plan, bounds: as for `_move_stages`.
            is_first: the move is before the first step, whose data have been read.
        """
        if self.optimizer_step is None:
            return "the run has no optimizer"
        if plan.has_vocabulary != self.plan.has_vocabulary:
            return "only one of the two plans has vocabulary parallelism"
        reads, place = self.loader is None or not self.loader.is_map_style, plan.rank_of_stage
        readers = self.plan.rank_of_stage[0], self.plan.rank_of_stage[-1]
        if reads and not {place[0], place[-1]} <= set(readers):
            return (
                f"pipeline rank {place[-1]} would read labels from now on, and its iterator is at "
                "the first step; give initialize() map-style training data"
            )
        if self.profiler is not None:
            self.profiler.cancel_counting()
        if is_first and any(gather_objects(self.stages_were_read, self.mesh.world)):
            return "engine.module was read, so the caller may refer to its parameters"
        return self.mover.obstacle(self.model, self.optimizer_step, bounds, is_first=is_first)

    def _move_stages(self, plan: Plan, bounds: Bounds, built: BuiltModules | None = None) -> None:
        """Move the stages to the ranks of `plan`, between two steps.

        Args:
            plan: the plan of the next steps, lowered.
            bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
            built: as for `StageMover.move`.

        Raises:
            NonFiniteError, LossScaleError: as `settle`, after the move.
        """
        assert self.optimizer_step is not None, "the caller has asked obstacle_to_move"
        failed: PipemegaError | None = None
        try:
            self.settle()
        except PipemegaError as error:
            if not error.on_every_rank:
                raise
            # The step is undone. The run may continue after that, with the plan of the new stages.
            failed = error
            self.settle()
        model, executor = self.mover.move(self.model, self.optimizer_step, plan, bounds, built)
        self.plan = plan
        self._use_stages(model, executor)
        if failed is not None:
            raise failed

    # What the records and the run read; not collective

    @property
    def schedule(self) -> LRSchedule | None:
        """The learning-rate schedule; None: a constant learning rate, or no training."""
        return self.optimizer_step.schedule if self.optimizer_step else None

    @property
    def last_step(self) -> StepReport | None:
        """As `Engine.last_step`."""
        return self.optimizer_step.last if self.optimizer_step else None

    @property
    def skipped_steps(self) -> int:
        """As `Engine.skipped_steps`."""
        return self.optimizer_step.skipped_so_far if self.optimizer_step else 0

    @property
    def loader(self) -> BatchLoader | None:
        """The loader of the training data; None: the caller passes iterators."""
        return self.data.loader

    @property
    def is_complete(self) -> bool:
        """Whether all steps or epochs of the run are done."""
        if self.data.epochs is not None:
            return self.epoch >= self.data.epochs
        return self.data.is_complete(self.global_steps, self.consumed_samples)

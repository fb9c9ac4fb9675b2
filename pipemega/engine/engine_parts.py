"""The parts of an engine: the first plan and its stages, executor, optimizer step.

If the shapes are unknown at `initialize`, plan and stages of the first step are chosen twice:

    initialize          a provisional plan, stages with even numbers of parameters
    first train_batch   reads its micro-batches; rank 0 counts the layers for the first one and
                        chooses plan and stages, as for data given to `initialize`
                        the stages move, with their state (`stage_mover`); then the step begins

The caller must not have a hold on the stages by then; otherwise they stay where they are.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh, from_first, gather_objects
from pipemega.distributed.process_groups import launch_order_advice
from pipemega.engine.plan_choice import PlanChooser, plan_chooser
from pipemega.engine.run.batch_reader import StepData
from pipemega.engine.run.training_data import TrainingData
from pipemega.engine.run_setup import ExecutorBuilder, RunSetup
from pipemega.engine.running_statistics import ExpertLayers
from pipemega.engine.stage_mover import BuiltModules, StageMover
from pipemega.engine.train_step import StepFeature
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.layer_costs.stage_costs import Sample
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import optimizer_step
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.model.stages import LocalModel, stage_bounds
from pipemega.pipeline.plan.fill_waits import Waits
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.plan_selection import plan_is_provisional
from pipemega.pipeline.recorder import step_clock


class StepPlans:
    """Returns the plan of each step.

    Only two plans are kept, the plan of a full step and the current one: the plans for all sizes
    of a long ramp-up would need much memory.

    Args:
        mesh: the device mesh of the run.
        plan: the plan of a step with train_batch_size samples.
        chooser: builds the plans of other steps, on rank 0; None: all steps are equal.
    """

    def __init__(self, mesh: Mesh, plan: Plan, chooser: PlanChooser | None = None) -> None:
        self._mesh, self._full, self._chooser = mesh, plan, chooser

    def check(self, bounds: Bounds, counts: Sequence[int]) -> None:
        """Validate the plans for all these numbers of micro-batches; collective.

        Raises:
            ConfigError, ScheduleError: the schedule does not support one of them; on every rank.
        """
        for count in counts:
            self._build(self._full, bounds, count)

    def of(self, current: Plan, bounds: Bounds, count: int) -> Plan:
        """Return the plan for `count` micro-batches; collective if it differs from the current one.

        Args:
            current: the plan of the last step; a callback, such as the tuner of schedule `auto`,
                may have replaced it.
            bounds: the bounds of its stages, which may have moved since the last call.
        """
        full = self._full.num_microbatches
        if current.num_microbatches == full:
            self._full = current
        if count == current.num_microbatches or self._chooser is None:
            return current
        if count == full and self._full.rank_of_stage == current.rank_of_stage:
            return self._full
        return self._build(current, bounds, count)

    def _build(self, current: Plan, bounds: Bounds, count: int) -> Plan:
        chooser = self._chooser
        assert chooser is not None, "all steps have the same number of micro-batches"
        return from_first(self._mesh.world, lambda: chooser.plan_of_size(current, bounds, count))


class FirstPlan(NamedTuple):
    """The plan of the first step, its stages, and what changes them later.

    Args:
        plan: lowered and validated.
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        plans: gives the plans of steps with different numbers of micro-batches.
        tuner: replaces the plan of schedule `auto` after measurements; None: it stays.
        is_provisional: the shapes of the first micro-batch may change plan and stages.
    """

    plan: Plan
    bounds: Bounds
    plans: StepPlans
    tuner: StepFeature | None
    is_provisional: bool = False
    waits: tuple[Waits, ...] = ()


def first_plan(setup: RunSetup, given: Plan | None) -> FirstPlan:
    """Choose the plan of the first step and its stages; collective.

    Args:
        given: the plan of the caller; replaces pipeline.schedule.

    Raises:
        ConfigError, ScheduleError: there is no such plan, or the model cannot be cut so.
    """
    config, mesh, batch = setup.config, setup.mesh, setup.batch
    log, sizes = get_logger(mesh.rank), config.batch_sizes(mesh.data.size)
    if sizes.changes and given is not None:
        raise _plan_in_a_ramp_up(given)
    staged, chooser = setup.staged_net, plan_chooser(setup, given)
    chosen = chooser.first(given)
    is_provisional = from_first(mesh.world, lambda: chooser.is_provisional)
    if is_provisional:
        log.info(_FOLLOWS)
    plan = chosen.plan
    if chosen.reason is not None:
        log.info(chosen.reason)
    # What "auto" means if the layers cannot be counted.
    by = "parameters" if config.pipeline.partition == "auto" else config.pipeline.partition
    bounds = chosen.bounds or stage_bounds(
        staged, by, plan.num_stages, mesh, setup.build_options, lambda: _micro_batch(setup.loader)
    )
    plans = StepPlans(mesh, plan, chooser if sizes.changes else None)
    is_auto = plan_is_provisional(config.pipeline, mesh.pipeline.size, given)
    if not (is_auto and is_provisional):
        plans.check(bounds, [size // batch.samples_per_slice for size in sizes.sizes[:-1]])
    tuner = chooser.tuner(chosen, bounds)
    return FirstPlan(plan, bounds, plans, tuner, is_provisional, chosen.waits)


_FOLLOWS = (
    "the shapes of a micro-batch are not known yet: the first train_batch() chooses plan and "
    "stages, and moves the layers; with initialize(example=(inputs, labels)) they need not move"
)


def _plan_in_a_ramp_up(plan: Plan) -> ConfigError:
    return ConfigError(
        f"training.rampup_batch_size changes the number of micro-batches, and the plan "
        f"{plan.name!r} given to initialize() is for {plan.num_microbatches}: name a schedule in "
        "pipeline.schedule",
        on_every_rank=True,
    )


def _micro_batch(loader: BatchLoader | None) -> tuple[Any, Any]:
    """Return the micro-batch that partition "profile" measures; the loader does not consume it."""
    if loader is None or not loader.is_map_style:
        raise ConfigError(
            "pipeline.partition 'profile' measures the layers with a micro-batch, and there is "
            "none: give initialize() a map-style training_data, or use 'parameters'"
        )
    return loader.peek()


class LateChoice:
    """Chooses plan and stages again; once.

    Args:
        setup: the setup of the run.
        given: the plan of the caller; replaces pipeline.schedule.

    Attributes:
        built: the modules that the user has built, as they were before the first stages.
    """

    def __init__(self, setup: RunSetup, given: Plan | None) -> None:
        self._setup, self._given = setup, given
        self.built = BuiltModules(setup.net)

    def of(self, data: StepData) -> FirstPlan:
        """Return the plan and the stages for the micro-batches of the first step; collective.

        Raises:
            ConfigError, ScheduleError: as `first_plan`.
        """
        read = gather_objects(_shapes(data), self._setup.mesh.pipeline)
        inputs = next((pair[0] for pair in read if pair is not None), None)
        ranks = {rank: pair[1] for rank, pair in enumerate(read) if pair is not None}
        labels = ranks.get(max(ranks, default=0))
        sample: Sample | None = None
        if ranks:
            # The first rank may read inputs only.
            with_labels = frozenset(r for r in ranks if repr(ranks[r]) == repr(labels))
            sample = Sample(inputs, labels, with_labels)
        self._setup = replace(self._setup, example=sample, has_read=True)
        return first_plan(self._setup, self._given)

    def on(self, plan: Plan, bounds: Bounds) -> FirstPlan:
        """Return the best plan on the stages of `plan`; collective, after `of`."""
        setup, changes = self._setup, dict[str, Any](partition=bounds)
        example = setup.example
        if setup.config.pipeline.schedule == "auto":
            changes["chunks"] = plan.num_stages // plan.num_ranks
            # No other placement.
            last = frozenset([plan.rank_of_stage[-1]])
            example = example and replace(example, label_ranks=last)
        section = setup.config.pipeline.model_copy(update=changes)
        config = setup.config.model_copy(update={"pipeline": section})
        return first_plan(replace(setup, config=config, example=example), self._given)


def _shapes(data: StepData) -> tuple[Any, Any] | None:
    """Return the first micro-batch that this rank has read, without values."""
    if data.pairs is None:
        return None
    sample = Sample.like(*data.pairs[0])
    try:
        pickle.dumps(sample)
    except Exception:  # an object of the user
        return None
    return sample.inputs, sample.labels


@dataclass(frozen=True)
class Components:
    """What `initialize` builds for an engine.

    Args:
        model: the stages of this rank.
        executor: runs plans with them.
        optimizer_step: None without an optimizer.
        loader: the loader of the training data; None if the caller passes iterators.
        timers: the timers of data, forward, backward, communication and optimizer.
        num_parameters: number of parameters of the whole model.
        mover: moves stages to other ranks.
        first: the first plan and its stages, and what changes them later.
        late_choice: chooses plan and stages again when the first step has been read; None: they
            are final.
        experts: the routers of the whole model.
    """

    model: LocalModel
    executor: Executor
    optimizer_step: OptimizerStep | None
    loader: BatchLoader | None
    timers: MultiTimer
    num_parameters: int
    mover: StageMover
    first: FirstPlan
    late_choice: LateChoice | None
    experts: ExpertLayers


def build_components(
    setup: RunSetup, model: LocalModel, first: FirstPlan, late_choice: LateChoice | None = None
) -> Components:
    """Build what trains the local stages `model`.

    Raises:
        ConfigError: the optimizer cannot be built, or a message has no declared shape.
    """
    config, mesh, loader = setup.config, setup.mesh, setup.loader
    get_logger(mesh.rank).info(Kernels.detect(mesh.device).description)
    length = TrainingData(config, mesh, loader).length
    step = optimizer_step(config, mesh, model, setup.arguments, length)
    timers = MultiTimer(enabled=config.wall_clock_breakdown, clock=step_clock(mesh.device))
    # A plan of the tuner may split backward.
    tunes = plan_is_provisional(config.pipeline, mesh.pipeline.size)
    may_change = first.tuner is not None or (tunes and late_choice is not None)
    executors = ExecutorBuilder(setup, timers, plan_may_change=may_change, waits=first.waits)
    # A split backward has no weight gradient beside an all-reduce.
    splits = executors.splits_backward(first.plan) or mesh.pipeline.size > 1
    advice = None if splits else launch_order_advice(mesh.device, mesh.tensor.size)
    if step is not None and advice is not None and mesh.rank == 0:
        get_logger().warning(advice)
    return Components(
        model,
        executors.build(model, first.plan, step),
        step,
        loader,
        timers,
        setup.net.num_parameters(),
        StageMover(setup, executors),
        first,
        late_choice,
        ExpertLayers.of(setup.net),
    )

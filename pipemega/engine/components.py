"""The parts of an engine: stages, executor, optimizer step; and how they are built."""

from dataclasses import dataclass

from pipemega.data.loader import BatchLoader
from pipemega.distributed.process_groups import launch_order_advice
from pipemega.engine.executor_builder import ExecutorBuilder
from pipemega.engine.first_plan import FirstPlan
from pipemega.engine.late_choice import LateChoice
from pipemega.engine.run_setup import RunSetup
from pipemega.engine.schedule_tuner import ScheduleTuner
from pipemega.engine.stage_mover import StageMover
from pipemega.engine.step_plans import StepPlans
from pipemega.engine.training_data import TrainingData
from pipemega.kernels import Kernels
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import optimizer_step
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.plan_selection import plan_is_provisional
from pipemega.pipeline.recorder import step_clock


@dataclass(frozen=True)
class Components:
    """What `initialize` builds for an engine.

    Args:
        model: the stages of this rank.
        executor: runs plans with them.
        optimizer_step: None without an optimizer.
        loader: of the training data; None if the caller passes iterators.
        timers: of data, forward, backward, communication and optimizer.
        num_parameters: of the whole model.
        mover: moves stages to other ranks.
        plans: of steps with different numbers of micro-batches.
        tuner: replaces the plan of schedule `auto`; None: it stays.
        late_choice: of plan and stages, when the first step has been read; None: they are final.
    """

    model: LocalModel
    executor: Executor
    optimizer_step: OptimizerStep | None
    loader: BatchLoader | None
    timers: MultiTimer
    num_parameters: int
    mover: StageMover
    plans: StepPlans
    tuner: ScheduleTuner | None
    late_choice: LateChoice | None = None


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
    executors = ExecutorBuilder(setup, timers, plan_may_change=may_change)
    # A split backward has no weight gradient beside an all-reduce.
    splits = executors.splits_backward(first.plan)
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
        first.plans,
        first.tuner,
        late_choice,
    )

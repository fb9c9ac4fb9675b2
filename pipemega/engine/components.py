"""The parts of an engine: stages, executor, optimizer step; and how they are built."""

from dataclasses import dataclass

from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.launch_order import launch_order_advice
from pipemega.distributed.mesh import Mesh
from pipemega.engine.executor_builder import ExecutorBuilder
from pipemega.engine.stage_mover import StageMover
from pipemega.engine.step_plans import StepPlans
from pipemega.engine.training_data import TrainingData
from pipemega.kernels import Kernels
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import OptimizerArguments, optimizer_step
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.local_model import LocalModel
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.plan.instructions import Plan
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
        executors: builds executors for other stages.
        plans: of steps with different numbers of micro-batches; None: all have the same.
        mover: moves stages to other ranks; None: they stay.
    """

    model: LocalModel
    executor: Executor
    optimizer_step: OptimizerStep | None
    loader: BatchLoader | None
    timers: MultiTimer
    num_parameters: int
    executors: ExecutorBuilder
    plans: StepPlans | None = None
    mover: StageMover | None = None


def build_components(
    config: Config,
    mesh: Mesh,
    net: PipelineModule,
    model: LocalModel,
    plan: Plan,
    loader: BatchLoader | None,
    arguments: OptimizerArguments,
    *,
    plan_may_change: bool,
) -> Components:
    """Build what trains the local stages `model` of `net` with `plan`.

    Args:
        arguments: of the user, about the optimizer.
        plan_may_change: a plan that splits backward may replace `plan`.

    Raises:
        ConfigError: the optimizer cannot be built, or a message has no declared shape.
    """
    get_logger(mesh.rank).info(Kernels.detect(mesh.device).description)
    length = TrainingData(config, mesh, loader).length
    step = optimizer_step(config, mesh, model, arguments, length)
    timers = MultiTimer(enabled=config.wall_clock_breakdown, clock=step_clock(mesh.device))
    builder = ExecutorBuilder(config, mesh, net, timers, plan_may_change)
    # A split backward has no weight gradient beside an all-reduce.
    splits = builder.splits_backward(plan)
    advice = None if splits else launch_order_advice(mesh.device, mesh.tensor.size)
    if step is not None and advice is not None and mesh.rank == 0:
        get_logger().warning(advice)
    executor = builder.build(model, plan, step)
    return Components(model, executor, step, loader, timers, net.num_parameters(), builder)

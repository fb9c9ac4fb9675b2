"""The parts of an engine: stages, executor, optimizer step; and how they are built."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.launch_order import launch_order_advice
from pipemega.distributed.mesh import Mesh
from pipemega.engine.step_plans import StepPlans
from pipemega.engine.training_data import TrainingData
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import OptimizerStep, ZeroMasterParams
from pipemega.optimizer.build_step import OptimizerArguments, optimizer_step, precision_of
from pipemega.optimizer.grad_ready import BucketReadiness
from pipemega.pipeline.executor import Executor, RankStages
from pipemega.pipeline.local_model import LocalModel
from pipemega.pipeline.messages import Header
from pipemega.pipeline.microbatch_loss import reduced_loss
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.recorder import step_clock
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward
from pipemega.pipeline.transport import Transport


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
        plans: of steps with different numbers of micro-batches; None: all have the same.
    """

    model: LocalModel
    executor: Executor
    optimizer_step: OptimizerStep | None
    loader: BatchLoader | None
    timers: MultiTimer
    num_parameters: int
    plans: StepPlans | None = None


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
    kernels = Kernels.detect(mesh.device)
    get_logger(mesh.rank).info(kernels.description)
    precision = precision_of(config)
    step = optimizer_step(
        config,
        mesh,
        model,
        precision,
        kernels,
        length=TrainingData(config, mesh, loader).length,
        arguments=arguments,
    )
    timers = MultiTimer(enabled=config.wall_clock_breakdown, clock=step_clock(mesh.device))
    splits = plan_may_change or any(i.kind is Kind.BACKWARD_INPUT for i in plan.steps())
    # A split backward has no weight gradient beside an all-reduce.
    advice = None if splits else launch_order_advice(mesh.device, mesh.tensor.size)
    if step is not None and advice is not None and mesh.rank == 0:
        get_logger().warning(advice)
    weight_queue, readiness = _backward_listeners(step, model, splits)
    executor = Executor(
        RankStages(
            mesh.pipeline.rank,
            model.stages,
            plan.num_stages,
            reduced_loss(config, model.loss_fn),
            precision.cast_inputs,
            model.vocabulary,
        ),
        _transport(config, mesh, net, plan, model.bounds),
        timers,
        weight_queue,
        readiness,
    )
    return Components(model, executor, step, loader, timers, net.num_parameters())


def _backward_listeners(
    step: OptimizerStep | None, model: LocalModel, splits: bool
) -> tuple[WeightGradQueue | None, BucketReadiness | None]:
    """Return what takes deferred weight gradients, and what starts reductions of final gradients.

    Args:
        splits: a plan may split backward.
    """
    if step is None:
        return None, None
    weight_queue = None
    if splits:
        weight_queue = WeightGradQueue(step.gradients)
        enable_split_backward(model.stages.values(), weight_queue)
    if not isinstance(step.masters, ZeroMasterParams):
        return weight_queue, None
    step.masters.register_param_waits(model.modules)
    return weight_queue, step.masters.bucket_readiness(hooks=weight_queue is None)


def _transport(
    config: Config, mesh: Mesh, net: PipelineModule, plan: Plan, bounds: Sequence[int]
) -> Transport | None:
    if mesh.pipeline.size == 1:
        return None
    declared: dict[int, Header] = {}
    if config.pipeline.shapes == "declared":
        for boundary, position in enumerate(bounds[1:-1]):
            message = net.boundary(position)
            if message is None:
                raise ConfigError(
                    f"pipeline.shapes is 'declared', but the model declares no input of layer "
                    f"{position} ({net.layer_names[position]}), the first layer of a stage: give "
                    f"PipelineModule(..., boundary=...), or use 'cached'",
                    on_every_rank=True,
                )
            declared[boundary] = Header.of(message)
    return Transport(
        mesh.pipeline,
        plan.rank_of_stage,
        mesh.device,
        config.pipeline.shapes,
        declared,
        mesh.timeout,
        vocabulary=plan.has_vocabulary,
    )

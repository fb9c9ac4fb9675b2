"""From a config and a model to an engine: the one place that knows all the rooms."""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipemega.allocator import keep_freed_memory
from pipemega.assemble_step import optimizer_step, precision_of
from pipemega.config import Batch, Config, load
from pipemega.data.loader import BatchLoader
from pipemega.endings import before_the_end
from pipemega.engine import Engine
from pipemega.errors import ConfigError
from pipemega.failure import FailureBoard
from pipemega.kernels import Kernels
from pipemega.mesh import (
    Mesh,
    build_mesh,
    from_first,
    launched_world_size,
    limit_waits,
    pick_device,
)
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import LRSchedule, OptimizerStep, ZeroTargets
from pipemega.optimizer.arrivals import BucketArrivals
from pipemega.pipeline.build import LocalModel, build_local_model, log_stages
from pipemega.pipeline.choice import plan_is_open, training_plan
from pipemega.pipeline.cut import stage_bounds
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.messages import Header
from pipemega.pipeline.module import Building, Loss, PipelineModule
from pipemega.pipeline.split_backward import WeightGradients, split
from pipemega.pipeline.transport import Transport
from pipemega.topology import Topology
from pipemega.tracer import Tracer
from pipemega.tuning import begin_tuning


def build_mesh_of(config: Config) -> Mesh:
    """Joins the ranks that were started into the mesh that the config asks for."""
    device = pick_device(config.mesh.device)
    topology = Topology.fit(
        launched_world_size(), config.mesh.pipeline, config.mesh.tensor, config.mesh.data
    )
    return build_mesh(topology, device, timedelta(seconds=config.mesh.timeout_seconds))


def initialize(
    model: PipelineModule,
    config: str | Path | Mapping[str, Any] | Config,
    training_data: Any = None,
    *,
    overrides: Sequence[str] = (),
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
) -> tuple[Engine, Optimizer | None, BatchLoader | None, LRSchedule | None]:
    """Builds this rank's part of `model` and everything that trains it.

    Works under torchrun, in a process group that the caller has started, and as a single process.

    Args:
        model: the description; only the local stages of it are built.
        config: a path, a mapping of the same shape, or a Config.
        training_data: a dataset of (inputs, labels) samples; without it `train_batch` wants an
            iterator over micro-batches.
        overrides: "pipeline.schedule=gpipe" and the like, laid over the config.
        collate_fn: from a list of samples to the (inputs, labels) of a micro-batch.
        mesh: where the caller has built it before.
        plan: what each pipeline rank computes in a step, in place of pipeline.schedule; the same
            on every rank.

    Returns:
        (engine, optimizer, loader, lr_scheduler); what there is none of is None.

    Raises:
        ConfigError: the config cannot be run, by itself or with this model.
        MeshError: the ranks that were started do not fit it.
    """
    config = load(config, overrides)
    mesh = mesh or build_mesh_of(config)
    with FailureBoard(mesh.world).failing_together("initialize"):
        engine = _assemble(model, config, mesh, training_data, collate_fn, plan)
        if mesh.world.size > 1:
            # A rank that could not build its part ends all of them here, not in the first step.
            dist.barrier(mesh.world.group)
            limit_waits(mesh)
    if config.checkpoint.in_background:
        before_the_end(engine.finish_saving)
    return engine, engine.optimizer, engine.loader, engine.lr_scheduler


def _assemble(
    model: PipelineModule,
    config: Config,
    mesh: Mesh,
    training_data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    given: Plan | None,
) -> Engine:
    batch = config.batch(mesh.data.size)
    config.check_zero(mesh.data.size)
    log = get_logger(mesh.rank)
    _announce(config, batch, mesh, log)
    if mesh.device.type == "cpu" and config.mesh.keep_cpu_memory:
        keep_freed_memory()
    kernels = Kernels.detect(mesh.device)
    loader = _loader(config, mesh, batch, training_data, collate_fn)
    plan = from_first(
        mesh.world,
        lambda: training_plan(
            config.pipeline, mesh.pipeline.size, batch.num_microbatches, len(model), given
        ),
    )
    building = _building(config, mesh, model)
    bounds = stage_bounds(
        model,
        config.pipeline.partition,
        plan.num_stages,
        mesh,
        building,
        lambda: _first_microbatch(loader),
    )
    tuner = None
    if plan_is_open(config.pipeline, mesh.pipeline.size, given):
        about = {"layers": model.layer_names, "parameters": model.count_parameters()}
        about |= {"bounds": bounds, **_what_costs_depend_on(config, mesh)}
        plan, tuner = begin_tuning(plan, mesh, config.pipeline.memory_limit, about, log)
    local = build_local_model(model, mesh, bounds, plan.rank_of_stage, building)
    log_stages(log, model, bounds, plan.rank_of_stage)
    log.info(batch.equation)
    log.info(kernels.description)
    precision = precision_of(config)
    step = optimizer_step(config, mesh, local, precision, kernels)
    timers = MultiTimer(
        enabled=config.wall_clock_breakdown,
        synchronize=torch.cuda.synchronize if mesh.device.type == "cuda" else None,
    )
    weights = _weight_gradients(step, local, plan, may_change=tuner is not None)
    executor = Executor(
        mesh.pipeline.rank,
        local.stages,
        plan.num_stages,
        _transport(config, mesh, model, plan, bounds),
        loss_of(config, local.loss_fn),
        precision.cast_inputs,
        timers,
        weights,
        _arrivals(step, local, hooks=weights is None),
    )
    trace = config.monitor.trace
    tracer = Tracer(mesh, trace.steps, trace.every, trace.memory)
    return Engine(config, mesh, batch, local, executor, plan, step, loader, timers, tracer, tuner)


def _building(config: Config, mesh: Mesh, model: PipelineModule) -> Building:
    return Building(
        tensor=mesh.tensor,
        device=mesh.device,
        seed=config.seed,
        seed_layers=config.pipeline.seed_layers,
        checkpoint_interval=checkpoint_interval(config, len(model)),
    )


def _weight_gradients(
    step: OptimizerStep | None, local: LocalModel, plan: Plan, may_change: bool
) -> WeightGradients | None:
    """The queue of weight halves, and stages that use it; None where each backward is whole."""
    halves = may_change or any(one.kind is Kind.BACKWARD_INPUT for one in plan.steps())
    if step is None or not halves:
        return None
    weights = WeightGradients(step.gradients)
    split(local.stages.values(), weights)
    return weights


def _arrivals(
    step: OptimizerStep | None, local: LocalModel, *, hooks: bool
) -> BucketArrivals | None:
    """Lets ZeRO's communication run beside forward and backward, where it is asked to."""
    if step is None or not isinstance(step.targets, ZeroTargets):
        return None
    step.targets.await_in(local.stages.values())
    return step.targets.arrivals(hooks=hooks)


def _announce(config: Config, batch: Batch, mesh: Mesh, log: logging.Logger) -> None:
    """What the config means that its writer may not have meant; said once."""
    for note in config.notes:
        log.info(note)
    if mesh.rank == 0:
        for warning in (*config.warnings, *batch.warnings):
            log.warning(warning)
        for note in config.zero_notes(mesh.data.size):
            log.info(note)
        if config.zero_optimization.offloads and mesh.device.type == "cpu":
            log.info(
                "zero_optimization.offload_optimizer.device 'cpu': weights compute on the CPU "
                "here, so that nothing has to be moved"
            )
    if config.dump_state:
        log.info(config.to_json())


def _what_costs_depend_on(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What of a config and a mesh changes how long a stage takes for one micro-batch."""
    sections = ("model", "activation_checkpointing", "fp16", "bf16", "data_types", "pipeline")
    whole = config.to_dict()
    return {
        "mesh": str(mesh.topology),
        "sequence_parallel": config.mesh.sequence_parallel,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        **{name: whole.get(name) for name in sections},
    }


def _loader(
    config: Config, mesh: Mesh, batch: Batch, data: Any, collate_fn: Any
) -> BatchLoader | None:
    if data is None:
        return None
    return BatchLoader(
        data,
        train_batch_size=batch.train_batch_size,
        micro_batch_size=batch.micro_batch_size,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
        seed=config.seed,
        drop_last=config.dataloader_drop_last,
        prefetch=config.data.prefetch,
        num_workers=config.data.num_workers,
        collate_fn=collate_fn,
        timeout_seconds=mesh.data_timeout_seconds,
    )


def _first_microbatch(loader: BatchLoader | None) -> tuple[Any, Any]:
    """For measuring; the loader still begins with it."""
    if loader is None or not loader.is_map_style:
        raise ConfigError(
            "pipeline.partition 'profile' measures the layers on a micro-batch, and there is none: "
            "give initialize() a map-style training_data, or use 'parameters'"
        )
    state = loader.state_dict()
    inputs, labels = next(loader)
    loader.load_state_dict(state)
    return inputs, labels


def checkpoint_interval(config: Config, num_layers: int) -> int:
    """Layers between two checkpoints, from either of the two keys that can say it."""
    number = config.activation_checkpointing.number_checkpoints
    if number is not None:
        return -(-num_layers // number)
    return config.pipeline.activation_checkpoint_interval


def _transport(
    config: Config, mesh: Mesh, model: PipelineModule, plan: Plan, bounds: Sequence[int]
) -> Transport | None:
    if mesh.pipeline.size == 1:
        return None
    declared: dict[int, Header] = {}
    if config.pipeline.shapes == "declared":
        for boundary, position in enumerate(bounds[1:-1]):
            message = model.boundary(position)
            if message is None:
                raise ConfigError(
                    "pipeline.shapes is 'declared', and the model declares none: give "
                    "PipelineModule(..., boundary=...), or use 'cached'"
                )
            declared[boundary] = Header.of(message)
    return Transport(
        mesh.pipeline,
        plan.rank_of_stage,
        mesh.device,
        config.pipeline.shapes,
        declared,
        mesh.timeout,
    )


def loss_of(config: Config, loss_fn: Loss | None) -> Loss | None:
    """The loss as the engine averages it: by weight, or each micro-batch alike."""
    if loss_fn is None or config.training.loss_reduction == "token":
        return loss_fn

    def mean(output: Any, labels: Any) -> Tensor | tuple[Tensor, Tensor]:
        loss = loss_fn(output, labels)
        if not isinstance(loss, tuple) or len(loss) != 2:
            return loss
        total, weight = loss
        # A micro-batch without a token that counts has no loss; not nan.
        return total / torch.where(weight > 0, weight, torch.ones_like(weight))

    return mean

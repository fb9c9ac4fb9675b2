"""From a config and a model to an engine: the one place that knows all the rooms."""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipemega.allocator import keep_freed_memory
from pipemega.config import Batch, Config, load
from pipemega.data.loader import BatchLoader
from pipemega.engine import Engine
from pipemega.errors import ConfigError
from pipemega.failure import FailureBoard
from pipemega.gradients import DataReduction, GradientBuffer
from pipemega.kernels import Kernels
from pipemega.mesh import Mesh, build_mesh, from_first, launched_world_size, pick_device
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import (
    LRSchedule,
    OptimizerStep,
    PostValidatedStep,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.pipeline.build import LocalModel, build_local_model, log_stages
from pipemega.pipeline.choice import plan_is_open, training_plan
from pipemega.pipeline.cut import stage_bounds
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.messages import Header
from pipemega.pipeline.module import Building, Loss, PipelineModule
from pipemega.pipeline.split_backward import WeightGradients, split
from pipemega.pipeline.transport import Transport
from pipemega.precision import DynamicLossScale, LossScale, Precision, StaticLossScale
from pipemega.topology import Topology
from pipemega.tracer import Tracer
from pipemega.tuning import begin_tuning

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
    building = Building(
        tensor=mesh.tensor,
        device=mesh.device,
        seed=config.seed,
        seed_layers=config.pipeline.seed_layers,
        checkpoint_interval=checkpoint_interval(config, len(model)),
    )
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
    executor = Executor(
        mesh.pipeline.rank,
        local.stages,
        plan.num_stages,
        _transport(config, mesh, model, plan, bounds),
        loss_of(config, local.loss_fn),
        precision.cast_inputs,
        timers,
        _weight_gradients(step, local, plan, may_change=tuner is not None),
    )
    trace = config.monitor.trace
    tracer = Tracer(mesh, trace.steps, trace.every, trace.memory)
    return Engine(config, mesh, batch, local, executor, plan, step, loader, timers, tracer, tuner)


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


def _announce(config: Config, batch: Batch, mesh: Mesh, log: logging.Logger) -> None:
    """What the config means that its writer may not have meant; said once."""
    for note in config.notes:
        log.info(note)
    if mesh.rank == 0:
        for warning in (*config.warnings, *batch.warnings):
            log.warning(warning)
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


def precision_of(config: Config) -> Precision:
    """The dtypes that the sections `fp16`, `bf16` and `data_types` ask for."""
    grad_dtype = config.data_types.grad_accum_dtype
    accumulate = None if grad_dtype is None else _DTYPES[grad_dtype]
    if config.bf16.enabled:
        return Precision(torch.bfloat16, accumulate, skip_nonfinite=config.bf16.check_grad_overflow)
    if config.fp16.enabled:
        return Precision(torch.float16, accumulate, cast=config.fp16.auto_cast, skip_nonfinite=True)
    return Precision(grad_dtype=accumulate)


def _loss_scale(config: Config) -> LossScale:
    fp16 = config.fp16
    if not fp16.enabled:
        return StaticLossScale()
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def optimizer_step(
    config: Config, mesh: Mesh, local: LocalModel, precision: Precision, kernels: Kernels
) -> OptimizerStep | None:
    """Casts the parameters and builds what trains them; None without a section `optimizer`."""
    named = list(local.parameters.items())
    masters = precision.cast_parameters(named)
    copies: dict[str, tuple[str, torch.nn.Parameter]] = {}
    for name, others in local.copies.items():
        for number, copy in enumerate(others, 1):
            copy.data = local.parameters[name].data
            copies[f"{name} (copy {number})"] = (name, copy)
    if config.optimizer is None:
        return None
    trainable = [(name, p) for name, p in named if p.requires_grad]
    groups = parameter_groups(
        [(name, masters.get(name, p)) for name, p in trainable],
        decay_norms_and_biases=config.training.weight_decay_norms_and_biases,
    )
    optimizer = build_optimizer(
        config.optimizer.type,
        config.optimizer.params.arguments(),
        groups,
        kernels=kernels,
        tensor=mesh.tensor,
    )
    schedule = None
    if config.scheduler is not None:
        schedule = build_schedule(
            optimizer,
            config.scheduler.type,
            config.scheduler.params.arguments(config.training.train_steps),
            total_steps=config.training.train_steps,
        )
    communication = config.communication_data_type
    return _kind_of_step(config, mesh)(
        optimizer,
        GradientBuffer(
            [*trainable, *((name, copy) for name, (_, copy) in copies.items())],
            dtype=precision.accumulation_dtype,
        ),
        mesh,
        masters=masters,
        tied=local.tied,
        copies={name: of for name, (of, _) in copies.items()},
        loss_scale=_loss_scale(config),
        schedule=schedule,
        reduction=DataReduction(
            op=config.gradient_allreduce_op,
            prescale=config.prescale_gradients,
            predivide_factor=config.gradient_predivide_factor,
            dtype=None if communication is None else _DTYPES[communication],
        ),
        num_layers=local.bounds[-1],
        clip=config.gradient_clipping,
        skip_nonfinite=precision.skip_nonfinite,
    )


def _kind_of_step(config: Config, mesh: Mesh) -> Callable[..., OptimizerStep]:
    if config.pipeline.optimizer_sync == "fenced":
        return OptimizerStep
    if mesh.pipeline.size == 1:
        get_logger(mesh.rank).info(
            "pipeline.optimizer_sync 'post_validate' is of no use on one pipeline rank: each step "
            "waits for its norm"
        )
        return OptimizerStep
    return partial(PostValidatedStep, quiet_steps=config.pipeline.optimizer_sync_after)


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

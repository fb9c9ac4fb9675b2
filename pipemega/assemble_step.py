"""From a config to what trains the parameters: precision, targets, optimizer, schedule, step."""

from collections.abc import Callable
from functools import partial

import torch

from pipemega.config import Config
from pipemega.gradients import DataReduction
from pipemega.kernels import Kernels
from pipemega.mesh import Mesh
from pipemega.monitor import get_logger
from pipemega.optimizer import (
    OptimizerStep,
    PostValidatedStep,
    Targets,
    ZeroTargets,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.optimizer.targets import Host
from pipemega.pipeline.build import LocalModel
from pipemega.precision import DynamicLossScale, LossScale, Precision, StaticLossScale

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def precision_of(config: Config) -> Precision:
    """The dtypes that the sections `fp16`, `bf16` and `data_types` ask for."""
    grad_dtype = config.data_types.grad_accum_dtype
    accumulate = None if grad_dtype is None else _DTYPES[grad_dtype]
    if config.bf16.enabled:
        return Precision(torch.bfloat16, accumulate, skip_nonfinite=config.bf16.check_grad_overflow)
    if config.fp16.enabled:
        return Precision(torch.float16, accumulate, cast=config.fp16.auto_cast, skip_nonfinite=True)
    return Precision(grad_dtype=accumulate)


def skips_nonfinite(config: Config) -> bool:
    """Whether a step with inf or nan is skipped; otherwise it is an error.

    With fp16 it is, since the loss scale is found so; what is more than that is for the loop.
    """
    policy = config.training.on_nonfinite.policy
    if config.fp16.enabled or policy is None:
        return precision_of(config).skip_nonfinite
    return policy == "skip"


def optimizer_step(
    config: Config, mesh: Mesh, local: LocalModel, precision: Precision, kernels: Kernels
) -> OptimizerStep | None:
    """Casts the parameters and builds what trains them; None without a section `optimizer`.

    Raises:
        ConfigError: the optimizer cannot be built, or not on this mesh.
    """
    if config.optimizer is None:
        precision.cast_parameters(list(local.parameters.items()))
        for name, copies in local.copies.items():
            for copy in copies:
                copy.data = local.parameters[name].data
        return None
    targets = _targets(config, mesh, local, precision)
    host = config.zero_optimization.offloads and mesh.device.type == "cuda"
    optimizer = build_optimizer(
        config.optimizer.type,
        config.optimizer.params.arguments(),
        parameter_groups(
            targets.named.items(),
            decay_norms_and_biases=config.training.weight_decay_norms_and_biases,
        ),
        kernels=Kernels.detect("cpu") if host else kernels,
        tensor=mesh.tensor,
        data=targets.data,
    )
    schedule = None
    if config.scheduler is not None:
        schedule = build_schedule(
            optimizer,
            config.scheduler.type,
            config.scheduler.params.arguments(config.training.train_steps),
            total_steps=config.training.train_steps,
        )
    return _kind_of_step(config, mesh)(
        optimizer,
        targets,
        loss_scale=_loss_scale(config),
        schedule=schedule,
        num_layers=local.bounds[-1],
        clip=config.gradient_clipping,
        skip_nonfinite=skips_nonfinite(config),
    )


def _targets(config: Config, mesh: Mesh, local: LocalModel, precision: Precision) -> Targets:
    zero, communication = config.zero_optimization, config.communication_data_type
    kind: Callable[..., Targets] = Targets
    if zero.stage == 1 and mesh.data.size > 1:
        # The all-gather takes the buckets of the reduction.
        size = int(min(zero.reduce_bucket_size, zero.allgather_bucket_size))
        kind = partial(ZeroTargets, bucket_size=size, overlap=zero.overlap_comm is True)
    host = None
    if zero.offloads:
        # On paper nothing moves, and nothing takes up room.
        there = mesh.device if mesh.device.type == "meta" else torch.device("cpu")
        host = Host(there, pin=zero.offload_optimizer.pin_memory and mesh.device.type == "cuda")
    return kind(
        list(local.parameters.items()),
        mesh,
        precision=precision,
        tied=local.tied,
        copies=local.copies,
        reduction=DataReduction(
            op=config.gradient_allreduce_op,
            prescale=config.prescale_gradients,
            predivide_factor=config.gradient_predivide_factor,
            dtype=None if communication is None else _DTYPES[communication],
        ),
        host=host,
    )


def _loss_scale(config: Config) -> LossScale | None:
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
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

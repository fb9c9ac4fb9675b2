"""Build the optimizer step from a config: precision, masters, optimizer, LR schedule."""

from collections.abc import Callable
from functools import partial

import torch

from pipemega.config import Config
from pipemega.distributed.mesh import Mesh
from pipemega.host_memory import HostMemory
from pipemega.kernels import Kernels
from pipemega.monitor import get_logger
from pipemega.optimizer import (
    MasterParams,
    ModelParams,
    OptimizerStep,
    PlainMasterParams,
    PostValidatedStep,
    ZeroMasterParams,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.optimizer.gradients import DataReduction
from pipemega.optimizer.mixed_precision import DynamicLossScale, LossScale, Precision
from pipemega.pipeline.local_model import LocalModel

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def precision_of(config: Config) -> Precision:
    """Return the precision of the sections `fp16`, `bf16` and `data_types`."""
    grad_dtype = config.data_types.grad_accum_dtype
    accumulate = None if grad_dtype is None else _DTYPES[grad_dtype]
    if config.bf16.enabled:
        return Precision(torch.bfloat16, accumulate, skip_nonfinite=config.bf16.check_grad_overflow)
    if config.fp16.enabled:
        return Precision(torch.float16, accumulate, cast=config.fp16.auto_cast, skip_nonfinite=True)
    return Precision(grad_dtype=accumulate)


def skips_nonfinite(config: Config) -> bool:
    """Return whether a step with inf or nan is skipped; otherwise it raises an error.

    With fp16 always: skipping adjusts the loss scale. `engine.nan_policy` handles all other cases.
    """
    policy = config.training.on_nonfinite.policy
    if config.fp16.enabled or policy is None:
        return precision_of(config).skip_nonfinite
    return policy == "skip"


def optimizer_step(
    config: Config,
    mesh: Mesh,
    local: LocalModel,
    precision: Precision,
    kernels: Kernels,
    *,
    total_steps: int | None,
    total_epochs: int | None,
    offload: bool = True,
) -> OptimizerStep | None:
    """Cast the parameters and build the optimizer step; None without a section `optimizer`.

    Args:
        total_steps, total_epochs: length of the run, the default of the lengths of the LR schedule;
            None if it is not known.
        offload: apply `zero_optimization.offload_optimizer`, unless the model is on the CPU.

    Raises:
        ConfigError: the optimizer cannot be built, or does not work on this mesh.
    """
    model = ModelParams(list(local.parameters.items()), local.tied, local.copies)
    if config.optimizer is None:
        precision.cast_parameters(model.named)
        model.share_storage()
        return None
    host = _host_memory(config, mesh) if offload else None
    masters = _master_params(config, mesh, model, precision, host)
    on_cpu = host is not None and mesh.device.type == "cuda"
    optimizer = build_optimizer(
        config.optimizer.type,
        config.optimizer.params,
        parameter_groups(
            masters.named.items(),
            decay_norms_and_biases=config.training.weight_decay_norms_and_biases,
        ),
        kernels=Kernels.detect("cpu") if on_cpu else kernels,
        tensor=mesh.tensor,
        shard_axis=masters.shard_axis,
    )
    schedule = None
    if config.scheduler is not None and config.scheduler.type is not None:
        schedule = build_schedule(
            optimizer, config.scheduler, total_steps=total_steps, total_epochs=total_epochs
        )
    return _step_class(config, mesh)(
        optimizer,
        masters,
        loss_scale=_loss_scale(config),
        schedule=schedule,
        num_layers=local.bounds[-1],
        clip=config.gradient_clipping,
        skip_nonfinite=skips_nonfinite(config),
    )


def _host_memory(config: Config, mesh: Mesh) -> HostMemory | None:
    """Return the memory for offloaded masters; None if they stay on the device."""
    zero = config.zero_optimization
    if not zero.offloads or mesh.device.type == "cpu":
        return None
    return HostMemory(mesh.device, pin=zero.offload_optimizer.pin_memory)


def _master_params(
    config: Config, mesh: Mesh, model: ModelParams, precision: Precision, host: HostMemory | None
) -> MasterParams:
    zero, communication = config.zero_optimization, config.communication_data_type
    reduction = DataReduction(
        op=config.gradient_allreduce_op,
        prescale=config.prescale_gradients,
        predivide_factor=config.gradient_predivide_factor,
        dtype=None if communication is None else _DTYPES[communication],
    )
    if zero.stage != 1 or mesh.data.size == 1:
        return PlainMasterParams(model, mesh, precision=precision, reduction=reduction, host=host)
    return ZeroMasterParams(
        model,
        mesh,
        # The all-gather uses the buckets of the reduction.
        reduce_bucket_size=int(min(zero.reduce_bucket_size, zero.allgather_bucket_size)),
        overlap=zero.overlap_comm is True,
        precision=precision,
        reduction=reduction,
        host=host,
    )


def _loss_scale(config: Config) -> LossScale | None:
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return LossScale(fp16.loss_scale)
    return DynamicLossScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _step_class(config: Config, mesh: Mesh) -> Callable[..., OptimizerStep]:
    if config.pipeline.optimizer_sync == "fenced":
        return OptimizerStep
    if mesh.pipeline.size == 1:
        get_logger(mesh.rank).info(
            "pipeline.optimizer_sync 'post_validate' has no effect on one pipeline rank: each step "
            "waits for its gradient norm"
        )
        return OptimizerStep
    return partial(PostValidatedStep, sync_after=config.pipeline.optimizer_sync_after)

"""Build the optimizer step from a config: precision, masters, optimizer, LR schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import Optimizer

from pipemega.config import Config
from pipemega.config.sections.optimizer_section import GroupSpec, option_errors, read_groups
from pipemega.config.sections.scheduler_section import By, RunLength
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh, gather_objects, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.monitor import get_logger
from pipemega.optimizer import (
    LRSchedule,
    MasterParams,
    ModelParams,
    OptimizerStep,
    PlainMasterParams,
    PostValidatedStep,
    StepSettings,
    ZeroMasterParams,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.optimizer.gradients import DataReduction
from pipemega.optimizer.lr_schedules import SchedulerMaker, TorchSchedule
from pipemega.optimizer.mixed_precision import DynamicLossScale, LossScale, Precision
from pipemega.optimizer.param_groups import SharedState, check_specs
from pipemega.optimizer.user_optimizer import (
    GivenGroups,
    Groups,
    OptimizerMaker,
    build_user_optimizer,
    check_cuts,
    check_group_counts,
)
from pipemega.pipeline.model.stages import LocalModel

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class OptimizerArguments:
    """The arguments of `initialize` that replace parts of the config.

    Args:
        optimizer: parameter groups -> torch optimizer; in place of the section `optimizer`.
        lr_scheduler: optimizer -> torch scheduler; in place of the section `scheduler`.
        groups: the parameter groups; in place of `optimizer.groups`.
        test_optimizer: builds the optimizers of `check_cuts`; None: `optimizer` does.
    """

    optimizer: OptimizerMaker | None = None
    lr_scheduler: SchedulerMaker | None = None
    groups: tuple[GroupSpec, ...] | GivenGroups | None = None
    test_optimizer: OptimizerMaker | None = None

    def trains(self, config: Config) -> bool:
        """Return whether the run has an optimizer."""
        return self.optimizer is not None or config.optimizer is not None

    def check_unused(self) -> None:
        """Refuse arguments that have no effect without an optimizer.

        Raises:
            ConfigError: names the argument; on every rank.
        """
        for name, value in (("lr_scheduler", self.lr_scheduler), ("model_parameters", self.groups)):
            if value is not None:
                raise ConfigError(
                    f"initialize() got {name}, and the run has no optimizer: give "
                    "initialize(optimizer=...), or add the config section 'optimizer'",
                    on_every_rank=True,
                )


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

    With fp16 always: skipping adjusts the loss scale. `run.run_history` handles all other cases.
    """
    policy = config.training.on_nonfinite.policy
    if config.fp16.enabled or policy is None:
        return precision_of(config).skip_nonfinite
    return policy == "skip"


def model_params(local: LocalModel) -> ModelParams:
    """Return the parameters of the local stages."""
    named = list(local.parameters.items())
    return ModelParams(named, local.tied, local.copies, num_layers=local.bounds[-1])


def optimizer_step(
    config: Config,
    mesh: Mesh,
    local: LocalModel,
    arguments: OptimizerArguments,
    length: RunLength,
    *,
    offload: bool = True,
) -> OptimizerStep | None:
    """Cast the parameters and build the optimizer step; None without an optimizer.  Collective.

    Args:
        arguments, offload: the arguments of `build_masters`.
        length: the length of the run, which is the default of the lengths of an LR schedule.

    Raises:
        ConfigError: the optimizer cannot be built, or does not work on this mesh.
    """
    if not arguments.trains(config):
        arguments.check_unused()
        model = model_params(local)
        precision_of(config).cast_parameters(model.named)
        model.share_storage()
        return None
    masters, optimizer = build_masters(config, mesh, local, arguments, offload=offload)
    shared = None if arguments.optimizer is None else SharedState(optimizer)
    return _step_class(config, mesh)(
        optimizer,
        masters,
        _step_settings(config),
        loss_scale=_loss_scale(config),
        schedule=_build_schedule(config, optimizer, arguments, length, mesh),
        shared_state=shared,
    )


def build_masters(
    config: Config,
    mesh: Mesh,
    local: LocalModel,
    arguments: OptimizerArguments,
    *,
    offload: bool = True,
) -> tuple[MasterParams, Optimizer]:
    """Cast the parameters; return their masters, and the optimizer over these.  Collective.

    Args:
        arguments: the user's arguments, in place of parts of the config.
        offload: apply `zero_optimization.offload_optimizer`, unless the model is on the CPU.

    Raises:
        ConfigError: the optimizer cannot be built, or does not work on this mesh.
    """
    host = _host_memory(config, mesh) if offload else None
    masters = _master_params(config, mesh, model_params(local), host)
    return masters, _build_optimizer(config, mesh, masters, arguments)


def _step_settings(config: Config) -> StepSettings:
    return StepSettings(
        clip=config.gradient_clipping,
        skip_nonfinite=skips_nonfinite(config),
        log_params_norm=config.monitor.log_params_norm,
        log_num_zeros=config.monitor.log_num_zeros_in_grad,
    )


def _build_optimizer(
    config: Config, mesh: Mesh, masters: MasterParams, arguments: OptimizerArguments
) -> Optimizer:
    """Build the optimizer of the user, or of the config."""
    section = config.optimizer
    groups, specs = _groups(config, mesh, masters, arguments)
    if arguments.optimizer is not None:
        if not config.zero_allow_untested_optimizer:
            make = arguments.test_optimizer or arguments.optimizer
            check_cuts(make, groups, mesh, masters.shard_axis)
        if section is not None:
            get_logger(mesh.rank).info(
                f"optimizer.type '{section.type}' is not used: initialize() got an optimizer"
            )
        return build_user_optimizer(arguments.optimizer, groups, masters.named, specs, mesh.world)
    assert section is not None
    for spec in specs if arguments.groups is not None else ():
        for error in option_errors(spec, type(section.params), section.params.group_options()):
            raise ConfigError(error, on_every_rank=True)
    offloads = masters.offload is not None and mesh.device.type == "cuda"
    return build_optimizer(
        section.type,
        section.params,
        groups,
        kernels=Kernels.detect("cpu" if offloads else mesh.device),
        tensor=mesh.tensor,
        expert=mesh.expert,
        shard_axis=masters.shard_axis,
    )


def _groups(
    config: Config, mesh: Mesh, masters: MasterParams, arguments: OptimizerArguments
) -> tuple[Groups, tuple[GroupSpec, ...]]:
    """Return the groups of the masters, and the specs from which they are made, if any."""
    section, specs = config.optimizer, arguments.groups
    keep_decay = config.training.weight_decay_norms_and_biases
    if isinstance(specs, GivenGroups):
        if not keep_decay:
            raise ConfigError(
                "training.weight_decay_norms_and_biases is false, and initialize() got parameters "
                "or an optimizer with its own groups: give norms and biases a group with "
                "weight_decay 0, and remove the key",
                on_every_rank=True,
            )
        check_group_counts(len(specs), mesh.world)
        return specs.of(masters.named), ()
    if specs is None:
        specs = () if section is None else read_groups(section.groups, "optimizer.groups")
    if specs and mesh.device.type != "meta":  # the planner has no other ranks
        names = [name for rank in gather_objects(list(masters.named), mesh.world) for name in rank]
        check_specs(specs, list(dict.fromkeys(names)))
    named = masters.named.items()
    return parameter_groups(named, specs, decay_norms_and_biases=keep_decay), specs


def _build_schedule(
    config: Config,
    optimizer: Optimizer,
    arguments: OptimizerArguments,
    length: RunLength,
    mesh: Mesh,
) -> LRSchedule | None:
    """Build the schedule of the user, or of the config; None: the rate is constant."""
    section = config.scheduler
    if arguments.lr_scheduler is not None:
        by: By = "step" if section is None else section.by
        if section is not None and section.type is not None:
            get_logger(mesh.rank).info(
                f"scheduler.type '{section.type}' is not used: initialize() got an lr_scheduler"
            )
        make = partial(TorchSchedule, optimizer, arguments.lr_scheduler, by)
        return on_all_ranks(mesh.world, make)
    if section is None:
        return None
    if section.type is None:
        raise ConfigError(
            "scheduler.type is missing, and initialize() got no lr_scheduler: set one of them",
            on_every_rank=True,
        )
    return build_schedule(optimizer, section, length)


def _host_memory(config: Config, mesh: Mesh) -> HostMemory | None:
    """Return the memory for offloaded masters; None if they stay on the device."""
    zero = config.zero_optimization
    if not zero.offloads or mesh.device.type == "cpu":
        return None
    return HostMemory(mesh.device, pin=zero.offload_optimizer.pin_memory)


def _master_params(
    config: Config, mesh: Mesh, model: ModelParams, host: HostMemory | None
) -> MasterParams:
    precision = precision_of(config)
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
        overlap=zero.overlap(mesh.device.type),
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

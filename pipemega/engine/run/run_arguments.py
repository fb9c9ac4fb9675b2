"""Checks the arguments of `initialize` that users of DeepSpeed and torch often confuse.

The mesh of a run, from its config and the devices of the layers.

`training.deterministic_mode`: the same run on the same machines gives the same bits.

The logs of the ranks of a run: the section `logging`, and the logger of scripts.
"""

import logging
import multiprocessing
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipemega.config import Config
from pipemega.config.sections.optimizer_section import read_groups
from pipemega.config.unknown_keys import refuse_arguments
from pipemega.distributed.mesh import (
    Mesh,
    build_mesh,
    build_mixed_mesh,
    launched_rank,
    launched_world_size,
    on_all_ranks,
    pick_device,
)
from pipemega.distributed.process_groups import backend_names, checked_launch
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError, MeshError
from pipemega.monitor import RankLogger, configure_logging, get_logger
from pipemega.optimizer.build_step import OptimizerArguments
from pipemega.optimizer.user_optimizer import GivenGroups, GivenOptimizer
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import with_stage_devices
from pipemega.pipeline.plan.instructions import Plan

_ARGUMENTS = (
    "model", "config", "training_data", "overrides", "collate_fn", "mesh", "plan", "example",
    "optimizer", "lr_scheduler", "model_parameters",
)  # fmt: skip


def check_arguments(
    model: Any, training_data: Any, example: Any, unsupported: Mapping[str, Any]
) -> None:
    """Check the types of the arguments of `initialize`.

    Raises:
        ConfigError: an argument is of the wrong type or not supported; the same on every rank.
    """
    refuse_arguments("initialize()", unsupported, _ARGUMENTS)
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"initialize() takes a PipelineModule as model, not {_advice(model)}",
            on_every_rank=True,
        )
    if isinstance(training_data, Optimizer):
        raise ConfigError(
            f"training_data is the optimizer {type(training_data).__name__}: "
            f"{_maker_advice(training_data)}",
            on_every_rank=True,
        )
    if example is not None and not (isinstance(example, tuple | list) and len(example) == 2):
        raise ConfigError(
            f"initialize(example=...) is a {type(example).__name__}, and must be the pair (inputs, "
            "labels) of one micro-batch",
            on_every_rank=True,
        )


def optimizer_arguments(
    optimizer: Any, lr_scheduler: Any, model_parameters: Any
) -> OptimizerArguments:
    """Check the types of the arguments of `initialize` about the optimizer, and return them.

    Raises:
        ConfigError: an argument is of the wrong type; the same on every rank.
    """
    problem = None
    if isinstance(optimizer, GivenOptimizer):
        return OptimizerArguments(
            optimizer.attach, lr_scheduler, optimizer.groups, test_optimizer=optimizer.copied
        )
    if isinstance(optimizer, Optimizer):
        problem = f"optimizer is the {type(optimizer).__name__} itself: {_maker_advice(optimizer)}"
    elif optimizer is not None and not callable(optimizer):
        problem = f"optimizer must be a function of parameter groups, not {optimizer!r}"
    elif isinstance(lr_scheduler, LRScheduler):
        name = type(lr_scheduler).__name__
        problem = (
            f"lr_scheduler is the {name} itself, which is over another optimizer than the "
            f"engine's: write lr_scheduler=lambda optimizer: {name}(optimizer, ...)"
        )
    elif lr_scheduler is not None and not callable(lr_scheduler):
        problem = f"lr_scheduler must be a function of the optimizer, not {lr_scheduler!r}"
    if problem is not None:
        raise ConfigError(problem, on_every_rank=True)
    groups: Any = None
    if isinstance(model_parameters, GivenGroups):
        groups = model_parameters
    elif model_parameters is not None:
        try:
            groups = read_groups(model_parameters, "model_parameters")
        except ValueError as error:
            raise ConfigError(
                f"{error}. The engine trains all parameters that require a gradient: set "
                "requires_grad to False in the layers whose parameters are frozen",
                on_every_rank=True,
            ) from error
    return OptimizerArguments(optimizer, lr_scheduler, groups)


def _maker_advice(optimizer: Optimizer) -> str:
    name, lr = type(optimizer).__name__, optimizer.defaults.get("lr", 1e-4)
    return (
        "the engine's optimizer updates master weights and shards of this rank, so it is built "
        f"from them: write optimizer=lambda params: {name}(params, lr={float(lr):g}), or set the "
        "config section 'optimizer'"
    )


def _advice(model: Any) -> str:
    name = type(model).__name__
    if isinstance(model, nn.Sequential):
        return "an nn.Sequential: write PipelineModule(model, loss_fn=...)"
    if isinstance(model, nn.Module):
        return (
            f"the nn.Module {name}: write PipelineModule([layer, layer, ...], loss_fn=...) with "
            f"its layers in order; PipelineModule([model], loss_fn=...) works on one pipeline rank"
        )
    if isinstance(model, list | tuple):
        return f"a {name}: write PipelineModule(layers, loss_fn=...)"
    if isinstance(model, type):
        return f"the class {model.__name__}: write PipelineModule([layer, ...], loss_fn=...)"
    return f"{model!r}" if model is None or isinstance(model, str) else f"a {name}"


# What a variable may be; the first value is set where it is unset. cuBLAS adds in a fixed order
# only with these workspaces. Of NCCL's algorithms a ring has one order for each number of ranks; a
# tree depends on the topology that NCCL has found.
_ENVIRONMENT: Mapping[str, Collection[str]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def use_deterministic_algorithms(config: Config, device: torch.device, log: logging.Logger) -> None:
    """Let torch use only operations with a fixed result, if the config says so.

    This sets the mode of the whole process. An operation that has no deterministic implementation
    then raises an error that names it. A config without the key changes nothing, so that a script
    may set the mode itself.

    Args:
        device: the device of the run; on a GPU the environment is set too, before CUDA's libraries
            read it.

    Raises:
        ConfigError: the environment asks for an order of additions that is not fixed.
    """
    if not config.training.deterministic_mode:
        return
    if device.type == "cuda":
        _set_environment(log)
        # Else it picks the kernel that was the fastest in a trial.
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def _set_environment(log: logging.Logger) -> None:
    for name, accepted in _ENVIRONMENT.items():
        given = os.environ.get(name)
        words = [] if given is None else [word.strip() for word in given.split(",")]
        wrong = [word for word in words if word not in accepted]
        if wrong:
            raise ConfigError(
                f"training.deterministic_mode is true, and {name} is {given!r}, with which results "
                f"may differ from run to run: unset it, or set it to {' or '.join(accepted)}"
            )
        if given is None:
            os.environ[name] = next(iter(accepted))
            if name == "CUBLAS_WORKSPACE_CONFIG" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                log.warning(
                    f"training.deterministic_mode sets {name}, but CUDA was used before "
                    f"initialize(): if the script has multiplied matrices there, set {name}="
                    f"{os.environ[name]} in the environment of the job"
                )


def open_log(config: Config, mesh: Mesh) -> None:
    """Apply the section `logging` to this rank; collective.

    Raises:
        ConfigError: a rank does not exist, or a log file cannot be written; on every rank.
    """
    section = config.logging
    for key, ranks in (("ranks", section.ranks), ("file_ranks", section.file_ranks)):
        for rank in ranks if ranks != "all" else ():
            if rank >= mesh.world.size:
                raise ConfigError(
                    f"logging.{key} has the rank {rank}, and the ranks of this run are 0 to "
                    f"{mesh.world.size - 1}",
                    on_every_rank=True,
                )
    file = None
    if section.log_to_file is not None and section.writes_file(mesh.rank):
        file = Path(section.log_to_file) / f"rank_{mesh.rank}.log"

    def configure() -> None:
        try:
            configure_logging(mesh.rank, section.level, section.ranks, file)
        except OSError as error:
            raise ConfigError(
                f"logging.log_to_file: rank {mesh.rank} cannot write {file}: "
                f"{error.strerror or error}"
            ) from error

    if section.log_to_file is None:
        configure()
    else:
        on_all_ranks(mesh.world, configure)


def rank_logger() -> RankLogger:
    """Return the logger of this rank: `rank_logger().info("saved", ranks=[0])`."""
    return RankLogger(launched_rank())


def build_mesh_of(config: Config) -> Mesh:
    """Connect the launched ranks and return the mesh of the config.

    Raises:
        ConfigError, MeshError: the config does not fit the number of ranks; before they connect.
    """
    refuse_worker_process()
    if not dist.is_initialized():
        checked_launch()
    topology = Topology.fit(
        launched_world_size(),
        config.mesh.pipeline,
        config.mesh.tensor,
        config.mesh.data,
        config.mesh.expert,
    )
    config.batch_sizes(topology.data)
    timeout = timedelta(seconds=config.mesh.timeout_seconds)
    devices = config.mesh.mixed_devices
    if config.mesh.backend == "nccl" and not torch.cuda.is_available():
        raise MeshError(
            "mesh.backend is 'nccl', and torch sees no CUDA device: set it to 'gloo', which trains "
            "on the CPU, or to 'auto'"
        )
    if devices:
        device = torch.device(devices[topology.coordinate(launched_rank()).pipeline])
    else:
        device = pick_device(config.mesh.first_device)
    # Before the ranks connect: NCCL reads its environment then.
    use_deterministic_algorithms(config, device, get_logger(0))
    if devices:
        mesh = build_mixed_mesh(topology, devices, timeout)
    else:
        mesh = build_mesh(topology, device, timeout)
    _check_backend(config, mesh)
    open_log(config, mesh)
    return mesh


def _check_backend(config: Config, mesh: Mesh) -> None:
    """Refuse process groups of the caller whose backend is not the backend of the config."""
    if config.mesh.backend == "auto" or mesh.world.group is None:
        return
    found = backend_names(mesh.world.group).get(mesh.device.type)
    if found != config.mesh.backend:
        raise ConfigError(
            f"mesh.backend is {config.mesh.backend!r}, and the caller has initialized "
            f"torch.distributed with {found!r} for {mesh.device.type}: make them equal, or set "
            'mesh.backend to "auto"',
            on_every_rank=True,
        )


def with_devices_of_layers(
    config: Config, model: PipelineModule, mesh: Mesh | None, plan: Plan | None
) -> Config:
    """Return the config with the devices and bounds that the layers of `model` ask for.

    Args:
        mesh: a mesh that the caller has built, which keeps its devices; None: there is none.
    """
    if all(spec.device is None for spec in model.specs):
        return config
    given, data = config, config.mesh.data
    if mesh is not None:
        device = mesh.pipeline.devices or mesh.device.type
        given = config.model_copy(
            update={"mesh": config.mesh.model_copy(update={"device": device})}
        )
        data = mesh.data.size
    topology = Topology.fit(launched_world_size(), given.mesh.pipeline, given.mesh.tensor, data)
    count = config.batch(topology.data).num_microbatches
    stages = None if plan is None else plan.rank_of_stage
    found = with_stage_devices(given, model, count, _auto_device(), stages)
    return config if found is given else found


def _auto_device() -> str:
    """Return what mesh.device "auto" is on this node."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def refuse_worker_process() -> None:
    """Refuse to start a rank while multiprocessing imports the script in a new process."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "initialize() was called in a worker process, which imports the script: put the "
            "statements of the script below `if __name__ == '__main__':`"
        )

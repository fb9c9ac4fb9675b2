"""The mesh of a run, from its config and the devices of the layers."""

import multiprocessing
from datetime import timedelta

import torch
import torch.distributed as dist

from pipemega.config import Config
from pipemega.distributed.backends import backend_names
from pipemega.distributed.connect_ranks import checked_launch
from pipemega.distributed.mesh import (
    Mesh,
    build_mesh,
    launched_rank,
    launched_world_size,
    pick_device,
)
from pipemega.distributed.mixed_mesh import build_mixed_mesh
from pipemega.distributed.topology import Topology
from pipemega.engine.determinism import use_deterministic_algorithms
from pipemega.engine.rank_logging import open_log
from pipemega.errors import ConfigError, MeshError
from pipemega.monitor import get_logger
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.stage_devices import with_stage_devices


def build_mesh_of(config: Config) -> Mesh:
    """Connect the launched ranks and return the mesh of the config.

    Raises:
        ConfigError, MeshError: the config does not fit the number of ranks; before they connect.
    """
    refuse_worker_process()
    if not dist.is_initialized():
        checked_launch()
    topology = Topology.fit(
        launched_world_size(), config.mesh.pipeline, config.mesh.tensor, config.mesh.data
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
    """Refuse process groups of the caller whose backend is not that of the config."""
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
        mesh: of the caller; its devices stay.
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

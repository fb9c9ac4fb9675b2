"""The mesh of a pipeline whose ranks have different devices: `"device": ["cpu", "cuda", "cuda"]`.

    axis               devices of its ranks    backend                 tensors of GPUs
    tensor, data       equal                   of this device          stay on the GPU
    pipeline, world    different               gloo                    go through host memory

gloo on the host is the only backend that all ranks have. Messages between two pipeline ranks on
GPUs use NCCL all the same (`pipeline.connections`).
"""

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pipemega.distributed import device_waits
from pipemega.distributed.backends import backend_names
from pipemega.distributed.connect_ranks import connect_ranks
from pipemega.distributed.mesh import (
    DEFAULT_TIMEOUT,
    Axis,
    Mesh,
    check_group_counts,
    check_world_size,
    gather_objects,
    gpu_of,
    new_axis,
    new_group,
    open_axes,
    refuse_shared_gpus,
)
from pipemega.distributed.topology import Topology
from pipemega.errors import MeshError

HOST = torch.device("cpu")
HOST_BACKEND = "cpu:gloo"


def build_mixed_mesh(
    topology: Topology, devices: Sequence[str], timeout: timedelta = DEFAULT_TIMEOUT
) -> Mesh:
    """Create the process groups of `topology`; collective.

    Args:
        devices: "cpu" or "cuda" for each pipeline rank.

    Raises:
        MeshError: as `build_mesh`; or a rank that is to use a GPU finds none. On every rank.
    """
    check_world_size(topology)
    if not dist.is_initialized():
        connect_ranks(HOST_BACKEND, timeout)
    check_group_counts(HOST)
    rank = dist.get_rank()
    world = _world(rank, timeout)
    place = topology.coordinate(rank)
    device = _pick_on_all_ranks(world, topology, devices)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_waits.watch_device(timeout)
    refuse_shared_gpus(gather_objects(gpu_of(device) if device.type == "cuda" else None, world))
    ranks = topology.along("pipeline", rank)
    group = _host_group(ranks, timeout, "pipeline")
    pipeline = Axis("pipeline", ranks, place.pipeline, group, tuple(devices))
    data = new_axis("data", topology, rank, device, timeout)
    tensor = new_axis("tensor", topology, rank, device, timeout)
    open_axes([pipeline, data, tensor, world], device)
    return Mesh(topology, pipeline, data, tensor, world=world, device=device, timeout=timeout)


def _world(rank: int, timeout: timedelta) -> Axis:
    """Return the axis of all ranks, on the default group if that has no backend but gloo."""
    ranks, group = tuple(range(dist.get_world_size())), dist.group.WORLD
    assert group is not None
    if set(backend_names(group)) != {"cpu"}:
        # gloo takes tensors of GPUs too, but makes the host wait without a deadline.
        group = _host_group(ranks, timeout, "world")
    return Axis("world", ranks, rank, group)


def _host_group(ranks: Sequence[int], timeout: timedelta, description: str) -> dist.ProcessGroup:
    return new_group(ranks, HOST, timeout, description, backend=HOST_BACKEND)


def _pick_on_all_ranks(world: Axis, topology: Topology, devices: Sequence[str]) -> torch.device:
    """Return the device of this rank; if a rank finds none, all ranks raise the first error."""
    wishes = [devices[topology.coordinate(rank).pipeline] for rank in world.ranks]
    hosts = gather_objects(socket.gethostname(), world)
    device, error = None, None
    try:
        device = pick_mixed_device(world.rank, wishes, hosts)
    except MeshError as problem:
        error = str(problem)
    for message in gather_objects(error, world):
        if message is not None:
            listed = ", ".join(f'"{name}"' for name in devices)
            place = f"mesh.device [{listed}], mesh {topology}"
            raise MeshError(f"{place}: {message}", on_every_rank=True)
    assert device is not None
    return device


def pick_mixed_device(rank: int, wishes: Sequence[str], hosts: Sequence[str]) -> torch.device:
    """Return the device of `rank`: the ranks of a host get its GPUs in their order.

    Args:
        wishes, hosts: of all ranks.

    Raises:
        MeshError: the host has fewer GPUs than ranks that need one.
    """
    if wishes[rank] == "cpu":
        return HOST
    here = [r for r, host in enumerate(hosts) if host == hosts[rank] and wishes[r] != "cpu"]
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise MeshError(
            f"rank {rank} is to use a GPU, and torch sees no CUDA device on {hosts[rank]}: write "
            f'"cpu" in its place'
        )
    if found == 1:
        # Ranks may each see a GPU of their own, as with `srun --gpus-per-task=1`.
        return torch.device("cuda", 0)
    index = here.index(rank)
    if index >= found:
        raise MeshError(
            f"{len(here)} ranks on {hosts[rank]} are to use a GPU, and it has {found} GPUs: start "
            f'fewer ranks there, or write "cpu" in more places'
        )
    return torch.device("cuda", index)

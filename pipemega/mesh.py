"""The topology made real: process groups along each axis, with torch's DeviceMesh over them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from pipemega.errors import MeshError, PipemegaError
from pipemega.lives import name_of_this_life
from pipemega.topology import AXES, AxisName, Topology

T = TypeVar("T")

# A step must never wait longer than this for another rank; config key mesh.timeout_seconds.
DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, eq=False)
class Axis:
    """One line of ranks through this process: what a layer or a reduction talks over.

    Args:
        name: "pipeline", "data", "tensor", or "world" for all ranks.
        ranks: the global ranks along the axis, in order.
        rank: the position of this process among them.
        group: their process group; None for an axis of one rank, which never talks.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where this process stands on each axis, and the device that it computes on."""

    topology: Topology
    pipeline: Axis
    data: Axis
    tensor: Axis
    world: Axis
    device: torch.device
    timeout: timedelta = DEFAULT_TIMEOUT
    device_mesh: DeviceMesh | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.world.rank

    @property
    def data_timeout_seconds(self) -> float:
        """How long this rank waits for its own data: less than the others wait for the rank.

        So it is the one who knows which sample does not come that tells, and not those who only
        know who does not come.
        """
        return 0.9 * self.timeout.total_seconds()

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "Mesh":
        """One process that talks to nobody."""
        return cls(
            Topology(),
            Axis("pipeline"),
            Axis("data"),
            Axis("tensor"),
            Axis("world"),
            torch.device(device),
        )


def launched_world_size() -> int:
    """How many ranks were started: from torch.distributed, else torchrun's variables, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """The global rank of this process: from the same sources, else 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_axis() -> Axis:
    """All ranks of torch.distributed; this process alone where it has not been started."""
    if not dist.is_initialized():
        return Axis("world")
    return Axis("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def from_first(world: Axis, make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on all ranks of `world`; collective.

    A PipemegaError that it raises is raised on all of them too; of any other the rest learn as of
    any failure of a rank.
    """
    if world.size == 1:
        return make()
    values: list[Any] = [None, None]
    if world.rank == 0:
        try:
            values[0] = make()
        except PipemegaError as error:
            error.on_every_rank = True
            values[1] = error
    dist.broadcast_object_list(values, src=world.ranks[0], group=world.group)
    made: T = values[0]
    if values[1] is not None:
        raise values[1]
    return made


def pick_device(wish: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """The device of this process; on a node with several GPUs, the one of its LOCAL_RANK.

    Raises:
        MeshError: "cuda" was asked for and there is none, or fewer than ranks on this node.
    """
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MeshError("mesh.device is 'cuda', and torch sees no CUDA device: set it to 'cpu'")
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= found:
        raise MeshError(
            f"local rank {local_rank} has no GPU of its own: this node has {found}; start at most "
            f"{found} ranks here (torchrun --nproc_per_node={found})"
        )
    return torch.device("cuda", local_rank)


def build_mesh(
    topology: Topology, device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT
) -> Mesh:
    """Joins the processes that were launched into the axes of `topology`; every rank calls it.

    Starts torch.distributed where torchrun's variables ask for it and nobody has yet.

    Raises:
        MeshError: the number of processes is not the size of the topology.
    """
    world_size = launched_world_size()
    if world_size != topology.world_size:
        raise MeshError(
            f"{world_size} ranks were started, and the mesh {topology} takes {topology.world_size}"
        )
    if world_size == 1 and not dist.is_initialized():
        return Mesh.single(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Without device_id: given one, NCCL puts all single sends and receives of a group into one
        # row, and a receive that was posted early would hold up the sends behind it.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout, **_own_store(timeout))
    rank = dist.get_rank()
    axes = {name: _axis(name, topology, rank, timeout) for name in AXES}
    # A rank that failed right behind this would break the connections that others still make.
    dist.barrier()
    return Mesh(
        topology,
        axes["pipeline"],
        axes["data"],
        axes["tensor"],
        world_axis(),
        device,
        timeout,
        _device_mesh(topology, device, axes),
    )


def _own_store(timeout: timedelta) -> dict[str, Any]:
    """What makes ranks that torchrun has started, or started again, meet where nobody has been."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    life = name_of_this_life(store, rank, world_size, timeout.total_seconds())
    own = dist.PrefixStore(f"life {life}", store)  # type: ignore[attr-defined]
    return {"store": own, "rank": rank, "world_size": world_size}


def limit_waits(mesh: Mesh) -> None:
    """From now on no wait of the world takes longer than those of its axes.

    Where the caller has started torch.distributed, its group has a deadline of its own until then.
    """
    dist.distributed_c10d._set_pg_timeout(mesh.timeout, mesh.world.group)


def _axis(name: AxisName, topology: Topology, rank: int, timeout: timedelta) -> Axis:
    ranks = topology.along(name, rank)
    group = None
    if len(ranks) > 1:
        # Local synchronisation: each line of ranks meets by itself, so that start-up does not
        # grow with the number of lines.
        group = dist.new_group(
            list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
        )
    return Axis(name, ranks, ranks.index(rank), group)


def _device_mesh(
    topology: Topology, device: torch.device, axes: dict[AxisName, Axis]
) -> DeviceMesh | None:
    """torch's view of the same groups, for whatever in torch wants a DeviceMesh."""
    wide = [name for name in AXES if axes[name].size > 1]
    groups = [group for name in wide if (group := axes[name].group) is not None]
    if not groups:
        return None
    grid = torch.arange(topology.world_size).view([topology.size(name) for name in wide])
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=(wide[0],))
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=tuple(wide))

"""The mesh of this process: one process group per axis, and the device.

The mesh of a pipeline whose ranks have different devices: `"device": ["cpu", "cuda", "cuda"]`.

    axis               devices of its ranks    backend                 tensors of GPUs
    tensor, data       equal                   of this device          stay on the GPU
    pipeline, world    different               gloo                    go through host memory

gloo on the host is the only backend that all ranks have. Messages between two pipeline ranks on
GPUs use NCCL all the same (`pipeline.connections`).
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from pipemega.config.launch_variables import launch_variables
from pipemega.cuda_settings import why_unusable
from pipemega.distributed import device_waits
from pipemega.distributed.comm_errors import collective_error, named_collective
from pipemega.distributed.process_groups import (
    backend_names,
    connect_ranks,
    message_device,
    nccl_backend,
    nccl_options,
)
from pipemega.distributed.topology import AXES, AxisName, Topology, started
from pipemega.distributed.torch_versions import set_timeout, use_expandable_segments
from pipemega.errors import ConfigError, MeshError, PipemegaError

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Timeout of every wait for another rank; config key mesh.timeout_seconds.
DEFAULT_TIMEOUT = timedelta(minutes=10)

# Gloo for objects, barriers and numbers of the host: there a wait blocks only the host, ends at its
# timeout, and fails if a peer has ended.
_CUDA_BACKEND = "cpu:gloo,cuda:nccl"


_FIRST_ELEMENTS = (64 << 20) // 4


@dataclass(frozen=True, eq=False)
class Axis:
    """The process group of this rank along one mesh axis.

    Args:
        name: "pipeline", "data", "tensor", "expert", "replica", or "world" for all ranks.
        ranks: the global ranks of the group, in order.
        rank: index of this process in `ranks`.
        group: the process group; None for an axis of one rank, which does not communicate. On a GPU
            it has two backends: NCCL for its tensors, and gloo for values of the host.
        devices: types of the devices of the ranks if they differ, else empty.
        overlap: how products of layers overlap with the collectives of sequence parallelism over
            this axis: "split" or "symmetric" (`overlapped_products`); empty: they do not.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    devices: tuple[str, ...] = ()
    overlap: Literal["", "split", "symmetric"] = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: object) -> "Axis":
        # So that layers with an axis can be copied, such as by AveragedModel: a group cannot.
        return self


@dataclass(frozen=True, eq=False)
class Mesh:
    """The axes of this process, its device, and the timeout of its waits.

    Args:
        expert: the data ranks that share the experts of a layer with this rank.
        expert_replicas: the data ranks with the same experts; None: all data ranks.
    """

    topology: Topology
    pipeline: Axis
    data: Axis
    tensor: Axis
    world: Axis
    device: torch.device
    timeout: timedelta = DEFAULT_TIMEOUT
    expert: Axis = Axis("expert")
    expert_replicas: Axis | None = None

    @property
    def replica(self) -> Axis:
        """The data ranks that have the same experts as this rank."""
        return self.data if self.expert_replicas is None else self.expert_replicas

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those with the same stages."""
        return self.data.rank == 0 and self.tensor.rank == 0

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.world.rank

    @property
    def data_timeout_seconds(self) -> float:
        """How long this rank waits for its own data: less than other ranks wait for this rank.

        So the error comes from the rank that can name the sample, before another rank times out.
        """
        return 0.9 * self.timeout.total_seconds()

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "Mesh":
        """Return the mesh of a single process."""
        return cls(
            Topology(),
            Axis("pipeline"),
            Axis("data"),
            Axis("tensor"),
            Axis("world"),
            torch.device(device),
        )


def launched_world_size() -> int:
    """Return the number of ranks: from torch.distributed, else the launcher's variables, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return launch_variables().number("WORLD_SIZE", 1)


def launched_rank() -> int:
    """Return the global rank of this process: from the same sources, else 0."""
    return dist.get_rank() if dist.is_initialized() else launch_variables().number("RANK", 0)


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Return the `value` of every rank of `axis`, in order; collective."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def from_first(world: Axis, make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on all ranks of `world`; collective.

    If `make` raises a PipemegaError, all ranks raise it. Any other error is the failure of rank 0.
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


def on_all_ranks(world: Axis, make: Callable[[], T]) -> T:
    """Call `make` on each rank of `world`; return its own result.  Collective.

    If `make` raises a ConfigError on some rank, all ranks raise the first one.  Any other error is
    the failure of its rank.
    """
    made: list[T] = []
    cause: ConfigError | None = None
    try:
        made.append(make())
    except ConfigError as error:
        cause = error
    for message in gather_objects(None if cause is None else str(cause), world):
        if message is not None:
            raise ConfigError(message, on_every_rank=True) from cause
    return made[0]


def pick_device(wish: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """Return the device of this process.

    If it sees several GPUs: the one whose index is LOCAL_RANK, or what srun or mpirun set for it.
    If it sees one, as with `srun --gpus-per-task=1`: that one.

    Raises:
        MeshError: `wish` is "cuda", and the node has no GPU, or fewer than ranks.
    """
    if wish == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = why_unusable(torch.__version__, torch.version.cuda)
        if wish == "auto":
            if reason:
                _log.warning("this run uses CPUs: %s", reason)
            return torch.device("cpu")
        raise MeshError(
            "mesh.device is 'cuda', and torch sees no CUDA device: "
            + (reason or "set it to 'cpu', or run pipemega doctor on this machine")
        )
    local_rank = launch_variables().number("LOCAL_RANK", 0)
    if (found := torch.cuda.device_count()) == 1:
        # Several ranks may see the same one: `build_mesh` refuses this.
        return torch.device("cuda", 0)
    if local_rank >= found:
        raise MeshError(
            f"there is no GPU for local rank {local_rank}: this node has {found}; start at most "
            f"{found} ranks here (torchrun --nproc_per_node={found})"
        )
    return torch.device("cuda", local_rank)


def build_mesh(
    topology: Topology, device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT
) -> Mesh:
    """Create the process groups of `topology`; collective.

    Initializes torch.distributed from the launcher's variables unless the caller has done so.

    Raises:
        MeshError: the number of ranks is not the size of the topology, ranks share a GPU, the
            caller has created process groups of some ranks only, or rank 0 cannot be found.
    """
    check_world_size(topology)
    if device.type == "cuda":
        use_expandable_segments()
    if topology.world_size == 1 and not dist.is_initialized():
        return Mesh.single(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_waits.watch_device(timeout)
    if dist.is_initialized():
        check_group_counts(device)
    else:
        connect_ranks(_CUDA_BACKEND if device.type == "cuda" else "gloo", timeout)
    rank = dist.get_rank()
    axes = {name: new_axis(name, topology, rank, device, timeout) for name in AXES}
    expert, replica = _expert_axes(topology, rank, device, timeout, axes["data"])
    world = _world(rank, device, timeout)
    if device.type == "cuda":
        refuse_shared_gpus(gather_objects(gpu_of(device), world))
    # Each group once: an axis with all data ranks is the data axis.
    derived = [axis for axis in (expert, replica) if axis.group is not axes["data"].group]
    open_axes([*axes.values(), *derived, world], device)
    return Mesh(
        topology,
        **axes,
        world=world,
        device=device,
        timeout=timeout,
        expert=expert,
        expert_replicas=replica,
    )


def check_world_size(topology: Topology) -> None:
    """Raise MeshError if another number of ranks was started than `topology` has."""
    if (world_size := launched_world_size()) != topology.world_size:
        raise MeshError(
            f"{started(world_size)}, and the mesh {topology} takes "
            f"{topology.world_size}: start {topology.world_size} ranks, or change the mesh"
        )


def gpu_of(device: torch.device) -> tuple[str, str]:
    """Return the name of this host and the id of the GPU, which no other GPU has."""
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def refuse_shared_gpus(gpus: Sequence[tuple[str, str] | None]) -> None:
    """Refuse two ranks on one GPU: NCCL would fail, and name neither of them.

    Args:
        gpus: the result of `gpu_of` for each rank; None for a rank on a CPU.
    """
    first_rank: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is None:
            continue
        other = first_rank.setdefault(gpu, rank)
        if other != rank:
            host, gpu_id = gpu
            raise MeshError(
                f"ranks {other} and {rank} on {host} use the same GPU ({gpu_id}): start at most as "
                f"many ranks per node as it has GPUs; a launcher other than torchrun must set "
                f"LOCAL_RANK to the index of the rank on its node, or give each rank its own GPU "
                f"(srun --gpus-per-task=1)",
                on_every_rank=True,
            )


def check_group_counts(device: torch.device) -> None:
    """Check that all ranks are in equally many process groups, which the caller may have created.

    torch names a locally synchronized group by its ranks and this number. With different numbers
    its ranks would look for each other under different names.
    """
    if dist.get_world_size() == 1:
        return
    count = len(dist.distributed_c10d._world.pg_names)
    # Without NCCL if possible: it fails if ranks share a GPU, which is checked later.
    world = dist.group.WORLD
    assert world is not None
    on_host = "cpu" in backend_names(world)
    limits = torch.tensor([count, -count], device="cpu" if on_host else device)
    dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=world)
    # Without a mark, the wait has no deadline and no name.
    device_waits.mark(collective_error("all_reduce", limits, world))
    device_waits.synchronize()
    most, least = limits.abs().tolist()
    if most != least:
        raise MeshError(
            f"rank {dist.get_rank()} is in {count} process groups, and other ranks are in {least} "
            f"to {most}, with which torch cannot create the groups of the mesh: if a process group "
            f"has only some of the ranks, create it after pipemega.initialize()",
            on_every_rank=True,
        )


def open_axes(axes: Sequence[Axis], device: torch.device) -> None:
    """Run one collective on every group, in the same order of axes on all ranks.

    A rank that fails after this breaks connections; all are established by then.

    NCCL creates the communicator of a group in the group's first operation. For a batch of sends
    and receives that is the communicator of all its ranks, so a batch in which only some of them
    take part, such as the exchange of a tied parameter, would wait for the others forever.
    """
    for axis in axes:
        if axis.size > 1 and axis.group is not None:
            message = first_message(message_device(axis.group, device))
            dist.all_reduce(message, group=axis.group)
            device_waits.mark(collective_error("all_reduce", message, axis.group))
    device_waits.synchronize()
    dist.barrier(group=axes[-1].group)


def first_message(device: torch.device) -> torch.Tensor:
    """Return zeros to transfer first in a new group.

    On a GPU 64 MiB: some transports of NCCL set up further channels at the first large message.
    """
    size = 1 if device.type == "cpu" else _FIRST_ELEMENTS
    # The default dtype may differ between ranks.
    return torch.zeros(size, dtype=torch.float32, device=device)


def with_timeout(mesh: Mesh, timeout: timedelta) -> Mesh:
    """Return the mesh with another timeout; its process groups get it too.

    The group of all ranks gets it from `set_world_timeout`, after the start.
    """
    for axis in (mesh.pipeline, mesh.data, mesh.tensor, mesh.expert, mesh.replica):
        if axis.group is not None:
            set_timeout(timeout, axis.group)
            _lengthen_nccl_timeout(axis.group, timeout)
    return replace(mesh, timeout=timeout)


def set_world_timeout(mesh: Mesh) -> None:
    """Set the timeout of the world's process group to the timeout of the mesh.

    If the caller has initialized torch.distributed, the group has the caller's timeout until then.
    """
    assert mesh.world.group is not None
    set_timeout(mesh.timeout, mesh.world.group)
    _lengthen_nccl_timeout(mesh.world.group, mesh.timeout)


def new_group(
    ranks: Sequence[int],
    device: torch.device,
    timeout: timedelta,
    description: str,
    *,
    host: bool = True,
    backend: str | None = None,
    urgent: bool = False,
    max_ctas: int = 0,
) -> dist.ProcessGroup:
    """Create a process group for tensors on `device`; collective over its ranks only.

    Start-up time does not grow with the number of groups: with local synchronization, other ranks
    do not take part.

    Args:
        timeout: the timeout of each wait. NCCL's own timeout is longer, so that the errors of
            `device_waits` come before NCCL aborts the process.
        host: on CUDA, the group also has gloo for tensors and objects on the host.
        backend: name of the backend; None: the backend of the device.
        urgent, max_ctas: see `nccl_options`.

    Raises:
        PipelineError: a rank did not create its group within `timeout`; names the waiting rank.
    """
    options = None
    if backend is None and device.type == "cuda":
        backend = _CUDA_BACKEND if host else "nccl"
        options = nccl_options(timeout, urgent=urgent, max_ctas=max_ctas)
    what = f"rank {launched_rank()} in the creation of process group {description!r}"
    with named_collective(what, ranks):
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=description,
        )
    assert isinstance(group, dist.ProcessGroup)
    _lengthen_nccl_timeout(group, timeout)
    return group


def _lengthen_nccl_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    if (nccl := nccl_backend(group)) is not None:
        nccl._set_default_timeout(device_waits.nccl_timeout(timeout))


def new_axis(
    name: AxisName, topology: Topology, rank: int, device: torch.device, timeout: timedelta
) -> Axis:
    """Return the axis of `rank`, with a new process group if it has several ranks."""
    ranks = topology.along(name, rank)
    group = None
    if len(ranks) > 1:
        # Layers wait for collectives of the tensor axis.
        group = new_group(ranks, device, timeout, name, urgent=name == "tensor")
    return Axis(name, ranks, ranks.index(rank), group)


def _expert_axes(
    topology: Topology, rank: int, device: torch.device, timeout: timedelta, data: Axis
) -> tuple[Axis, Axis]:
    """Return the axes "expert" and "replica" of `rank`; all data ranks share the data group."""

    def axis(name: AxisName) -> Axis:
        if topology.size(name) < topology.data:
            return new_axis(name, topology, rank, device, timeout)
        return replace(data, name=name)

    return axis("expert"), axis("replica")


def _world(rank: int, device: torch.device, timeout: timedelta) -> Axis:
    """Return the axis of all ranks, with the default group if its backends suffice."""
    ranks, group = tuple(range(dist.get_world_size())), dist.group.WORLD
    assert group is not None
    names = backend_names(group)
    if device.type == "cuda" and ("cpu" not in names or names.get("cuda") in (None, "gloo")):
        # The caller has initialized torch.distributed with NCCL only, or with gloo only, which
        # makes the host wait for the GPU in every collective.
        group = new_group(ranks, device, timeout, "world")
    _lengthen_nccl_timeout(group, timeout)
    return Axis("world", ranks, rank, group)


HOST = torch.device("cpu")
HOST_BACKEND = "cpu:gloo"


def build_mixed_mesh(
    topology: Topology, devices: Sequence[str], timeout: timedelta = DEFAULT_TIMEOUT
) -> Mesh:
    """Create the process groups of `topology`; collective.

    Args:
        devices: "cpu" or "cuda" for each pipeline rank.

    Raises:
        MeshError: an error of `build_mesh`, or a rank that needs a GPU finds none; on every rank.
    """
    check_world_size(topology)
    if not dist.is_initialized():
        connect_ranks(HOST_BACKEND, timeout)
    check_group_counts(HOST)
    rank = dist.get_rank()
    world = _mixed_world(rank, timeout)
    place = topology.coordinate(rank)
    device = _pick_on_all_ranks(world, topology, devices)
    if device.type == "cuda":
        use_expandable_segments()
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


def _mixed_world(rank: int, timeout: timedelta) -> Axis:
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
        wishes: "cpu" or "cuda" for each rank.
        hosts: name of the host of each rank.

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

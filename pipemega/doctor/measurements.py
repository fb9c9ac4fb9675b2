"""Measures the bandwidth of every axis: all-reduces, and messages between pipeline neighbours.

Sends one element over every connection that a run uses, and checks what arrives.

Checks the checkpoint folder on every node: shared, writable, free space.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pipemega.config import Config
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.process_groups import message_device
from pipemega.distributed.topology import Topology
from pipemega.doctor.attendance import Finding, ranges
from pipemega.errors import CheckpointError, PipelineError
from pipemega.pipeline.messages import TensorMeta
from pipemega.pipeline.plan.channels import Channel, channels
from pipemega.pipeline.plan_selection import training_plan
from pipemega.pipeline.transport import Transport
from pipemega.planning.run_checks import layers_of, planned_order
from pipemega.printing import show_bytes, show_time
from pipemega.storage.filesystem import Storage, is_remote, storage_at

# What the steps below wait for, told to the caller: it is in the error if one does not end.
Tell = Callable[[str], None]

# More layers than any plan has stages: without the section `model` the number is unknown.
_MANY_LAYERS = 1 << 20


def check_axes(mesh: Mesh, tell: Tell) -> list[str]:
    """All-reduce one element over every axis; return the names of the axes.

    Raises:
        PipelineError: a sum is wrong.
    """
    names = []
    for axis in _axes(mesh):
        devices = {"": message_device(axis.group, mesh.device)}
        if devices[""].type == "cuda":
            # The groups of GPUs transfer host memory, too.
            devices[" (gloo)"] = torch.device("cpu")
        for suffix, device in devices.items():
            name = f"{axis.name} ranks {axis.ranks}{suffix}"
            tell(f"the all-reduce over {name}")
            element = torch.full((1,), float(axis.rank + 1), device=device)
            dist.all_reduce(element, group=axis.group)
            _compare(f"the sum over {name}", element, axis.size * (axis.size + 1) / 2)
            names.append(f"{axis.name}{suffix}")
    return names


def check_ring(mesh: Mesh, tell: Tell) -> int:
    """Send one element to the next rank and receive one from the previous one; all at once.

    Raises:
        PipelineError: the received element is not the one that the previous rank sent.
    """
    axis, device = mesh.world, message_device(mesh.world.group, mesh.device)
    received = exchange_in_ring(axis, torch.full((1,), float(axis.rank), device=device), tell)
    previous = (axis.rank - 1) % axis.size
    _compare(f"the element from rank {axis.ranks[previous]}", received, float(previous))
    return axis.size


def exchange_in_ring(axis: Axis, tensor: torch.Tensor, tell: Tell) -> torch.Tensor:
    """Send `tensor` to the next rank of the axis; return what the previous one sends."""
    after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    tell(f"a message from rank {before} and one to rank {after} ({axis.name} ranks)")
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, after, axis.group),
        dist.P2POp(dist.irecv, received, before, axis.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def check_pipeline(mesh: Mesh, rank_of_stage: tuple[int, ...], tell: Tell) -> int:
    """Send one element over every channel of the pipeline, with the transport of a run.

    All ranks go through the channels in the same order, so none waits for a later one.

    Returns:
        the number of channels of this rank.

    Raises:
        PipelineError: a message is not what the peer sent, or the connection is lost.
    """
    tell(f"the connections between the pipeline ranks {mesh.pipeline.ranks}")
    transport = Transport(mesh.pipeline, rank_of_stage, mesh.device, timeout=mesh.timeout)
    own = mesh.pipeline.rank
    used = [c for c in channels(rank_of_stage) if own in _ends(c, rank_of_stage)]
    for channel in used:
        source, target = (mesh.pipeline.ranks[rank] for rank in _ends(channel, rank_of_stage))
        name = f"the {channel.direction} of stage {channel.source} for stage {channel.target}"
        tell(f"{name}, from rank {source} to rank {target}")
        element = torch.full((1,), float(channel.source), device=mesh.device)
        is_activation = channel.direction == "activation"
        if own == rank_of_stage[channel.source]:
            transport.send(channel, 0, element if is_activation else [element])
            continue
        metas = None if is_activation else [TensorMeta.of(element)]
        received = transport.wait(transport.receive(channel, 0, partial(_same, metas)))
        tensor = received if is_activation else received[0]
        _compare(name, tensor.detach(), float(channel.source))
    transport.flush()
    return len(used)


def _same(metas: list[TensorMeta] | None) -> list[TensorMeta] | None:
    return metas


def _ends(channel: Channel, rank_of_stage: Sequence[int]) -> tuple[int, int]:
    return rank_of_stage[channel.source], rank_of_stage[channel.target]


def rank_of_stages(config: Config, topology: Topology) -> tuple[int, ...]:
    """Return the pipeline rank of each stage of the first plan of a run.

    Raises:
        ConfigError, ScheduleError: there is no plan for these sizes.
    """
    count = config.batch(topology.data).num_microbatches
    layers = layers_of(config, topology) or _MANY_LAYERS
    order = planned_order(config)
    plan = training_plan(config.pipeline, topology.pipeline, count, layers, order)
    return plan.rank_of_stage


def _axes(mesh: Mesh) -> list[Axis]:
    axes = (mesh.world, mesh.pipeline, mesh.data, mesh.tensor)
    return [axis for axis in axes if axis.size > 1]


def _compare(what: str, tensor: torch.Tensor, expected: float) -> None:
    found = float(tensor.item())
    if found != expected:
        raise PipelineError(f"{what} is {found:g} and not {expected:g}: wrong data arrived")


# Bytes of the messages: the small one shows the latency, the large ones the bandwidth.
SIZES: Mapping[str, tuple[int, ...]] = {
    "cpu": (1 << 12, 1 << 18, 1 << 22),
    "cuda": (1 << 12, 1 << 22, 1 << 26, 1 << 28),
}
_REPEATS = 5
# A size is left out if the measurement of the next smaller one lets expect more than this.
_LONGEST_SECONDS = 5.0
# A group that is this much slower than the others of its axis gets a warning.
_SLOW_LINK = 0.5
# Slower than this, NCCL probably uses TCP over the wrong interface.
_SLOW_NCCL = 1e9


@dataclass(frozen=True)
class Rate:
    """One measurement of one group.

    Args:
        axis: "data", "tensor", "world", or "pipeline" for messages between neighbours.
        ranks: the ranks of the group.
        size: bytes of the tensor.
        seconds: median time.
        bytes_per_second: bytes that a link carries in each direction: of a message its bytes; of
            an all-reduce over n ranks 2 (n - 1) / n of them, as in NCCL's tests ("bus bandwidth").
    """

    axis: str
    ranks: tuple[int, ...]
    size: int
    seconds: float
    bytes_per_second: float


def measure_bandwidth(mesh: Mesh, tell: Tell) -> list[dict[str, Any]]:
    """Measure the groups of this rank; collective.  Returns `Rate`s as JSON values.

    All groups of an axis are measured at the same time, as they communicate in a training step.
    """
    axes = [axis for axis in (mesh.tensor, mesh.pipeline, mesh.data) if axis.size > 1]
    if not any(axis.size == mesh.world.size for axis in axes):
        axes.append(mesh.world)
    rates: list[Rate] = []
    for axis in axes:
        dist.barrier(mesh.world.group)
        rates += _measure_axis(axis, message_device(axis.group, mesh.device), tell)
    return [asdict(rate) for rate in rates]


def _measure_axis(axis: Axis, device: torch.device, tell: Tell) -> Iterator[Rate]:
    for size in SIZES[device.type]:
        tensor = torch.ones(size // 4, device=device)
        tell(f"{show_bytes(size)} over {axis.name} ranks {axis.ranks}")

        def operation(tensor: torch.Tensor = tensor) -> None:
            if axis.name == "pipeline":
                exchange_in_ring(axis, tensor, tell)
            else:
                # Zeros stay finite however often they are summed.
                dist.all_reduce(tensor.zero_(), group=axis.group)

        seconds = _median_seconds(operation, device)
        slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
        # The ranks of a group must agree on the number of measurements.
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=axis.group)
        factor = 1.0 if axis.name == "pipeline" else 2 * (axis.size - 1) / axis.size
        yield Rate(axis.name, axis.ranks, size, seconds, factor * size / seconds)
        if 64 * _REPEATS * float(slowest.item()) > _LONGEST_SECONDS:
            return


def _median_seconds(operation: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    # The first one creates communicators and buffers.
    return max(median(times[1:]), 1e-9)


def judge_bandwidth(
    by_rank: Mapping[int, Sequence[dict[str, Any]]], is_nccl: bool
) -> Iterator[Finding]:
    """Yield one finding per axis: latency, bandwidth, and the slowest group.

    Args:
        by_rank: rank -> what `measure` returned there.
    """
    rates = [Rate(**values) for rank in sorted(by_rank) for values in by_rank[rank]]
    for axis in dict.fromkeys(rate.axis for rate in rates):
        of_axis = [rate for rate in rates if rate.axis == axis]
        largest = max(rate.size for rate in of_axis)
        # The slowest rank of a group has the time of the group.
        groups: dict[tuple[int, ...], float] = {}
        for rate in of_axis:
            ranks = tuple(rate.ranks)
            if rate.size == largest:
                speed = min(groups.get(ranks, rate.bytes_per_second), rate.bytes_per_second)
                groups[ranks] = speed
        latency = median(r.seconds for r in of_axis if r.size == min(x.size for x in of_axis))
        yield _judge_axis(axis, groups, latency, largest, is_nccl)


def _judge_axis(
    axis: str, groups: Mapping[tuple[int, ...], float], latency: float, size: int, is_nccl: bool
) -> Finding:
    usual, name = median(groups.values()), f"bandwidth {axis}"
    slowest = min(groups, key=lambda ranks: groups[ranks])
    what = "messages" if axis == "pipeline" else "all-reduce"
    text = (
        f"{what} of {show_bytes(size)}: {show_bytes(usual)}/s (median of {len(groups)} "
        f"group{'s' if len(groups) > 1 else ''}); small ones take {show_time(latency)}"
    )
    if groups[slowest] < _SLOW_LINK * max(usual, max(groups.values()) if len(groups) == 2 else 0):
        return Finding(
            "warning",
            name,
            f"{text}; ranks {ranges(slowest)} reach only {show_bytes(groups[slowest])}/s",
            "check cables, cards and other load of their nodes",
        )
    if is_nccl and usual < _SLOW_NCCL:
        return Finding(
            "warning",
            name,
            text,
            "slow for GPUs: set NCCL_DEBUG=INFO and check which interface NCCL uses "
            "(NCCL_SOCKET_IFNAME, NCCL_IB_HCA)",
        )
    return Finding("ok", name, text)


_MARKER = "rank0"
# Network file systems may show a new file to other nodes only after this time.
_VISIBLE_SECONDS = 10.0


def existing_folder(folder: str) -> str:
    """Return `folder`, or its nearest parent that exists, as an absolute path; a URL as it is."""
    if is_remote(folder):
        return folder
    path = Path(folder).expanduser().absolute()
    return str(next(one for one in (path, *path.parents) if one.is_dir()))


def place_marker(folder: str, token: str) -> None:
    """Write a file that the other nodes look for, on rank 0.

    Raises:
        OSError, CheckpointError: the folder cannot be written.
    """
    storage_at(folder).write(f"{token}/{_MARKER}", b"pipemega doctor")


def check_folder(folder: str, token: str, name: str) -> int | None:
    """Write the file `name` beside the marker; return the free bytes, None for a URL.

    Args:
        folder: exists on rank 0.
        token: folder of the marker.

    Raises:
        OSError, CheckpointError: the folder cannot be written; or the marker is not visible here.
    """
    storage, deadline = storage_at(folder), time.monotonic() + _VISIBLE_SECONDS
    while not _exists(storage, f"{token}/{_MARKER}"):
        if time.monotonic() > deadline:
            raise CheckpointError(f"cannot see a file that rank 0 wrote into {folder}")
        time.sleep(0.1)
    storage.write(f"{token}/{name}", b"pipemega doctor")
    return storage.free_bytes()


def remove_marker(folder: str, token: str) -> None:
    """Delete the folder of the marker and the files in it, on rank 0."""
    with suppress(OSError):
        storage_at(folder).delete(token)


def _exists(storage: Storage, name: str) -> bool:
    with suppress(OSError):
        return storage.exists(name)
    return False


def judge_space(folder: str, free: Iterable[int | None], checkpoint_bytes: int | None) -> Finding:
    """Return the finding about a folder that all nodes can write.

    Args:
        free: free bytes as each node sees them; None for a URL.
        checkpoint_bytes: size of one checkpoint, if known.
    """
    text, least = (
        f"{folder}: written by all nodes",
        min((f for f in free if f is not None), default=None),
    )
    if least is not None:
        text += f", {show_bytes(least)} free"
    if checkpoint_bytes is not None:
        text += f"; a checkpoint has about {show_bytes(checkpoint_bytes)}"
        if least is not None and least < checkpoint_bytes:
            remedy = "free some space, or choose another folder (checkpoint.save)"
            return Finding("failed", "disk", text, remedy)
    return Finding("ok", "disk", text)

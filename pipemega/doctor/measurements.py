"""Measures the bandwidth of every axis: all-reduces, and messages between pipeline neighbours.

Measures how far the clocks of the nodes are apart.

Sends one element over every connection that a run uses, and checks what arrives.

Checks the checkpoint folder on every node: shared, free space, speed of writing and reading.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pipemega.doctor.attendance import Finding, listed, ranges
from pipemega.errors import PipelineError
from pipemega.pipeline.messages import TensorMeta
from pipemega.pipeline.plan.channels import Channel, channels
from pipemega.pipeline.plan_selection import training_plan
from pipemega.pipeline.transport import Transport
from pipemega.planning.run_checks import layers_of, planned_order
from pipemega.printing import show_bytes, show_time
from pipemega.profiling.step_trace import ClockSample, clock_offset
from pipemega.storage.filesystem import LocalStorage, Storage, is_remote, storage_at

NUM_SAMPLES = 8
# Logs of different nodes are then hard to compare; leases of shared file systems may break earlier.
_SKEW_SECONDS = 1.0


def sample(mesh: Mesh, clock: Callable[[], int] = time.time_ns) -> list[ClockSample]:
    """Return when this rank entered and left a few all-reduces over all ranks; collective."""
    device = message_device(mesh.world.group, mesh.device)
    token, samples = torch.zeros(1, device=device), []
    for _ in range(NUM_SAMPLES):
        enter = clock()
        dist.all_reduce(token, group=mesh.world.group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(ClockSample(enter, clock()))
    return samples


def judge_clocks(
    samples: Mapping[int, Sequence[Sequence[int]]], hosts: Mapping[str, Sequence[int]]
) -> Finding:
    """Return the finding about the nodes whose clocks differ from that of rank 0.

    Args:
        samples: rank -> (enter, leave) of each all-reduce.
        hosts: host -> ranks.
    """

    def of(rank: int) -> list[ClockSample]:
        return [ClockSample(*pair) for pair in samples[rank]]

    offsets = {host: clock_offset(of(0), of(ranks[0])) for host, ranks in hosts.items() if ranks}
    far = {
        host: offset / 1e9
        for host, (offset, error) in offsets.items()
        if abs(offset) - error > _SKEW_SECONDS * 1e9
    }
    if far:
        own = next(host for host, ranks in hosts.items() if 0 in ranks)
        words = [
            f"{host} is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} {own}"
            for host, offset in far.items()
        ]
        return Finding("warning", "clocks", listed(words), "run chrony or ntpd on all nodes")
    if len(hosts) == 1:
        return Finding("ok", "clocks", "one node")
    largest, error = max(offsets.values(), key=lambda pair: abs(pair[0]))
    return Finding(
        "ok",
        "clocks",
        f"at most {show_time(abs(largest) / 1e9)} apart (+- {show_time(error / 1e9)})",
    )


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


def check_ring(axis: Axis, device: torch.device, tell: Tell) -> int:
    """Send one element to the next rank and receive one from the previous one; all at once.

    Raises:
        PipelineError: the element is not that of the previous rank.
    """
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
        ranks: of the group.
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
_CHUNK = 1 << 20
# Network file systems may show a new file to other nodes only after this time.
_VISIBLE_SECONDS = 10.0
# Bytes per second; slower than a single hard disk.
_SLOW_DISK = 100e6
_GIVE_SPACE = "free some space, or choose another folder (checkpoint.save)"


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


def measure_disk(folder: str, token: str, rank: int, size: int) -> dict[str, Any]:
    """Write and read a file of `size` bytes; return JSON values for `judge`.

    Args:
        folder: exists on rank 0.
        token: folder of the marker file.
        rank: of this process, for the name of its file.
    """
    storage = storage_at(folder)
    result: dict[str, Any] = {"size": size, "shared": _sees_marker(storage, token)}
    if not result["shared"]:
        return result
    name = f"{token}/speed{rank}"
    try:
        result["free"] = storage.free_bytes()
        result["write"] = _write(storage, name, size)
        result["read"] = _read(storage, name)
    except OSError as error:
        result["error"] = _reason(error)
        result["full"] = error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            storage.delete(name)
    return result


def remove_marker(folder: str, token: str) -> None:
    """Delete the folder of the marker file, on rank 0."""
    with suppress(OSError):
        storage_at(folder).delete(token)


def _sees_marker(storage: Storage, token: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if storage.exists(f"{token}/{_MARKER}"):
                return True
        time.sleep(0.1)
    return False


def _write(storage: Storage, name: str, size: int) -> float:
    """Return the bytes per second until the file is durable."""
    # Random bytes, which no file system compresses.
    chunk = os.urandom(_CHUNK)
    start = time.perf_counter()
    with storage.create(name) as stream:
        for position in range(0, size, _CHUNK):
            stream.write(chunk[: size - position])
    return size / (time.perf_counter() - start)


def _read(storage: Storage, name: str) -> float:
    """Return the bytes per second; a local file is first dropped from the page cache."""
    start, size = time.perf_counter(), 0
    with storage.open(name) as stream:
        if isinstance(storage, LocalStorage):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := stream.read(_CHUNK):
            size += len(block)
    return size / (time.perf_counter() - start)


def judge_disk(
    folder: str,
    marker_error: str,
    results: Mapping[str, Mapping[str, Any]],
    checkpoint_bytes: int | None,
) -> Iterator[Finding]:
    """Yield the findings about the folder.

    Args:
        marker_error: error of `place_marker`; empty if the file was written.
        results: host -> what `measure` returned there.
        checkpoint_bytes: size of one checkpoint, if known.
    """
    if marker_error:
        remedy = "check its permissions and free space, or choose another one (checkpoint.save)"
        yield Finding("failed", "disk", f"{folder}: {marker_error}", remedy)
        return
    hidden = [host for host, result in results.items() if not result["shared"]]
    if hidden:
        yield Finding(
            "failed",
            "disk",
            f"{listed(hidden)} cannot see a file that rank 0 wrote into {folder}",
            "choose a checkpoint folder on a file system that all nodes share",
        )
    for host, result in results.items():
        if "error" in result:
            full = f"; {show_bytes(result['free'])} free" if result.get("free") is not None else ""
            size = show_bytes(result["size"])
            remedy = _GIVE_SPACE if result["full"] else "check the file system of this folder"
            text = f"{host} cannot write and read {size} in {folder}: {result['error']}{full}"
            yield Finding("failed", "disk", text, remedy)
    measured = {host: result for host, result in results.items() if "read" in result}
    if measured:
        yield from _judge_speed(folder, measured, checkpoint_bytes)


def _judge_speed(
    folder: str, results: Mapping[str, Mapping[str, Any]], checkpoint_bytes: int | None
) -> Iterator[Finding]:
    slowest = min(results, key=lambda host: float(results[host]["write"]))
    # All nodes wrote at the same time, so a shared disk has the sum of their speeds.
    together = sum(result["write"] for result in results.values())
    free = min((r["free"] for r in results.values() if r["free"] is not None), default=None)
    text = (
        f"{folder}: writes {show_bytes(results[slowest]['write'])}/s and reads "
        f"{show_bytes(results[slowest]['read'])}/s on the slowest node ({slowest})"
    )
    if free is not None:
        text += f", {show_bytes(free)} free"
    if checkpoint_bytes is not None:
        text += (
            f"; a checkpoint of about {show_bytes(checkpoint_bytes)} takes about "
            f"{show_time(checkpoint_bytes / together)}"
        )
    if free is not None and checkpoint_bytes is not None and free < checkpoint_bytes:
        yield Finding("failed", "disk", text, _GIVE_SPACE)
    elif results[slowest]["write"] < _SLOW_DISK:
        yield Finding(
            "warning",
            "disk",
            text,
            "slow: choose a faster folder, or save in the background (checkpoint.async)",
        )
    else:
        yield Finding("ok", "disk", text)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

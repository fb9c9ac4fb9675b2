"""Measures the bandwidth of every axis: all-reduces, and messages between pipeline neighbours."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pipemega.distributed.backends import message_device
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.doctor.connection_checks import Tell, exchange_in_ring
from pipemega.doctor.findings import Finding, ranges
from pipemega.planning.units import show_bytes, show_time

# Bytes of the messages: the small one shows the latency, the large ones the bandwidth.
SIZES: Mapping[str, tuple[int, ...]] = {
    "cpu": (1 << 12, 1 << 18, 1 << 22),
    "cuda": (1 << 12, 1 << 22, 1 << 26, 1 << 28),
}
_REPEATS = 5
# A size is left out if the measurement of the next smaller one lets expect more than this.
_LONGEST_SECONDS = 5.0
# A group that is this much slower than the others of its axis gets a warning.
_SLOW = 0.5
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


def measure(mesh: Mesh, tell: Tell) -> list[dict[str, Any]]:
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


def judge(by_rank: Mapping[int, Sequence[dict[str, Any]]], is_nccl: bool) -> Iterator[Finding]:
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
    if groups[slowest] < _SLOW * max(usual, max(groups.values()) if len(groups) == 2 else 0):
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

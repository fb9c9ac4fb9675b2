"""Measures how far the clocks of the nodes are apart."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from pipemega.distributed.backends import message_device
from pipemega.distributed.mesh import Mesh
from pipemega.doctor.findings import Finding, listed
from pipemega.planning.units import show_time
from pipemega.profiling.clock_sync import ClockSample, clock_offset

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


def judge(
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

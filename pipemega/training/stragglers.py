"""Which rank makes the others wait: what each takes for its own work, side by side.

A rank's own work in a step is reading its batch and computing, without waiting for messages and
without the sums over ranks. Ranks of one tensor group wait for each other within each layer, so
they are slow together.
"""

import os
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipemega.mesh import Mesh

# Less than this in a step is no reason to look for a slow machine.
_WORTH_SECONDS = 0.01

# Ranks up to which each has a number of its own in the records.
_SHOWN_RANKS = 64

# Summaries without it until a straggler is worth another line.
_FORGOTTEN_AFTER = 10


@dataclass(frozen=True)
class Summary:
    """What the ranks took for their own work in a step, in the median over some steps.

    Args:
        slowest: the rank that lags most behind those with the same work.
        seconds: that it took; `usual` is what they took.
        lags: whether that is beyond the factor.
        of_each: seconds of every rank.
    """

    slowest: int
    seconds: float
    usual: float
    lags: bool
    of_each: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        return self.seconds / self.usual if self.usual else 1.0

    def scalars(self) -> dict[str, float]:
        """By name, for the record of the step."""
        each = self.of_each if len(self.of_each) <= _SHOWN_RANKS else ()
        return {
            **{f"work_seconds_rank{rank}": seconds for rank, seconds in enumerate(each)},
            "work_seconds_slowest": self.seconds,
            "work_seconds_usual": self.usual,
            "work_slowest_rank": float(self.slowest),
        }


class StragglerWatch:
    """Gathers what every rank took, every so many steps; collective.

    Args:
        mesh: of the run.
        factor: times the usual that makes a straggler; 0: nothing is gathered.
        interval: steps that are looked at together.
    """

    def __init__(self, mesh: Mesh, factor: float, interval: int) -> None:
        self._mesh, self._factor, self._interval = mesh, factor, interval
        self._seconds: list[float] = []
        self._named: dict[int, int] = {}  # rank -> summaries since it was seen to lag

    def see(self, seconds: float) -> Summary | None:
        """The summary that this step completes; the same on every rank.

        Args:
            seconds: of this rank's own work in the step.
        """
        if not self._factor or self._mesh.world.size == 1:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < self._interval:
            return None
        mine, self._seconds = statistics.median(self._seconds), []
        own = torch.tensor([mine], dtype=torch.float64, device=self._mesh.device)
        told = [torch.empty_like(own) for _ in self._mesh.world.ranks]
        dist.all_gather(told, own, group=self._mesh.world.group)
        return summarize(torch.cat(told).tolist(), self._mesh, self._factor)

    def is_news(self, summary: Summary) -> bool:
        """Whether its straggler has not been one for a while, so that it is worth a line."""
        self._named = {r: age + 1 for r, age in self._named.items() if age + 1 < _FORGOTTEN_AFTER}
        if not summary.lags:
            return False
        known = summary.slowest in self._named
        self._named[summary.slowest] = 0
        return not known

    def where(self, rank: int) -> str:
        """Machine and process of a rank; every rank calls it."""
        mine = f"{socket.gethostname()}, process {os.getpid()}"
        told: list[Any] = [None] * self._mesh.world.size
        dist.all_gather_object(told, mine, group=self._mesh.world.group)
        return str(told[rank])


def summarize(seconds: Sequence[float], mesh: Mesh, factor: float) -> Summary:
    """Compares each rank with the others that have the same work, and finds the worst.

    Those are the ranks of its stages on all data ranks; with one data rank, all ranks there are.

    Args:
        seconds: of each rank.
    """
    topology = mesh.topology

    def peers(rank: int) -> Sequence[int]:
        return topology.along("data", rank) if topology.data > 1 else range(topology.world_size)

    # The lower one of two: two ranks are compared with the faster.
    usual = [statistics.median_low(seconds[peer] for peer in peers(r)) for r in range(len(seconds))]
    slowest = max(range(len(seconds)), key=lambda r: seconds[r] / usual[r] if usual[r] else 1.0)
    longer = seconds[slowest] - usual[slowest]
    lags = seconds[slowest] > factor * usual[slowest] and longer > _WORTH_SECONDS
    return Summary(slowest, seconds[slowest], usual[slowest], lags, tuple(seconds))

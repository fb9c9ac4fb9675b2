"""Straggler detection: compare the time that each rank works in a step.

The work of a rank is reading its batch and computing, without waiting for messages and without
reductions over ranks. Only ranks of one pipeline stage are compared, because other stages have
other layers. The ranks of a tensor group wait for each other in each layer, so they are slow
together.

Detects loss spikes, for the log; training does not change.
"""

import math
import os
import socket
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipemega.config.sections.run_sections import StragglersSection
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.distributed.topology import Topology
from pipemega.pipeline.plan.instructions import Plan

# A straggler takes at least this many seconds longer than usual.
_LEAST_SECONDS = 0.01

# Up to this many ranks, the records contain the time of each rank.
SHOWN_RANKS = 64


@dataclass(frozen=True)
class Summary:
    """The ranks' work time per step, as the median over some steps.

    Args:
        seconds: work time per step of every rank, in seconds.
        usual: for every rank, the median work time of the ranks of its stage, in seconds.
        topology: the topology of the run.
    """

    seconds: tuple[float, ...]
    usual: tuple[float, ...]
    topology: Topology

    def ratio(self, rank: int) -> float:
        return self.seconds[rank] / self.usual[rank] if self.usual[rank] else 1.0

    def slow(self, factor: float) -> tuple[int, ...]:
        """Return the ranks that take more than `factor` times the usual time, slowest first."""
        ranks = [
            rank
            for rank, (own, usual) in enumerate(zip(self.seconds, self.usual, strict=True))
            if own > factor * usual and own - usual > _LEAST_SECONDS
        ]
        return tuple(sorted(ranks, key=self.ratio, reverse=True))

    @property
    def slowest(self) -> int:
        """The rank that is slowest relative to the ranks of its stage."""
        return max(range(len(self.seconds)), key=self.ratio)

    def scalars(self) -> dict[str, float]:
        """Return the numbers by name, for the record of the step."""
        each = self.seconds if len(self.seconds) <= SHOWN_RANKS else ()
        scalars = {f"work_seconds_rank{rank}": seconds for rank, seconds in enumerate(each)}
        if self.topology.pipeline > 1:
            # Work of the busiest pipeline rank relative to the mean: no fault of a machine.
            scalars["work_stage_imbalance"] = max(self.usual) / (statistics.fmean(self.usual) or 1)
        if self.topology.world_size > self.topology.pipeline:
            scalars["work_seconds_slowest"] = self.seconds[self.slowest]
            scalars["work_seconds_usual"] = self.usual[self.slowest]
            scalars["work_slowest_rank"] = float(self.slowest)
        return scalars


class StragglerWatch:
    """Gathers and compares the work time of all ranks every `interval` steps; collective.

    Args:
        mesh: the device mesh of the run.
        section: factor, checks and interval.
        interval: steps per check if the section has none.
    """

    def __init__(self, mesh: Mesh, section: StragglersSection, interval: int) -> None:
        self._mesh, self._section = mesh, section
        self._interval = section.interval or interval
        self._seconds: list[float] = []
        self._episodes = Episodes(section.checks)

    def add(self, seconds: float) -> Summary | None:
        """Add the work time of this rank in one step; every `interval` steps return a summary.

        The summary is the same on every rank.
        """
        if not self._section.factor or self._mesh.world.size == 1:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < self._interval:
            return None
        median, self._seconds = statistics.median(self._seconds), []
        own = torch.tensor([median], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in self._mesh.world.ranks]
        dist.all_gather(gathered, own, group=self._mesh.world.group)
        times = torch.cat(gathered).tolist()
        return summarize(times, self._mesh.topology)

    def warning(self, summary: Summary, plan: Plan) -> str | None:
        """Return the warning if ranks have just become stragglers, else None; collective."""
        ranks = self._episodes.begin(summary.slow(self._section.factor))
        if not ranks:
            return None
        topology, checks = self._mesh.topology, self._section.checks
        rank, *others = ranks
        place = topology.coordinate(rank)
        stages = ", ".join(map(str, plan.stages_of(place.pipeline)))
        process = f"{socket.gethostname()}, process {os.getpid()}"
        located = gather_objects(process, self._mesh.world)[rank]
        text = (
            f"rank {rank} ({located}; stage {stages}, data rank {place.data}) takes "
            f"{summary.seconds[rank] * 1e3:.1f} ms for its own work in a step, "
            f"{summary.ratio(rank):.1f} times the usual {summary.usual[rank] * 1e3:.1f} ms of its "
            f"stage, in {checks} checks of {self._interval} steps in a row; all ranks wait for it "
            f"(training.stragglers.factor {self._section.factor:g})"
        )
        if others:
            text += f"; also slow: ranks {', '.join(map(str, others))}"
        return text


class Episodes:
    """The stragglers over several checks. An episode starts and ends after `checks` in a row.

    Args:
        checks: number of checks in a row in which a rank must be slow, or fast again.
    """

    def __init__(self, checks: int) -> None:
        self._checks = checks
        self._slow: dict[int, int] = {}  # rank -> checks in a row in which it was slow
        self._fast: dict[int, int] = {}  # straggler -> checks in a row in which it was fast

    def begin(self, slow: Sequence[int]) -> tuple[int, ...]:
        """Add one check; return the ranks whose episode starts with it, in the order of `slow`."""
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        started = tuple(
            rank for rank in slow if self._slow[rank] >= self._checks and rank not in self._fast
        )
        fast = {rank: 0 if rank in self._slow else n + 1 for rank, n in self._fast.items()}
        self._fast = {rank: n for rank, n in fast.items() if n < self._checks}
        self._fast |= dict.fromkeys(started, 0)
        return started


def summarize(seconds: Sequence[float], topology: Topology) -> Summary:
    """Compare each rank with the data and tensor ranks of its stage.

    Args:
        seconds: work time of each rank.
    """
    per_stage = topology.data * topology.tensor  # consecutive ranks
    usual: list[float] = []
    for first in range(0, topology.world_size, per_stage):
        # The lower median: of two ranks, the slower is compared with the faster.
        usual += [statistics.median_low(seconds[first : first + per_stage])] * per_stage
    return Summary(tuple(seconds), tuple(usual), topology)


# Number of losses needed before a spike is detected.
_MIN_LOSSES = 20
# Standard deviation / median absolute deviation of a normal distribution.
_SIGMA_PER_MAD = 1.4826
# Least deviation, as a share of the median: an almost constant loss must not make noise a spike.
_MIN_RELATIVE_DEVIATION = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss above the bound, which is `median` + factor * `deviation`."""

    loss: float
    median: float
    deviation: float
    bound: float


class SpikeDetector:
    """Compares each loss with the previous ones.

    By median and median absolute deviation, which earlier spikes hardly change, unlike mean and
    standard deviation.

    Args:
        window: number of previous losses; 0 disables detection.
        factor: a spike is more than this many deviations above the median.
    """

    def __init__(self, window: int, factor: float) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=window)
        self._min_losses = min(_MIN_LOSSES, window)
        self._in_spike = False

    def add(self, loss: float) -> Spike | None:
        """Add a loss; return the spike that starts with it, None also within a spike."""
        if not math.isfinite(loss) or not self._losses.maxlen:
            return None
        spike = self._spike(loss) if len(self._losses) >= self._min_losses else None
        starts, self._in_spike = spike is not None and not self._in_spike, spike is not None
        self._losses.append(loss)
        return spike if starts else None

    def _spike(self, loss: float) -> Spike | None:
        median = statistics.median(self._losses)
        mad = statistics.median(abs(other - median) for other in self._losses)
        deviation = max(_SIGMA_PER_MAD * mad, _MIN_RELATIVE_DEVIATION * abs(median))
        bound = median + self._factor * deviation
        return Spike(loss, median, deviation, bound) if loss > bound else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "in_spike": self._in_spike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the losses of an earlier run; if the window is smaller, the latest of them."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._in_spike = bool(state["in_spike"])

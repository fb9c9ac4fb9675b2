"""Estimates the offset between the clocks of two processes from barriers that both took part in.

No process leaves a barrier (or an all-reduce) before every process has entered it. If the other
clock is ahead of ours by `offset`:

    theirs.enter - offset <= ours.leave          ours.enter <= theirs.leave - offset

Each barrier gives these two bounds, and the offset satisfies all of them. Short barriers give tight
bounds: as with a ping, the error is at most half of the round trip. One barrier serves all ranks at
once, on any backend.

Source: the bounds are those of Cristian's algorithm (Cristian 1989, Distributed Computing 3).
"""

from collections.abc import Sequence
from typing import NamedTuple


class ClockSample(NamedTuple):
    """When one process entered and left one barrier, in nanoseconds of its own clock."""

    enter: int
    leave: int


def clock_offset(ours: Sequence[ClockSample], theirs: Sequence[ClockSample]) -> tuple[float, float]:
    """Return (how far their clock is ahead of ours, maximum error of that number).

    Args:
        ours, theirs: samples of the same barriers in the same order; at least one.
    """
    pairs = list(zip(ours, theirs, strict=True))
    lowest = max(other.enter - own.leave for own, other in pairs)
    highest = min(other.leave - own.enter for own, other in pairs)
    return (lowest + highest) / 2, abs(highest - lowest) / 2

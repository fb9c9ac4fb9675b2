"""How far the clocks of two processes are apart, from meetings that both took part in.

In a meeting (a barrier, an all-reduce) nobody leaves before everybody has come. So whatever the
offset is that the other clock is ahead of ours, it has come before we left, and we before it left:

    theirs.come - offset <= ours.left          ours.come <= theirs.left - offset

Each meeting gives such bounds, and the offset lies within all of them. The quicker the meetings,
the closer the bounds: as with a ping, the error is at most half of the time that there and back
takes, but one meeting serves all ranks at once, on any backend.

Source: the bounds are those of Cristian's algorithm (Cristian 1989, Distributed Computing 3).
"""

from collections.abc import Sequence
from typing import NamedTuple


class Meeting(NamedTuple):
    """When a process came to a meeting and left it, by its own clock."""

    come: int
    left: int


def offset(ours: Sequence[Meeting], theirs: Sequence[Meeting]) -> tuple[float, float]:
    """(how far their clock is ahead of ours, by how much that may be wrong at most).

    Args:
        ours, theirs: the same meetings, in order, at least one.
    """
    both = list(zip(ours, theirs, strict=True))
    lowest = max(other.come - own.left for own, other in both)
    highest = min(other.left - own.come for own, other in both)
    return (lowest + highest) / 2, abs(highest - lowest) / 2

"""How a flat of gradients is cut over the data ranks: arithmetic alone.  Floor 1.

    entries   | a a a a a b b - c c c c - - - - | d d d d d d d d d d d d |      - nobody's: zeros
    buckets   |                0                |            1            |
    owners    |    0     |    1     |     2     |   0    |   1   |   2    |

An entry lies whole in one bucket, so that what a rank owns of it is one stretch; and a bucket is
cut evenly, so that one reduce-scatter and one all-gather move it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every entry, and every slice of a bucket, starts on a multiple of this: for aligned loads."""


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """The least multiple of `to` that is not below `size`."""
    return -(-size // to) * to


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a flat, cut evenly over the ranks.

    Args:
        entries: the positions in the given sizes of what lies here.
        starts: of each entry, in the flat.
        ranks: a multiple of `ranks * ALIGNMENT` elements in all.
    """

    start: int
    stop: int
    entries: tuple[int, ...]
    starts: tuple[int, ...]
    ranks: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def share(self) -> int:
        """Elements that each rank owns."""
        return self.size // self.ranks

    def owned_by(self, rank: int) -> tuple[int, int]:
        """[start, stop) in the flat of what `rank` owns."""
        start = self.start + rank * self.share
        return start, start + self.share


def fill_buckets(
    sizes: Sequence[int], ranks: int, limit: int, start: int = 0
) -> tuple[Bucket, ...]:
    """Entries in their order into buckets, one behind the other from `start` on.

    A bucket takes entries as long as it has at most `limit` elements, gaps included; an entry that
    is larger has one of its own. Then it is padded until it can be cut evenly.
    """
    buckets: list[Bucket] = []
    for entries in _runs(sizes, limit):
        starts, at = [], start
        for entry in entries:
            starts.append(at)
            at += aligned(sizes[entry])
        stop = start + aligned(at - start, ranks * ALIGNMENT)
        buckets.append(Bucket(start, stop, tuple(entries), tuple(starts), ranks))
        start = stop
    return tuple(buckets)


def _runs(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    run: list[int] = []
    filled = 0
    for entry, size in enumerate(sizes):
        if run and filled + aligned(size) > limit:
            yield run
            run, filled = [], 0
        run.append(entry)
        filled += aligned(size)
    if run:
        yield run


def common_part(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """What two stretches [start, stop) share; (0, 0) if that is nothing."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (0, 0)

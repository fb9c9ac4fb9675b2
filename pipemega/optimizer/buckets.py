"""Divide a flat buffer of gradients into buckets and slices per data rank: arithmetic, no tensors.

    entries   | a a a a a b b - c c c c - - - - | d d d d d d d d d d d d |      - padding: zeros
    buckets   |                0                |            1            |
    owners    |    0     |    1     |     2     |   0    |   1   |   2    |

An entry lies in one bucket, so that each rank owns one contiguous range of it.  A bucket is divided
evenly, so that one reduce-scatter and one all-gather handle it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every entry, and every slice of a bucket, starts at a multiple of this, for aligned loads."""


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Round `size` up to a multiple of `to`."""
    return -(-size // to) * to


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a flat buffer, divided evenly over the ranks.

    Args:
        entries: indices of its entries in the list of sizes that was given.
        starts: start of each entry in the flat buffer.
        ranks: number of slices; the size is a multiple of `ranks * ALIGNMENT`.
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
        """Number of elements that each rank owns."""
        return self.size // self.ranks

    def owned_by(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) in the flat buffer of the slice that `rank` owns."""
        start = self.start + rank * self.share
        return start, start + self.share


def fill_buckets(
    sizes: Sequence[int], ranks: int, reduce_bucket_size: int, start: int = 0
) -> tuple[Bucket, ...]:
    """Put entries into consecutive buckets, in their order, beginning at element `start`.

    A bucket takes entries while it has at most `reduce_bucket_size` elements, gaps included; a
    larger entry gets a bucket for itself.  Then the bucket is padded so that it divides evenly.
    """
    buckets: list[Bucket] = []
    for entries in _runs(sizes, reduce_bucket_size):
        starts, at = [], start
        for entry in entries:
            starts.append(at)
            at += aligned(sizes[entry])
        stop = start + aligned(at - start, ranks * ALIGNMENT)
        buckets.append(Bucket(start, stop, tuple(entries), tuple(starts), ranks))
        start = stop
    return tuple(buckets)


def _runs(sizes: Sequence[int], reduce_bucket_size: int) -> Iterator[list[int]]:
    """Yield the indices of the entries of each bucket."""
    run: list[int] = []
    filled = 0
    for entry, size in enumerate(sizes):
        if run and filled + aligned(size) > reduce_bucket_size:
            yield run
            run, filled = [], 0
        run.append(entry)
        filled += aligned(size)
    if run:
        yield run


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the intersection of two ranges [start, stop); (0, 0) if it is empty."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (0, 0)

"""A rank's shard of a logical tensor, and its chunks, which a checkpoint stores.

Checkpoints store logical tensors: under the names of the unsharded model, without padding, as if
one process had written them. Three values describe the relation between a rank and one tensor:

    shard         the segments of the logical tensor that the local tensor consists of
    span          the flat range of the local tensor that this rank holds (ZeRO); None: all
    write_range   the flat range of the local tensor that this rank, and no other, writes

A flat range is split into a few rectangular chunks, and each of these, at the segment bounds, into
chunks of the logical tensor. Padding is in none of them. `dcp_storage` writes and reads the chunks;
this module does not import torch.distributed.checkpoint, which loads sympy and much of torch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from pipemega.distributed.mesh import Axis
from pipemega.parameters import Shard

LARGEST_CHUNK = 32 << 20
"""Bytes of the largest stored chunk: a rank that needs a part of a tensor reads little more."""

Range = tuple[int, int]
Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes along each dim."""
LocalChunks = dict[torch.Size, Tensor]
"""Offsets of a chunk in the logical tensor -> its view of the local tensor."""
TensorIndex = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""name -> (logical shape, dtype) of each tensor in a checkpoint."""


@dataclass(eq=False)
class TensorShard:
    """This rank's shard of one logical tensor.

    Args:
        local: the local data; loading writes into it. With a span, flat.
        shard: which part of the logical tensor the local tensor is.
        write_range: the flat range of the local tensor that this rank writes.
        shape: of the whole local tensor; None: that of `local`.
        span: the flat range of the local tensor that `local` holds; None: all.
    """

    local: Tensor
    shard: Shard
    write_range: Range = (0, 0)
    shape: tuple[int, ...] | None = None
    span: Range | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.local.shape) if self.shape is None else self.shape

    @property
    def numel(self) -> int:
        """Elements of the whole local tensor."""
        return prod(self.local_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole local tensor."""
        return self.numel * self.local.element_size()

    def size(self) -> torch.Size:
        """Shape of the logical tensor."""
        return torch.Size(self.shard.shape)

    @property
    def outgoing(self) -> "OutgoingShard":
        """The chunks that this rank writes, of at most `LARGEST_CHUNK` bytes."""
        largest = LARGEST_CHUNK // self.local.element_size()
        ranges = split_range(*self.write_range, self._row, largest)
        return OutgoingShard(self.size(), self._chunks(ranges))

    @cached_property
    def incoming(self) -> LocalChunks:
        """The chunks that this rank reads."""
        return self._chunks([self.span or (0, self.numel)])

    def row_start(self, byte: int) -> int:
        """Return the first element of the row that contains `byte`; the end if it is past it."""
        if byte >= self.nbytes:
            return self.numel
        return max(0, byte) // self.local.element_size() // self._row * self._row

    @property
    def _row(self) -> int:
        return max(1, prod(self.local_shape[1:]))

    def _chunks(self, ranges: Iterable[Range]) -> LocalChunks:
        found: LocalChunks = {}
        for start, stop in ranges:
            for offsets, sizes in chunks_of_range(self.local_shape, start, stop):
                part = self._view(offsets, sizes)
                for logical_offsets, logical_part in self._in_logical(offsets, part):
                    found[torch.Size(logical_offsets)] = logical_part
        return found

    def _view(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return the view of `local` for a chunk of the local tensor."""
        if self.span is None:
            part = self.local
            for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, start, length)
            return part
        # A chunk of a flat range is contiguous.
        start = 0
        for offset, length in zip(offsets, self.local_shape, strict=True):
            start = start * length + offset
        return self.local.narrow(0, start - self.span[0], prod(sizes)).view(sizes)

    def _in_logical(
        self, offsets: tuple[int, ...], part: Tensor
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Split a local chunk at the segments of the shard; yield offsets in the logical tensor."""
        dim = self.shard.dim
        if dim is None:
            yield offsets, part
            return
        low, high = offsets[dim], offsets[dim] + part.shape[dim]
        for start, length, offset in self.shard.segments:
            first, last = max(low, offset), min(high, offset + length)
            if first < last:
                logical = (*offsets[:dim], start + first - offset, *offsets[dim + 1 :])
                yield logical, part.narrow(dim, first - low, last - first)


@dataclass(eq=False)
class OutgoingShard:
    """The chunks of a logical tensor of `shape` that this rank writes: views, or copies."""

    shape: torch.Size
    chunks: LocalChunks


def chunks_of_range(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """Split elements [start, stop) of a row-major tensor into at most 2 * dims - 1 chunks.

    shape [4, 5], elements 3 to 17          . . . a a
                                            b b b b b
    a: offsets (0, 3), sizes [1, 2]         b b b b b
    b: offsets (1, 0), sizes [2, 5]         c c c . .
    c: offsets (3, 0), sizes [1, 3]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    row = prod(rest)

    def within_row(number: int, low: int, high: int) -> list[Chunk]:
        chunks = chunks_of_range(rest, low, high)
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in chunks]

    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return within_row(first, start - first * row, stop - first * row)
    begin, end = -(-start // row), stop // row
    found = within_row(first, start - first * row, row) if first < begin else []
    if begin < end:
        found.append(((begin, *(0 for _ in rest)), (end - begin, *rest)))
    return found + (within_row(last, 0, stop - end * row) if last == end else [])


def split_range(start: int, stop: int, row: int, largest: int) -> Iterator[Range]:
    """Split [start, stop) into ranges of at most `largest` elements, between rows if rows fit."""
    step = max(1, largest // row * row or largest)
    while start < stop:
        end = min(stop, start // step * step + step)
        yield start, end
        start = end


def assign_writes(shards: Iterable[TensorShard], axis: Axis) -> None:
    """Set the write ranges so that the ranks of `axis` write equal bytes, up to one row.

    Args:
        shards: tensors that all these ranks hold; the same on each rank, in the same order.
    """
    shards = list(shards)
    total = sum(shard.nbytes for shard in shards)
    low, high = (total * rank // axis.size for rank in (axis.rank, axis.rank + 1))
    for shard in shards:
        shard.write_range = (shard.row_start(low), shard.row_start(high))
        low, high = low - shard.nbytes, high - shard.nbytes

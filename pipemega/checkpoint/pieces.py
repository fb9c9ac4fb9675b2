"""A rank's part of a logical tensor, as torch.distributed.checkpoint wants it.

What is stored are logical tensors: by the name that they have in the unsplit model, without
padding, as if one process had written them. Three things decide what a rank has of one:

    the shard   the stretches of the logical tensor that its local tensor is made of
    the span    the flat range of that local tensor that it holds, if not all of it (ZeRO)
    stored      the flat range that it, and no other rank, writes

A flat range is a few boxes, and each of them, cut along the stretches, a few boxes of the logical
tensor; padding is in none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pipemega.checkpoint.boxes import boxes
from pipemega.mesh import Axis
from pipemega.parameters import Shard

LARGEST_CHUNK = 32 << 20
"""Bytes that are written, and read, at once: who wants a part of a tensor reads no more of it."""

Range = tuple[int, int]
Chunks = dict[torch.Size, tuple[ChunkStorageMetadata, Tensor]]
"""Where it begins in the logical tensor -> its place there, and where it lies here."""


@dataclass(eq=False)
class Piece:
    """What this rank has of one logical tensor.

    Args:
        local: where it lies here; read into in place. With a span, flat.
        shard: which part of the logical tensor the local tensor is.
        stored: the flat range of the local tensor that this rank writes.
        shape: of the whole local tensor; None: that of `local`.
        span: the flat range of the local tensor that `local` holds; None: all.
    """

    local: Tensor
    shard: Shard
    stored: Range = (0, 0)
    shape: tuple[int, ...] | None = None
    span: Range | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.local.shape) if self.shape is None else self.shape

    @property
    def numel(self) -> int:
        """Elements of the whole local tensor."""
        return prod(self.local_shape)

    def size(self) -> torch.Size:
        """Of the logical tensor; torch.distributed.checkpoint compares it with what is stored."""
        return torch.Size(self.shard.shape)

    @property
    def outgoing(self) -> "Outgoing":
        """What this rank writes, in chunks of some MB."""
        ranges = cut(*self.stored, self._row, LARGEST_CHUNK // self.local.element_size())
        return Outgoing(self.size(), self._chunks(ranges))

    @cached_property
    def incoming(self) -> Chunks:
        """What this rank reads."""
        return self._chunks([self.span or (0, self.numel)])

    def nearest_row(self, number: int) -> int:
        """The last element at or before byte `number` at which a row begins; the end past it."""
        if number >= self.numel * self.local.element_size():
            return self.numel
        return max(0, number) // self.local.element_size() // self._row * self._row

    @property
    def _row(self) -> int:
        return max(1, prod(self.local_shape[1:]))

    def _chunks(self, ranges: Iterable[Range]) -> Chunks:
        found = {}
        for start, stop in ranges:
            for at, size in boxes(self.local_shape, start, stop):
                for offsets, part in self._in_logical(at, self._part(at, size)):
                    chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
                    found[chunk.offsets] = (chunk, part)
        return found

    def _part(self, at: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if self.span is None:
            part = self.local
            for dim, (start, length) in enumerate(zip(at, size, strict=True)):
                part = part.narrow(dim, start, length)
            return part
        # A box of a flat range is a flat range.
        place = 0
        for start, length in zip(at, self.local_shape, strict=True):
            place = place * length + start
        return self.local.narrow(0, place - self.span[0], prod(size)).view(size)

    def _in_logical(
        self, at: tuple[int, ...], part: Tensor
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        dim = self.shard.dim
        if dim is None:
            yield at, part
            return
        low, high = at[dim], at[dim] + part.shape[dim]
        for start, length, offset in self.shard.pieces:
            first, last = max(low, offset), min(high, offset + length)
            if first < last:
                offsets = (*at[:dim], start + first - offset, *at[dim + 1 :])
                yield offsets, part.narrow(dim, first - low, last - first)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self.incoming.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "every chunk of ours has its place"
        return self.incoming[index.offset][1]


@dataclass(eq=False)
class Outgoing:
    """What this rank writes of one logical tensor of `shape`: views of it, or copies."""

    shape: torch.Size
    chunks: Chunks

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.shape,
                ),
            )
            for chunk, part in self.chunks.values()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "every chunk of ours has its place"
        return self.chunks[index.offset][1]


def cut(start: int, stop: int, row: int, most: int) -> Iterator[Range]:
    """[start, stop) in ranges of at most `most` elements, cut between rows where rows fit in."""
    step = max(1, most // row * row or most)
    while start < stop:
        end = min(stop, start // step * step + step)
        yield start, end
        start = end


def share_out(pieces: Iterable[Piece], axis: Axis) -> None:
    """Lets each rank of `axis` write an equal part of what all of them hold, but for a row.

    Args:
        pieces: the same on each of them, in the same order.
    """
    pieces = list(pieces)
    total = sum(piece.numel * piece.local.element_size() for piece in pieces)
    low, high = (total * rank // axis.size for rank in (axis.rank, axis.rank + 1))
    for piece in pieces:
        piece.stored = (piece.nearest_row(low), piece.nearest_row(high))
        size = piece.numel * piece.local.element_size()
        low, high = low - size, high - size

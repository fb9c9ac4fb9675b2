"""StoredTensor: a logical tensor as pieces of the tensors in files, without a copy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipemega.checkpoint.shards import (
    LARGEST_CHUNK,
    LocalChunks,
    OutgoingShard,
    TensorShard,
    chunks_of_range,
)

Piece = tuple[tuple[int, ...], Tensor]
"""Offsets in the logical tensor, and the values there."""
Segment = tuple[int, int, int]
"""Along one dim: start in the part, length, start in the logical tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of `shape` whose values are in `pieces`, which fill it and do not overlap.

    Args:
        parts: how many parts a tensor-parallel shard consists of, such as 3 for queries, keys and
            values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    parts: int = 1

    @classmethod
    def whole(cls, tensor: Tensor) -> "StoredTensor":
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, ((tuple(0 for _ in shape), tensor.detach()),))

    @classmethod
    def of_flat(cls, shape: Sequence[int], flat: Iterable[Tensor]) -> "StoredTensor":
        """Return the tensor whose elements, row by row, are those of the flat tensors in order."""
        pieces: list[Piece] = []
        start, dtype = 0, torch.float32
        for part in flat:
            dtype = part.dtype
            used = 0
            for offsets, sizes in chunks_of_range(shape, start, start + part.numel()):
                length = torch.Size(sizes).numel()
                pieces.append((offsets, part.narrow(0, used, length).view(sizes)))
                used += length
            start += part.numel()
        return cls(tuple(shape), dtype, tuple(pieces))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def placed(self, dim: int, segments: Iterable[Segment]) -> list[Piece]:
        """Return the pieces at their place in a larger tensor, of which this is a part."""
        found: list[Piece] = []
        for start, length, logical in segments:
            for offsets, values in self.pieces:
                low, high = offsets[dim], offsets[dim] + values.shape[dim]
                first, last = max(low, start), min(high, start + length)
                if first < last:
                    at = (*offsets[:dim], logical + first - start, *offsets[dim + 1 :])
                    found.append((at, values.narrow(dim, first - low, last - first)))
        return found

    def first_rows(self, rows: int) -> "StoredTensor":
        """Return the tensor without the rows after the first `rows`."""
        pieces = self.placed(0, [(0, rows, 0)])
        return replace(self, shape=(rows, *self.shape[1:]), pieces=tuple(pieces))

    def reshaped(self, shape: Sequence[int]) -> "StoredTensor":
        """Return a flat tensor with another shape of as many elements."""
        return self.of_flat(shape, [self.full()])

    def full(self) -> Tensor:
        """Return the values in one tensor."""
        if len(self.pieces) == 1:
            return self.pieces[0][1]
        found = torch.empty(self.shape, dtype=self.dtype)
        for offsets, values in self.pieces:
            _region(found, offsets, values.shape).copy_(values)
        return found

    def equals(self, other: "StoredTensor") -> bool:
        """Return whether the values, cast to the dtype of `other`, are those of `other`."""
        if self.shape != other.shape:
            return False
        full = other.full()
        return all(
            torch.equal(values.to(full.dtype), _region(full, offsets, values.shape))
            for offsets, values in self.pieces
        )

    def outgoing(self) -> OutgoingShard:
        """Return chunks of at most `LARGEST_CHUNK` bytes, to write into a checkpoint."""
        chunks: LocalChunks = {}
        for offsets, values in self.pieces:
            # [] for a number.
            row = values[0].nbytes if values.dim() and len(values) else values.nbytes
            rows = max(1, LARGEST_CHUNK // max(1, row))
            for start in range(0, len(values), rows) if values.dim() else (0,):
                part = values[start : start + rows] if values.dim() else values
                at = torch.Size((offsets[0] + start, *offsets[1:]) if offsets else ())
                chunks[at] = part
        return OutgoingShard(torch.Size(self.shape), chunks)

    @torch.no_grad()
    def copy_into(self, shard: TensorShard) -> None:
        """Fill this rank's shard of the tensor."""
        for wanted, into in shard.incoming.items():
            for offsets, values in self.pieces:
                low = [max(pair) for pair in zip(wanted, offsets, strict=True)]
                ends = zip(wanted, into.shape, offsets, values.shape, strict=True)
                high = [min(a + n, b + m) for a, n, b, m in ends]
                sizes = [max(0, last - first) for first, last in zip(low, high, strict=True)]
                if all(sizes):
                    target = _region(into, [a - b for a, b in zip(low, wanted, strict=True)], sizes)
                    target.copy_(
                        _region(values, [a - b for a, b in zip(low, offsets, strict=True)], sizes)
                    )


def _region(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor

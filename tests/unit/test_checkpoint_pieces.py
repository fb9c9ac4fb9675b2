"""A flat range of a local tensor is a few boxes of the logical one; all ranks together fill it."""

import itertools
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.checkpoint import pieces
from pipemega.checkpoint.agreement import Agreement
from pipemega.checkpoint.boxes import boxes
from pipemega.checkpoint.disk import LocalDisk
from pipemega.checkpoint.manifest import Written
from pipemega.checkpoint.pieces import Piece, cut, share_out
from pipemega.checkpoint.storage import Reader, write_pieces
from pipemega.mesh import Axis
from pipemega.parameters import Shard


@st.composite
def ranges(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
@settings(max_examples=400, deadline=None)
def test_the_boxes_of_a_range_cover_it_in_order_and_are_few(found):
    shape, start, stop = found
    numbers = torch.arange(prod(shape)).view(shape)
    parts = []
    for offsets, sizes in boxes(shape, start, stop):
        part = numbers
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert size >= 1
            part = part.narrow(dim, offset, size)
        parts.append(part.reshape(-1))
    together = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert together.tolist() == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_the_boxes_of_the_drawing():
    assert boxes([4, 5], 3, 18) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 3))]
    assert boxes([4, 5], 6, 9) == [((1, 1), (1, 3))]
    assert boxes([], 0, 1) == [((), ())]
    assert boxes([3], 2, 2) == []


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9), st.integers(1, 20))
def test_a_range_is_cut_between_rows_where_rows_fit_in(start, length, row, most):
    found = list(cut(start, start + length, row, most))
    assert [i for low, high in found for i in range(low, high)] == list(
        range(start, start + length)
    )
    assert all(0 < high - low <= most for low, high in found)
    if row <= most:
        assert all(high % row == 0 for _, high in found[:-1])


# A fused query-key-value weight of two tensor ranks, and a vocabulary whose last rank has padding.
QKV = [
    Shard((8, 3), 0, ((0, 2), (4, 5), (6, 7))),
    Shard((8, 3), 0, ((2, 4), (5, 6), (7, 8))),
]
VOCABULARY = [Shard((7, 3), 0, ((0, 4),)), Shard((7, 3), 0, ((4, 7),))]
COLUMNS = [Shard((3, 4, 2), 1, ((0, 2),)), Shard((3, 4, 2), 1, ((2, 4),))]
WHOLE = [Shard((5,))]
LOCAL = {"qkv": (4, 3), "vocabulary": (4, 3), "columns": (3, 2, 2), "whole": (5,)}
SHARDS = {"qkv": QKV, "vocabulary": VOCABULARY, "columns": COLUMNS, "whole": WHOLE}


def local_of(shard: Shard, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logical tensor 1, 2, ..., and the local one with its padding."""
    whole = torch.arange(1.0, 1 + prod(shard.shape)).view(shard.shape)
    local = torch.full(shape, -1.0)
    shard.take(whole, local)
    return whole, local


@given(st.sampled_from(sorted(SHARDS)), st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=200, deadline=None)
def test_pieces_with_spans_write_the_logical_tensor_once_and_read_their_part_back(name, cuts):
    shape, written = LOCAL[name], torch.zeros(SHARDS[name][0].shape)
    times = torch.zeros_like(written)
    bounds = sorted({0, prod(shape), *(c for c in cuts if c < prod(shape))})
    spans = [*itertools.pairwise(bounds), (0, 0)]
    for shard in SHARDS[name]:
        whole, local = local_of(shard, shape)
        for start, stop in spans:
            flat = local.reshape(-1)[start:stop].clone()
            piece = Piece(flat, shard, (start, stop), shape, (start, stop))
            for chunk, part in piece.outgoing.chunks.values():
                at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                written[at] = part
                times[at] += 1
            read = torch.zeros(stop - start)
            into = Piece(read, shard, (0, 0), shape, (start, stop))
            for chunk, part in into.incoming.values():
                at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                part.copy_(whole[at])
            # What the shard does not cover is padding: zeros, in none of the boxes.
            assert torch.equal(read, flat)
    assert torch.equal(written, whole)
    assert (times == 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_data_ranks_share_the_bytes_out_evenly_and_write_each_element_once(size, monkeypatch):
    monkeypatch.setattr(pieces, "LARGEST_CHUNK", 64)
    shapes = {"a": (64, 8), "b": (9,), "c": (), "d": (30, 4, 2), "e": (1, 40)}
    times = {name: torch.zeros(shape) for name, shape in shapes.items()}
    bytes_of = []
    for rank in range(size):
        held = {name: Piece(torch.zeros(shape), Shard(shape)) for name, shape in shapes.items()}
        share_out(held.values(), Axis("data", tuple(range(size)), rank))
        chunks = [
            (name, chunk)
            for name, piece in held.items()
            for chunk in piece.outgoing.chunks.values()
        ]
        for name, (chunk, part) in chunks:
            at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            times[name][at] += 1
            assert part.numel() * 4 <= 64
        bytes_of.append(sum(part.numel() * 4 for _, (_, part) in chunks))
    assert all((t == 1).all() for t in times.values())
    widest_row = 40 * 4
    assert max(bytes_of) - min(bytes_of) <= 2 * widest_row


class Meter(LocalDisk):
    """A disk that counts what is read of it."""

    def __init__(self, root):
        super().__init__(root)
        self.most = self.total = 0

    @contextmanager
    def open(self, name):
        with super().open(name) as stream:
            read = stream.read

            def counted(size=-1):
                data = read(size)
                self.most, self.total = max(self.most, len(data)), self.total + len(data)
                return data

            yield SimpleNamespace(read=counted, seek=stream.seek, readline=stream.readline)


def test_who_wants_a_part_of_a_large_tensor_reads_little_more(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "LARGEST_CHUNK", 64 << 10)
    disk, agree = Meter(tmp_path), Agreement(Axis("world"), LocalDisk(tmp_path))
    whole = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    piece = Piece(whole, Shard((1024, 1024)), stored=(0, whole.numel()))
    write_pieces(Written(disk, "."), "tensors", {"a": piece.outgoing}, agree)
    start, stop = 500_000, 520_000
    part = torch.zeros(stop - start)
    reader = Reader(disk, "tensors")
    disk.most = disk.total = 0
    reader.read({"a": Piece(part, Shard((1024, 1024)), (0, 0), (1024, 1024), (start, stop))})
    assert torch.equal(part, whole.view(-1)[start:stop])
    # Three boxes in three chunks; each chunk is read once, whole.
    assert disk.most <= (64 << 10) + 2048
    assert disk.total <= 3 * disk.most

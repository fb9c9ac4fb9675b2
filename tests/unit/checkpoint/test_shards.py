"""A flat range of a local tensor is a few chunks of the logical one; all ranks cover it once."""

import errno
import itertools
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.serialization import get_crc32_options

from pipemega.checkpoint import tensors
from pipemega.checkpoint.dcp_storage import ShardReader, write_shards
from pipemega.checkpoint.manifest import ChecksumWriter, CollectiveIO
from pipemega.checkpoint.tensors import TensorShard, assign_writes, chunks_of_range, split_range
from pipemega.distributed.mesh import Axis
from pipemega.errors import CheckpointError
from pipemega.parameters import Shard
from pipemega.storage.filesystem import LocalStorage


@st.composite
def ranges(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
@settings(max_examples=400)
def test_the_chunks_of_a_range_cover_it_in_order_and_are_few(found):
    shape, start, stop = found
    numbers = torch.arange(prod(shape)).view(shape)
    parts = []
    for offsets, sizes in chunks_of_range(shape, start, stop):
        part = numbers
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert size >= 1
            part = part.narrow(dim, offset, size)
        parts.append(part.reshape(-1))
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert joined.tolist() == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_the_chunks_are_those_of_the_drawing():
    assert chunks_of_range([4, 5], 3, 18) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 3))]
    assert chunks_of_range([4, 5], 6, 9) == [((1, 1), (1, 3))]
    assert chunks_of_range([], 0, 1) == [((), ())]
    assert chunks_of_range([3], 2, 2) == []


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9), st.integers(1, 20))
def test_a_range_is_split_between_rows_if_rows_fit(start, length, row, largest):
    found = list(split_range(start, start + length, row, largest))
    assert [i for low, high in found for i in range(low, high)] == list(
        range(start, start + length)
    )
    assert all(0 < high - low <= largest for low, high in found)
    if row <= largest:
        assert all(high % row == 0 for _, high in found[:-1])


# A fused query-key-value weight on two tensor ranks; a vocabulary with padding on the last rank.
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
    """Return the logical tensor 1, 2, ..., and the local one with its padding."""
    whole = torch.arange(1.0, 1 + prod(shard.shape)).view(shard.shape)
    local = torch.full(shape, -1.0)
    shard.copy_from_full(whole, local)
    return whole, local


@given(st.sampled_from(sorted(SHARDS)), st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=200)
def test_shards_with_spans_write_the_logical_tensor_once_and_read_their_part_back(name, cuts):
    shape, written = LOCAL[name], torch.zeros(SHARDS[name][0].shape)
    times = torch.zeros_like(written)
    bounds = sorted({0, prod(shape), *(c for c in cuts if c < prod(shape))})
    spans = [*itertools.pairwise(bounds), (0, 0)]
    for shard in SHARDS[name]:
        whole, local = local_of(shard, shape)
        for start, stop in spans:
            flat = local.reshape(-1)[start:stop].clone()
            sharded = TensorShard(flat, shard, (start, stop), shape, (start, stop))
            for offsets, part in sharded.outgoing.chunks.items():
                at = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
                written[at] = part
                times[at] += 1
            read = torch.zeros(stop - start)
            into = TensorShard(read, shard, (0, 0), shape, (start, stop))
            for offsets, part in into.incoming.items():
                at = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
                part.copy_(whole[at])
            # The rest of the local tensor is padding: zeros, in none of the chunks.
            assert torch.equal(read, flat)
    assert torch.equal(written, whole)
    assert (times == 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_data_ranks_write_equal_bytes_and_each_element_once(size, monkeypatch):
    monkeypatch.setattr(tensors, "LARGEST_CHUNK", 64)
    shapes = {"a": (64, 8), "b": (9,), "c": (), "d": (30, 4, 2), "e": (1, 40)}
    times = {name: torch.zeros(shape) for name, shape in shapes.items()}
    bytes_of = []
    for rank in range(size):
        held = {
            name: TensorShard(torch.zeros(shape), Shard(shape)) for name, shape in shapes.items()
        }
        assign_writes(held.values(), Axis("data", tuple(range(size)), rank))
        chunks = [
            (name, chunk) for name, shard in held.items() for chunk in shard.outgoing.chunks.items()
        ]
        for name, (offsets, part) in chunks:
            at = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
            times[name][at] += 1
            assert part.numel() * 4 <= 64
        bytes_of.append(sum(part.numel() * 4 for _, (_, part) in chunks))
    assert all((t == 1).all() for t in times.values())
    widest_row = 40 * 4
    assert max(bytes_of) - min(bytes_of) <= 2 * widest_row


class CountingStorage(LocalStorage):
    """Counts the bytes that are read: in total, and the most in one read."""

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


def test_reading_a_part_of_a_large_tensor_reads_little_more_than_the_part(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "LARGEST_CHUNK", 64 << 10)
    storage, ranks = CountingStorage(tmp_path), CollectiveIO(Axis("world"), LocalStorage(tmp_path))
    whole = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    shard = TensorShard(whole, Shard((1024, 1024)), write_range=(0, whole.numel()))
    write_shards(ChecksumWriter(storage, "."), "tensors", {"a": shard.outgoing}, ranks)
    start, stop = 500_000, 520_000
    part = torch.zeros(stop - start)
    reader = ShardReader(storage, "tensors")
    storage.most = storage.total = 0
    reader.read({"a": TensorShard(part, Shard((1024, 1024)), (0, 0), (1024, 1024), (start, stop))})
    assert torch.equal(part, whole.view(-1)[start:stop])
    # Three ranges in three stored chunks; each stored chunk is read once.
    assert storage.most <= (64 << 10) + 2048
    assert storage.total <= 3 * storage.most


def test_chunks_are_read_into_the_memory_of_the_tensors_without_copies(tmp_path):
    storage, ranks = LocalStorage(tmp_path), CollectiveIO(Axis("world"), LocalStorage(tmp_path))
    # "other order" has the same length in the file as "a" and "b", and another order of elements.
    stored = {
        "a": torch.randn(6, 6),
        "b": torch.randn(6, 6),
        "bf16": torch.randn(6, 6).bfloat16(),
        "other order": torch.randn(6, 6).t(),
        "scalar": torch.tensor(3.0),
        "strided target": torch.randn(6, 6),
    }
    tensors = {
        name: TensorShard(t, Shard(tuple(t.shape)), write_range=(0, t.numel()))
        for name, t in stored.items()
    }
    outgoing = {name: shard.outgoing for name, shard in tensors.items()}
    write_shards(ChecksumWriter(storage, "."), "tensors", outgoing, ranks)
    into = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in stored.items()}
    into["strided target"] = torch.zeros(6, 12)[:, ::2]
    versions = {name: t._version for name, t in into.items()}
    reader = ShardReader(storage, "tensors")
    with mock.patch.object(reader, "_load_chunk", wraps=reader._load_chunk) as copied:
        reader.read({name: TensorShard(t, Shard(tuple(t.shape))) for name, t in into.items()})
    assert all(torch.equal(into[name], t) for name, t in stored.items())
    assert all(t._version > versions[name] for name, t in into.items())
    # The other order and the strided target. torch 2.8 does not tell where the data of a chunk
    # start, so all are copied.
    torch.save(torch.ones(3), path := tmp_path / "one.pt")
    one = torch.load(path, map_location="meta", weights_only=True)
    tells_start = one.untyped_storage()._checkpoint_offset is not None
    assert copied.call_count == (2 if tells_start else len(stored))


def test_torch_computes_no_second_checksum_while_a_checkpoint_is_written(tmp_path):
    storage, ranks = LocalStorage(tmp_path), CollectiveIO(Axis("world"), LocalStorage(tmp_path))
    shard = TensorShard(torch.ones(3), Shard((3,)), write_range=(0, 3)).outgoing
    seen = []

    class Files(ChecksumWriter):
        def create(self, name):
            seen.append(get_crc32_options())
            if name == "full/__0_0.distcp":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().create(name)

    write_shards(Files(storage, "."), "tensors", {"a": shard}, ranks)
    assert seen == [False, True]  # tensors, index
    with pytest.raises(CheckpointError, match="No space left"):
        write_shards(Files(storage, "."), "full", {"a": shard}, ranks)
    assert seen == [False, True, False]
    assert get_crc32_options()


def test_the_threads_of_a_load_read_all_chunks_and_pass_on_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("pipemega.checkpoint.dcp_storage.num_readers", lambda parts: 3)
    monkeypatch.setattr(tensors, "LARGEST_CHUNK", 4 << 10)
    storage, ranks = LocalStorage(tmp_path), CollectiveIO(Axis("world"), LocalStorage(tmp_path))
    stored = {name: torch.randn(80, 64) for name in "abc"}
    outgoing = {
        name: TensorShard(t, Shard((80, 64)), write_range=(0, t.numel())).outgoing
        for name, t in stored.items()
    }
    write_shards(ChecksumWriter(storage, "."), "tensors", outgoing, ranks)
    into = {name: torch.zeros(80, 64) for name in stored}
    incoming = {name: TensorShard(t, Shard((80, 64))) for name, t in into.items()}
    ShardReader(storage, "tensors").read(incoming)
    assert all(torch.equal(into[name], t) for name, t in stored.items())
    reader, file = ShardReader(storage, "tensors"), tmp_path / "tensors" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-30_000])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        reader.read(incoming)

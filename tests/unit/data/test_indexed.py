"""Megatron's token files: bytes, round trips, and what is said about damaged ones."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipemega.data.tokens.token_files import (
    DTYPES,
    IndexedDataset,
    IndexedWriter,
    files_of,
    prefix_of,
    smallest_dtype,
)
from pipemega.errors import DataError

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "megatron_index.json").read_text(encoding="utf-8")
)


def write_pair(folder: Path, name: str = "data") -> Path:
    prefix = folder / name
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5, 6, 7], [1, 3])
    return prefix


@pytest.mark.parametrize("case", GOLDEN["indexed"], ids=lambda case: case["dtype"])
def test_files_equal_megatrons_byte_for_byte(case, tmp_path):
    with IndexedWriter(tmp_path / "x", case["dtype"]) as writer:
        for tokens, lengths in case["documents"]:
            writer.add_document(tokens, lengths)
    bin_path, idx_path = files_of(tmp_path / "x")
    assert idx_path.read_bytes().hex() == case["idx_hex"]
    assert bin_path.read_bytes().hex() == case["bin_hex"]
    assert hashlib.sha256(idx_path.read_bytes()).hexdigest() == case["idx_sha256"]
    assert hashlib.sha256(bin_path.read_bytes()).hexdigest() == case["bin_sha256"]


@pytest.mark.parametrize("case", GOLDEN["indexed"], ids=lambda case: case["dtype"])
def test_megatrons_files_are_read_as_they_were_written(case, tmp_path):
    for path, content in zip(files_of(tmp_path / "x"), ("bin_hex", "idx_hex"), strict=True):
        path.write_bytes(bytes.fromhex(case[content]))
    data = IndexedDataset(tmp_path / "x")
    assert data.dtype.name == case["dtype"]
    assert data.num_documents == len(case["documents"])
    for i, (tokens, lengths) in enumerate(case["documents"]):
        first, last = data.document_indices[i : i + 2]
        assert data.lengths[first:last].tolist() == lengths
        assert data.span(first, last).tolist() == tokens


@settings(max_examples=30)
@given(data=st.data(), dtype=st.sampled_from([name for name in DTYPES.values() if "int" in name]))
def test_what_is_written_is_read(data, dtype, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("round") / "trip"
    length = st.integers(0, 7)
    documents = data.draw(st.lists(hnp.arrays(dtype, length), max_size=6))
    many = data.draw(st.lists(hnp.arrays(dtype, length), max_size=6))
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.add_documents(
            np.concatenate([np.empty(0, dtype), *many]), [len(document) for document in many]
        )
    read = IndexedDataset(prefix)
    assert len(read) == read.num_documents == len(documents + many)
    for i, document in enumerate(documents + many):
        assert read.get(i).tolist() == document.tolist()
        assert read.get(i, 1, 2).tolist() == document[1:3].tolist()
        assert read.document_of(i) == i


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_prefix_may_be_given_as_either_file(suffix, tmp_path):
    prefix = write_pair(tmp_path, "v1.5")
    assert prefix_of(f"{prefix}{suffix}") == prefix
    assert IndexedDataset(f"{prefix}{suffix}").num_tokens == 7


def test_small_vocabularies_are_stored_in_two_bytes_as_in_megatron():
    assert smallest_dtype(65499).name == "uint16"
    assert smallest_dtype(65500).name == "int32"


def test_the_fingerprint_depends_on_the_content_not_on_the_path(tmp_path):
    one, two = write_pair(tmp_path, "one"), write_pair(tmp_path, "two")
    assert IndexedDataset(one).fingerprint() == IndexedDataset(two).fingerprint()
    with IndexedWriter(two, "uint16") as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5, 6, 8], [1, 3])
    assert IndexedDataset(one).fingerprint() != IndexedDataset(two).fingerprint()


def patch(path: Path, at: int, new: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(new)] = new
    path.write_bytes(bytes(raw))


# name -> (what is done to the pair, what must be said)
DAMAGE = {
    "no bin": (lambda b, i: b.unlink(), "data.bin is missing, but .*data.idx exists"),
    "no idx": (lambda b, i: i.unlink(), "data.idx is missing, but .*data.bin exists"),
    "neither": (
        lambda b, i: (b.unlink(), i.unlink()),
        "neither .*data.bin nor .*data.idx exists.*data prepare",
    ),
    "foreign": (
        lambda b, i: patch(i, 0, b"PK\x03\x04"),
        r"data.idx is not a Megatron index of .*data.bin: it starts with b'PK",
    ),
    "version": (
        lambda b, i: patch(i, 9, struct.pack("<Q", 7)),
        "data.idx is a Megatron index of version 7, but only version 1 is supported.*data.bin",
    ),
    "dtype": (
        lambda b, i: patch(i, 17, b"\x09"),
        "data.idx has dtype code 9 for .*data.bin; known are 1 uint8",
    ),
    "short header": (
        lambda b, i: i.write_bytes(i.read_bytes()[:20]),
        "data.idx is truncated: it has 20 bytes, and its header alone has 34.*data.bin",
    ),
    "short idx": (
        lambda b, i: i.write_bytes(i.read_bytes()[:-8]),
        "data.idx is truncated: 3 sequences and 3 document bounds take 94 bytes, but it has 86",
    ),
    "long idx": (
        lambda b, i: i.write_bytes(i.read_bytes() + bytes(8)),
        "data.idx is too long: .* take 94 bytes, but it has 102.*data.bin",
    ),
    "short bin": (
        lambda b, i: b.write_bytes(b.read_bytes()[:-2]),
        "data.bin is shorter than .*data.idx requires: it has 12 bytes, the index describes 14",
    ),
    "empty bin": (
        lambda b, i: b.write_bytes(b""),
        "data.bin is shorter than .*data.idx requires: it has 0 bytes, the index describes 14",
    ),
    "long bin": (
        lambda b, i: b.write_bytes(b.read_bytes() + bytes(2)),
        "data.bin is longer than .*data.idx requires: it has 16 bytes, the index describes 14",
    ),
    "documents go back": (
        lambda b, i: patch(i, 94 - 16, struct.pack("<q", 5)),
        "document bounds of .*data.idx must rise from 0 to its 3 sequences, but they are from 0 "
        "to 3; they decrease after document 1",
    ),
    "documents end early": (
        lambda b, i: patch(i, 94 - 8, struct.pack("<q", 2)),
        "must rise from 0 to its 3 sequences, but they are from 0 to 2",
    ),
    "offset near the end of int64": (
        lambda b, i: patch(i, 46, struct.pack("<q", 2**63 - 2)),
        "data.bin is shorter than .*data.idx requires: it has 14 bytes, the index describes 92233",
    ),
    "negative length": (
        lambda b, i: patch(i, 34, struct.pack("<i", -3)),
        "data.idx contains a negative length or offset.*data.bin",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_pair_is_refused_by_the_names_of_both_files(name, tmp_path):
    prefix = write_pair(tmp_path)
    damage, message = DAMAGE[name]
    damage(*files_of(prefix))
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_multimodal_files_with_a_mode_for_each_sequence_are_read(tmp_path):
    prefix = write_pair(tmp_path)
    idx = files_of(prefix)[1]
    idx.write_bytes(idx.read_bytes() + bytes(3))
    assert IndexedDataset(prefix).num_tokens == 7


def test_an_empty_pair_has_no_sequences(tmp_path):
    with IndexedWriter(tmp_path / "none", "int32"):
        pass
    data = IndexedDataset(tmp_path / "none")
    assert (len(data), data.num_documents, data.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "tokens", "lengths", "message"),
    [
        ("uint16", [1, 65536], None, "tokens from 1 to 65536 do not fit .*x.bin, whose dtype "),
        ("uint16", [-1, 2], None, "tokens from -1 to 2 do not fit .*uint16 holds 0 to 65535"),
        ("int32", [1, 2, 3], [1, 1], "3 tokens were given for .*x.bin, but .* add up to 2"),
        ("complex64", [1], None, "tokens cannot be stored as complex64; known are uint8"),
    ],
)
def test_tokens_that_cannot_be_stored_are_refused_and_nothing_is_left(
    dtype, tokens, lengths, message, tmp_path
):
    with (
        pytest.raises(DataError, match=message),
        IndexedWriter(tmp_path / "x", dtype) as writer,
    ):
        writer.add_document(tokens, lengths)
    assert list(tmp_path.iterdir()) == []


def interrupt(prefix: Path) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([9])
        raise KeyboardInterrupt


def test_an_exception_while_writing_keeps_the_old_pair(tmp_path):
    prefix = write_pair(tmp_path)
    before = [path.read_bytes() for path in files_of(prefix)]
    with pytest.raises(KeyboardInterrupt):
        interrupt(prefix)
    assert sorted(tmp_path.iterdir()) == sorted(files_of(prefix))
    assert [path.read_bytes() for path in files_of(prefix)] == before


def test_a_failed_write_names_the_file_and_leaves_no_temporary_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/x.idx"):
        IndexedWriter(tmp_path / "file" / "x", "uint16")
    files_of(tmp_path / "data")[0].mkdir()  # stands in the way of the rename
    with (
        pytest.raises(DataError, match=r"cannot write .*data.bin: "),
        IndexedWriter(tmp_path / "data", "uint16") as writer,
    ):
        writer.add_document([1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "file"]

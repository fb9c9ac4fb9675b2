"""Whatever is in a file of data, the answer is data, or an error that names the file."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemega.data.tokens.corpus import Skipped, find_corpus
from pipemega.data.tokens.gpt_dataset import GPTDataset, SampleFormat, Split
from pipemega.data.tokens.prepare import manifest_of, read_manifest
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter, files_of
from pipemega.data.tokens.tokenizers import FastTokenizer, load_tokenizer
from pipemega.errors import DataError, PipemegaError
from pipemega.storage.build_once import cached_arrays
from tests.paper.mutations import changed, damaged, fuzzing, text_of

VOCABULARY = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@cache
def pair(folder: Path) -> tuple[bytes, bytes]:
    """The bytes of a small .bin and .idx."""
    with IndexedWriter(folder / "good", "uint16") as writer:
        for start in range(0, 40, 8):
            writer.add_document(range(start, start + 8), [3, 5])
    bin_path, idx_path = files_of(folder / "good")
    return bin_path.read_bytes(), idx_path.read_bytes()


def read_all(prefix: Path, cache_path: Path) -> None:
    """What a training does with a pair of files."""
    data = IndexedDataset(prefix)
    for sequence in range(len(data)):
        assert len(data.get(sequence)) == data.lengths[sequence]
        assert 0 <= data.document_of(sequence) < data.num_documents
    data.fingerprint()
    dataset = GPTDataset(
        data, Split("train", range(len(data))), seed=1, num_samples=8, cache=cache_path,
        sample_format=SampleFormat(seq_length=4, vocab_size=VOCABULARY),
    )  # fmt: skip
    for tokens, labels in (dataset[i] for i in range(len(dataset))):
        assert tokens.shape == labels.shape == (4,)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCABULARY


def refused(action) -> str:
    """Why; empty where it was not."""
    try:
        action()
    except PipemegaError as error:
        return str(error)
    return ""


@fuzzing(120)
@given(data=st.data(), which=st.sampled_from([0, 1, 1]))
def test_a_damaged_pair_of_token_files_is_read_or_refused_by_its_name(data, which, folder):
    contents = [*pair(folder)]
    contents[which] = data.draw(damaged(contents[which]))
    for path, content in zip(files_of(folder / "bad"), contents, strict=True):
        path.write_bytes(content)
    message = refused(lambda: read_all(folder / "bad", folder / "cache"))
    assert not message or str(folder / "bad") in message


@fuzzing(40)
@given(data=st.data(), which=st.sampled_from(["a", "b"]))
def test_a_damaged_file_of_the_cache_is_built_again_or_read(data, which, folder):
    def build():
        return {"a": np.arange(40), "b": np.ones((4, 3), dtype=np.float32)}

    def arrays():
        return cached_arrays(folder / "npy", "stem", {"of": 1}, ["a", "b"], build, what="a thing")

    (folder / "npy").mkdir(exist_ok=True)
    for path in (folder / "npy").iterdir():
        path.unlink()
    arrays()
    (path,) = (folder / "npy").glob(f"*-{which}.npy")
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    found = arrays()
    wanted = build()
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
        name: (a.shape, a.dtype) for name, a in wanted.items()
    }


@cache
def tokenizer_tree() -> dict:
    return json.loads(FastTokenizer.train(["to be or not to be"] * 3, 260).to_json())


@fuzzing(80)
@given(data=st.data(), as_bytes=st.booleans())
def test_a_damaged_tokenizer_is_used_or_refused_by_its_name(data, as_bytes, folder):
    path = folder / "tokenizer.json"
    if as_bytes:
        path.write_bytes(data.draw(damaged(json.dumps(tokenizer_tree()).encode())))
    else:
        path.write_text(text_of(data.draw(changed(tokenizer_tree()))), encoding="utf-8")

    def use() -> None:
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("to be"))

    message = refused(use)
    assert not message or str(path) in message


LINES = b'{"text": "to be or not"}\n{"text": "to be", "id": 3}\n{"text": ""}\n'


@fuzzing(80)
@given(st.one_of(damaged(LINES), changed({"text": "to be"}).map(lambda t: text_of(t).encode())))
def test_a_damaged_corpus_is_read_or_refused_by_file_and_line(folder, raw):
    path = folder / "corpus.jsonl"
    path.write_bytes(raw)
    message = refused(lambda: list(find_corpus(path).documents(Skipped())))
    assert not message or "corpus.jsonl" in message


@fuzzing(50)
@given(st.binary(max_size=60) | damaged(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03K\x04\x00"))
def test_a_damaged_packed_corpus_is_read_or_refused_by_its_name(folder, raw):
    path = folder / "corpus.txt.gz"
    path.write_bytes(raw)
    message = refused(lambda: list(find_corpus(path).documents(Skipped())))
    assert not message or "corpus.txt.gz" in message


# Files that change under a run


def test_truncated_token_files_are_reported_with_both_sizes(tmp_path):
    (tmp_path / "good").mkdir()
    for path, content in zip(files_of(tmp_path / "data"), pair(tmp_path / "good"), strict=True):
        path.write_bytes(content)
    data = IndexedDataset(tmp_path / "data")
    whole = data.get(9).tolist()
    bin_path, idx_path = files_of(tmp_path / "data")
    with open(bin_path, "r+b") as file:
        file.truncate(70)
    assert data.get(0).tolist() == [0, 1, 2]
    for read in (lambda: data.get(9), lambda: data.span(0, 10)):
        with pytest.raises(DataError, match=r"data.bin became shorter .* 70 bytes are left of 80"):
            read()
    with open(bin_path, "wb") as file:
        file.write(pair(tmp_path / "good")[0])
    assert data.get(9).tolist() == whole
    with open(idx_path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"data.idx became shorter while it was in use: 100 bytes"):
        data.get(0)


def test_a_truncated_index_is_reported_by_name(tmp_path):
    (tmp_path / "good").mkdir()
    pair(tmp_path / "good")
    dataset = GPTDataset(
        IndexedDataset(tmp_path / "good" / "good"), Split("train", range(10)), seed=1,
        num_samples=2000, cache=tmp_path / "cache",
        sample_format=SampleFormat(seq_length=4, vocab_size=VOCABULARY),
    )  # fmt: skip
    dataset[0]
    (path,) = (tmp_path / "cache").glob("*-sample_index.npy")
    with open(path, "r+b") as file:
        file.truncate(200)
    with pytest.raises(DataError, match=r"sample_index.npy became shorter .* 200 bytes are left"):
        dataset[5]


def test_removing_or_replacing_open_files_is_harmless(tmp_path):
    (tmp_path / "good").mkdir()
    pair(tmp_path / "good")
    data = IndexedDataset(tmp_path / "good" / "good")
    before = [data.get(i).tolist() for i in range(10)]
    for path in files_of(tmp_path / "good" / "good"):
        path.unlink()
        path.write_bytes(b"short")
    assert [data.get(i).tolist() for i in range(10)] == before


def test_an_invalid_manifest_is_refused_by_name(tmp_path):
    manifest_of(tmp_path / "x").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"x.manifest.json is damaged"):
        read_manifest(tmp_path / "x")

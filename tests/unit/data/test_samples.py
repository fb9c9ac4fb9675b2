"""GPT samples against Megatron's vectors, and against a plain reading of the stream."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.config.sections.data_section import DataSection
from pipemega.data.tokens.gpt_dataset import (
    Epochs,
    GPTDataset,
    SampleFormat,
    Split,
    build_indices,
    count_windows,
    plan_epochs,
    positions_within_documents,
    split_ranges,
)
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter, files_of
from pipemega.errors import DataError

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "megatron_index.json").read_text(encoding="utf-8")
)
EOD = 0


def write(folder: Path, documents, dtype="int32") -> IndexedDataset:
    with IndexedWriter(folder / "text", dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(folder / "text")


def dataset(data, documents=None, *, num_samples=None, seed=1, cache=None, say=None, **form):
    return GPTDataset(
        data,
        Split("train", range(len(data)) if documents is None else documents),
        sample_format=SampleFormat(**{"seq_length": 4, "vocab_size": 100, **form}),
        num_samples=num_samples,
        seed=seed,
        cache=cache,
        say=say,
    )


@pytest.mark.parametrize("case", GOLDEN["gpt"], ids=range(len(GOLDEN["gpt"])))
def test_indices_equal_megatrons(case):
    lengths = np.array(case["sizes"], dtype=np.int32)
    documents = range(case["indices"][0], case["indices"][-1] + 1)
    extra = case["add_extra_token"]
    per_epoch = int(lengths[documents.start : documents.stop].sum())
    epochs = plan_epochs(per_epoch, case["seq_length"], case["num_samples"], extra)
    assert epochs == Epochs(case["num_epochs"], case["separate_final_epoch"])
    indices = build_indices(
        lengths,
        documents,
        case["seq_length"],
        epochs,
        case["seed"],
        add_extra_token=bool(extra),
        keep_partial=not case["drop_last_partial_sequence"],
    )
    for name, array in indices._asdict().items():
        assert array.tolist() == case[f"{name}_index"], name
        assert array.dtype.name == case[f"{name}_dtype"], name


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda x: sum(x) > 8),
    seq_length=st.integers(1, 7),
    num_samples=st.none() | st.integers(1, 40),
    extra=st.booleans(),
    keep_partial=st.booleans(),
)
def test_every_window_is_its_part_of_the_shuffled_stream(
    lengths, seq_length, num_samples, extra, keep_partial, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("windows")
    ids = iter(range(1, 1000))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    samples = dataset(
        write(folder, documents),
        num_samples=num_samples,
        seq_length=seq_length,
        vocab_size=1000,
        add_extra_token=extra,
        keep_partial=keep_partial,
    )
    assert num_samples is None or len(samples) >= num_samples
    stream = [token for i in samples._indices.document for token in documents[i]]
    for i in range(len(samples)):
        start = int(samples._indices.shuffle[i]) * seq_length
        text = stream[start : start + seq_length + extra]
        padding = seq_length + extra - len(text)
        tokens, labels = samples[i]
        assert tokens.tolist() == (text + [0] * padding)[:seq_length]
        expected = text[1:] + [-100] * (padding + (not extra))
        assert labels.tolist() == expected
        assert padding == 0 or keep_partial


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        ("969,30,1", [(0, 97), (97, 100), (100, 100)]),
        ("90, 10, 0", [(0, 90), (90, 100), (100, 100)]),
        ("1,0,0", [(0, 100), (100, 100), (100, 100)]),
        (".5,0,.5", [(0, 50), (50, 50), (50, 100)]),
    ],
)
def test_a_split_is_cut_at_rounded_shares(split, bounds):
    ranges = split_ranges(DataSection(split=split).split_weights, 100)
    assert [(part.start, part.stop) for part in ranges.values()] == bounds
    assert list(ranges) == ["train", "valid", "test"]


def test_windows_are_counted_in_integers_where_megatron_rounds_in_float32():
    assert count_windows(6_442_449_001, 2048, 1, 1, keep_partial=True) == 3_145_728


def test_loss_is_masked_where_the_input_ends_a_document(tmp_path):
    data = write(tmp_path, [[5, 6, EOD, 7, 8, 9, 3]])
    tokens, labels = dataset(data, seq_length=6, eod=EOD, eod_mask_loss=True)[0]
    assert tokens.tolist() == [5, 6, EOD, 7, 8, 9]
    assert labels.tolist() == [6, EOD, -100, 8, 9, 3]


def test_positions_restart_after_the_end_of_a_document(tmp_path):
    data = write(tmp_path, [[5, 6, EOD, 7, 8, EOD, 3]])
    (tokens, positions), _ = dataset(data, seq_length=6, eod=EOD, reset_position_ids=True)[0]
    assert tokens.tolist() == [5, 6, EOD, 7, 8, EOD]
    assert positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert positions_within_documents(np.array([EOD, EOD, 1]), EOD).tolist() == [0, 0, 0]
    both = {"reset_position_ids": True, "reset_attention_mask": True}
    inputs, _ = dataset(data, seq_length=6, eod=EOD, **both)[0]
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input_ids": tokens.tolist(),
        "position_ids": positions.tolist(),
    }


def test_samples_are_int64_tensors_of_the_sequence_length(tmp_path):
    data = write(tmp_path, [list(range(50))], "uint16")
    tokens, labels = dataset(data)[0]
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.shape == labels.shape == (4,)


@pytest.mark.parametrize("bad", [100, 65535, -1])
def test_a_token_outside_the_vocabulary_is_named_with_file_and_document(bad, tmp_path):
    dtype = "uint16" if bad > 0 else "int32"
    samples = dataset(write(tmp_path, [[1, 2, 3], [4, 5, bad, 6, 7]], dtype), seq_length=7)
    with pytest.raises(
        DataError, match=rf"token id {bad} in document 1 of .*text.bin .* vocabulary of 100"
    ):
        samples[0]


def test_samples_beyond_the_end_are_an_index_error(tmp_path):
    samples = dataset(write(tmp_path, [list(range(50))]))
    assert samples[-1][0].tolist() == samples[len(samples) - 1][0].tolist()
    with pytest.raises(
        IndexError, match=f"sample index {len(samples)} is out of range: {len(samples)}"
    ):
        samples[len(samples)]


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (
            range(1, 1),
            {},
            "data.split leaves no document of .*text for train: the file has 2 sequences",
        ),
        (range(1, 2), {}, "train has 3 tokens in .*text, but one sample needs 5"),
        (range(2), {"seq_length": 0}, "model.seq_length is 0"),
        (range(2), {"eod_mask_loss": True}, "data.eod_mask_loss needs .* set data.tokenizer"),
        (range(2), {"reset_position_ids": True}, "data.reset_position_ids needs the end"),
    ],
)
def test_a_split_without_a_sample_is_refused(documents, options, message, tmp_path):
    data = write(tmp_path, [list(range(9)), [1, 2, 3]])
    with pytest.raises(DataError, match=message):
        dataset(data, documents, **options)


def test_files_without_token_ids_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"text.bin contains float32, not token ids"):
        dataset(write(tmp_path, [[0.5] * 9], "float32"))


def test_indices_are_stored_next_to_the_data_and_reused(tmp_path, monkeypatch):
    data = write(tmp_path, [list(range(40))])
    first = dataset(data)
    folder = tmp_path / "cache" / "GPTDataset_indices"
    kept = sorted(path.name.split("-", 1)[1] for path in folder.iterdir())
    assert kept == [
        "GPTDataset-train-description.txt",
        "GPTDataset-train-document_index.npy",
        "GPTDataset-train-sample_index.npy",
        "GPTDataset-train-shuffle_index.npy",
    ]
    monkeypatch.setattr("pipemega.data.tokens.gpt_dataset.build_indices", lambda *a, **k: 1 / 0)
    assert dataset(data)[3][0].tolist() == first[3][0].tolist()
    with pytest.raises(ZeroDivisionError):
        dataset(data, seed=2)
    assert not list(folder.glob("*.lock"))


def test_a_damaged_index_is_built_again(tmp_path):
    data = write(tmp_path, [list(range(40))])
    first = [sample[0].tolist() for sample in dataset(data)]
    for path in (tmp_path / "cache" / "GPTDataset_indices").glob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:-3])
    assert [sample[0].tolist() for sample in dataset(data)] == first


def test_indices_go_to_the_users_cache_if_the_data_folder_is_read_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    data = write(tmp_path, [list(range(40))])
    (tmp_path / "cache").write_text("a file where the folder should be")
    dataset(data)
    assert len(list((tmp_path / "home/pipemega/GPTDataset_indices").iterdir())) == 4


def test_a_cache_folder_that_is_not_writable_is_named(tmp_path):
    data = write(tmp_path, [list(range(40))])
    with pytest.raises(DataError, match=r"no folder for cached files .*text.bin.*data.cache_path"):
        dataset(data, cache=files_of(data.prefix)[0])


def test_more_samples_within_the_same_epochs_are_the_same_data(tmp_path):
    data = write(tmp_path, [list(range(40)), list(range(30))])
    few, more, many = (dataset(data, num_samples=n) for n in (3, 10, 30))
    assert few.fingerprint == more.fingerprint != many.fingerprint
    assert few[2][0].tolist() == more[2][0].tolist()


def test_a_dataset_describes_its_number_of_epochs(tmp_path):
    data = write(tmp_path, [list(range(40)), list(range(41))])
    assert dataset(data, num_samples=40).describe() == (
        f"train: 81 tokens in 2 sequences of {data.prefix}, 20 samples of 4 per epoch; "
        "40 requested = 1.99 epochs"
    )

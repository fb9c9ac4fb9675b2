"""Blends against Megatron's vectors and against its loop, written out plainly."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.data.tokens.blending import (
    BlendedDataset,
    blend,
    blend_exhaustively,
    normalized,
    sizes_of_parts,
)
from pipemega.data.tokens.gpt_dataset import GPTDataset, SampleFormat, Split
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter
from pipemega.errors import DataError

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "megatron_index.json").read_text(encoding="utf-8")
)


def loop(weights, num_samples, sizes=None):
    """One choice after the other."""
    taken = [0] * len(weights)
    index, places = [], []
    for k in range(num_samples):
        lags = [
            -np.inf if sizes and taken[i] >= sizes[i] else weight * max(k, 1) - taken[i]
            for i, weight in enumerate(weights)
        ]
        best = max(range(len(weights)), key=lambda i: lags[i])
        index.append(best)
        places.append(taken[best])
        taken[best] += 1
    return index, places


@pytest.mark.parametrize("case", GOLDEN["blend"], ids=lambda case: str(case["weights"]))
def test_blends_equal_megatrons(case):
    index, places = blend(case["weights"], case["size"])
    assert index.tolist() == case["dataset_index"]
    assert places.tolist() == case["dataset_sample_index"]
    assert (index.dtype, places.dtype) == (np.int16, np.int64)


@pytest.mark.parametrize("case", GOLDEN["exhaustive"], ids=lambda case: str(case["sizes"]))
def test_exhaustive_blends_equal_megatrons(case):
    index, places = blend_exhaustively(case["sizes"])
    assert index.tolist() == case["dataset_index"]
    assert places.tolist() == case["dataset_sample_index"]


@settings(max_examples=25)
@given(
    weights=st.lists(st.integers(1, 50) | st.floats(1e-3, 1e3), min_size=1, max_size=9),
    num_samples=st.integers(1, 2000),
)
def test_segments_in_parallel_give_the_choices_of_the_loop(weights, num_samples):
    index, places = blend(weights, num_samples)
    expected = loop(normalized(weights).tolist(), num_samples)
    assert (index.tolist(), places.tolist()) == expected


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_exhaustive_segments_give_the_choices_of_the_loop(sizes):
    index, places = blend_exhaustively(sizes)
    total = sum(sizes)
    assert (index.tolist(), places.tolist()) == loop([n / total for n in sizes], total, sizes)


def test_a_million_samples_of_four_datasets_are_blended_in_less_than_ten_seconds():
    started = time.monotonic()
    index, places = blend([0.37, 0.31, 0.2123, 0.1077], 1_000_000)
    assert time.monotonic() - started < 10  # 0.1 s on a quiet core
    assert np.bincount(index).tolist() == [370_000, 310_000, 212_300, 107_700]
    assert places.max() == 369_999


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "a blend takes 1 to 32767 datasets, but 0 were given"),
        ([1.0] * 32768, "but 32768 were given"),
        ([1, 0], "weight 0 of dataset 1 in data.data_path must be positive"),
        ([-1, 2], "weight -1 of dataset 0"),
        ([1, float("nan")], "weight nan of dataset 1"),
        ([1, float("inf")], "weight inf of dataset 1"),
    ],
)
def test_weights_that_cannot_be_shares_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        blend(weights, 10)


def test_datasets_without_any_sample_cannot_be_blended():
    with pytest.raises(DataError, match=r"datasets of \[0, 0\] samples cannot be blended"):
        blend_exhaustively([0, 0])


def test_each_dataset_is_built_slightly_larger_than_its_share():
    assert sizes_of_parts([3, 1], 1000) == [750, 250]
    assert sizes_of_parts([3, 1], 1000, 0.005) == [754, 252]


def part(folder, name, first_token, num_tokens, num_samples):
    with IndexedWriter(folder / name, "int32") as writer:
        writer.add_document(np.arange(first_token, first_token + num_tokens))
    data = IndexedDataset(folder / name)
    form = SampleFormat(seq_length=4, vocab_size=1000)
    return GPTDataset(
        data, Split("train", range(1)), sample_format=form, num_samples=num_samples, seed=1
    )


def test_a_blended_dataset_returns_the_samples_of_its_index(tmp_path):
    parts = [part(tmp_path, "a", 0, 41, 12), part(tmp_path, "b", 500, 41, 4)]
    mixed = BlendedDataset(parts, [3, 1], 16, cache=tmp_path)
    index, places = blend([3, 1], 16)
    assert len(mixed) == 16
    for i in range(16):
        assert mixed[i][0].tolist() == parts[index[i]][places[i]][0].tolist()
    with pytest.raises(IndexError, match="sample index 16 is out of range: 16"):
        mixed[16]
    assert "16 samples blended from 0.7500" in mixed.describe()


def test_without_weights_every_sample_of_every_dataset_comes_once(tmp_path):
    parts = [part(tmp_path, "a", 0, 41, None), part(tmp_path, "b", 500, 21, None)]
    mixed = BlendedDataset(parts, None, None, cache=tmp_path)
    starts = sorted(mixed[i][0][0].item() for i in range(len(mixed)))
    assert starts == [*range(0, 40, 4), *range(500, 520, 4)]
    few = BlendedDataset(parts, None, 6, cache=tmp_path)
    assert [few[i][0].tolist() for i in range(6)] == [mixed[i][0].tolist() for i in range(6)]
    assert few.fingerprint == mixed.fingerprint


def test_a_blend_that_needs_too_many_samples_names_the_dataset(tmp_path):
    parts = [part(tmp_path, "a", 0, 41, None), part(tmp_path, "b", 500, 21, None)]
    with pytest.raises(DataError, match=r"needs 20 samples of .*a, which has 10"):
        BlendedDataset(parts, [1, 1], 40, cache=tmp_path)

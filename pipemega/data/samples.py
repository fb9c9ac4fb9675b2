"""GPT samples: windows of fixed length over shuffled documents, identical to Megatron's.

    document index   [E * documents]   the documents in reading order, E epochs
    sample index     [N + 1, 2]        start of each window: (position in document index, offset)
    shuffle index    [N]               the window of sample i

Windows follow each other in the stream of documents. A window has seq_length + 1 tokens; its last
token is the first of the next window: inputs are all but the last, labels all but the first. The
arrays are pure functions of lengths, sizes and seed, so samples do not depend on mesh, micro-batch
size or workers.

Source: Megatron-LM, core/datasets/gpt_dataset.py and helpers.cpp. The results are equal; cumulative
sums and binary searches replace its loops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]

SPLITS = ("train", "valid", "test")
# Megatron shuffles a last epoch separately if it has fewer than this share of an epoch's samples.
WHOLE_ENOUGH = 0.80


def split_ranges(shares: Sequence[float], num_sequences: int) -> dict[str, range]:
    """Return {"train", "valid", "test"} -> its sequences, cut at rounded shares of the total.

    Args:
        shares: shares of train, valid and test; their sum is 1.
    """
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    cuts = [round(bound * float(num_sequences)) for bound in bounds]
    return {name: range(cuts[i], cuts[i + 1]) for i, name in enumerate(SPLITS)}


class Split(NamedTuple):
    """One split of a data set.

    Args:
        name: "train", "valid" or "test".
        sequences: its part of the sequences.
        key: the config key that determines the part.
    """

    name: str
    sequences: range
    key: str = "data.split"


@dataclass(frozen=True)
class Epochs:
    """The number of epochs, and whether the last epoch is shuffled separately.

    The indices depend on the number of samples only through these two values, so a run that is
    extended within its epochs keeps the order of its samples.
    """

    count: int
    last_apart: bool


def plan_epochs(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None, extra: int
) -> Epochs:
    """Return the fewest epochs that give `num_samples` windows; one epoch if it is None.

    Args:
        extra: 1 if a window has one more token than seq_length (for the last label), else 0.
    """
    if num_samples is None:
        return Epochs(1, False)
    needed = num_samples * seq_length + extra
    count = max(1, -(-needed // tokens_per_epoch))
    if count == 1:
        return Epochs(1, False)
    before = ((count - 1) * tokens_per_epoch - extra) // seq_length
    per_epoch = (tokens_per_epoch - extra) // seq_length
    return Epochs(count, num_samples - before < int(WHOLE_ENOUGH * per_epoch))


def count_windows(
    tokens_per_epoch: int, seq_length: int, epochs: int, extra: int, keep_partial: bool
) -> int:
    """Return the number of windows in `epochs`; with `keep_partial` a last partial one counts.

    In integers: Megatron rounds up in float32, which is off by one above 16 million windows.
    """
    tokens = epochs * tokens_per_epoch - extra
    return max(0, -(-tokens // seq_length) if keep_partial else tokens // seq_length)


class SampleIndices(NamedTuple):
    """The three index arrays; see the module docstring."""

    document: Ints
    sample: Ints
    shuffle: Ints


def build_indices(
    lengths: npt.NDArray[np.int32],
    documents: range,
    seq_length: int,
    epochs: Epochs,
    seed: int,
    *,
    add_extra_token: bool = True,
    keep_partial: bool = False,
) -> SampleIndices:
    """Build the three arrays with one random generator, in Megatron's order.

    Args:
        lengths: number of tokens of every sequence of the files [S].
        documents: the sequences to read, a part of range(S).
        epochs: from `plan_epochs`.
        add_extra_token: windows have one more token than seq_length, for the last label.
        keep_partial: keep the last window if it is not full.

    Shape:
        document int32 [E * documents]; sample int32 or int64 [N + 1, 2]; shuffle uint32 or
        int64 [N]
    """
    extra = int(add_extra_token)
    per_epoch = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    random = np.random.RandomState(seed)
    document = _document_index(documents, epochs, random)
    num_windows = count_windows(per_epoch, seq_length, epochs.count, extra, keep_partial)
    sample = _sample_index(lengths, document, seq_length, num_windows, extra)
    first = num_windows
    if epochs.last_apart:
        first = ((epochs.count - 1) * per_epoch - extra) // seq_length
    return SampleIndices(document, sample, _shuffle_index(first, num_windows, random))


def _document_index(documents: range, epochs: Epochs, random: np.random.RandomState) -> Ints:
    """Return the documents of all epochs, shuffled together or with the last epoch separate."""
    once = np.arange(documents.start, documents.stop, dtype=np.int32)
    parts = [epochs.count - 1, 1] if epochs.last_apart else [epochs.count]
    index = []
    for times in parts:
        part = np.tile(once, times)
        random.shuffle(part)
        index.append(part)
    return np.concatenate(index)


def _sample_index(
    lengths: npt.NDArray[np.int32],
    document: Ints,
    seq_length: int,
    num_windows: int,
    extra: int,
) -> Ints:
    """Return the start of each window and the end of the last one. [N + 1, 2]

    Window i starts at token i * seq_length of the stream, in the first document whose cumulative
    length exceeds that. Without an extra token the end of a window is the position *after* its last
    token: at the border of two documents this is the end of the first document, not the start of
    the second, so the search uses side "left".
    """
    ends = np.cumsum(lengths[document], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    at = np.minimum(np.arange(num_windows + 1, dtype=np.int64) * seq_length, total - extra)
    place = np.searchsorted(ends, at, side="right" if extra else "left")
    # The stream starts at its first document, even if that is empty.
    place[0] = 0
    starts = ends[place] - lengths[document[place]]
    biggest = max(len(document), int(lengths.max()))
    dtype = np.int32 if biggest <= np.iinfo(np.int32).max else np.int64
    return np.stack([place, at - starts], axis=1).astype(dtype)


def _shuffle_index(first: int, total: int, random: np.random.RandomState) -> Ints:
    """Return a permutation of [0, first), followed by one of [first, total)."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    parts = []
    for start, stop in ((0, first), (first, total)):
        if start < stop:
            part = np.arange(start, stop, dtype=dtype)
            random.shuffle(part)
            parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def index_folder(prefix: Path) -> Path:
    """Return the default folder of the indices: next to the data, with Megatron's name."""
    return prefix.parent / "cache" / "GPTDataset_indices"

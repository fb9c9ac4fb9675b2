"""GPT samples: fixed-length windows over shuffled documents, exactly as Megatron cuts them.

    document index   [E * documents]   the documents in the order of reading, E epochs of them
    sample index     [N + 1, 2]        where each window starts: (place in the line above, offset)
    shuffle index    [N]               which window is sample i

Windows lie end to end over the stream of documents; each is seq_length + 1 tokens, its last one
being the first of the next: inputs are all but the last, labels all but the first. The arrays are
pure functions of lengths, sizes and seed, so samples depend on no mesh, micro-batch or worker.

Source: Megatron-LM, core/datasets/gpt_dataset.py and helpers.cpp, whose results are matched; its
loops are cumulative sums and binary searches here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]

SPLITS = ("train", "valid", "test")
# Megatron sets a last epoch apart when it gives fewer than this share of an epoch's samples.
WHOLE_ENOUGH = 0.80


def split_ranges(shares: Sequence[float], num_sequences: int) -> dict[str, range]:
    """{"train", "valid", "test"} -> the sequences of each, cut at rounded shares of the whole.

    Args:
        shares: of train, valid and test; they add up to 1.
    """
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    cuts = [round(bound * float(num_sequences)) for bound in bounds]
    return {name: range(cuts[i], cuts[i + 1]) for i, name in enumerate(SPLITS)}


@dataclass(frozen=True)
class Epochs:
    """How often the documents are read, and whether the last time is shuffled on its own.

    The indices depend on a number of samples only through these two, so a run that is prolonged
    within its epochs keeps the order of its samples.
    """

    count: int
    last_apart: bool


def plan_epochs(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None, extra: int
) -> Epochs:
    """The fewest epochs that give `num_samples` windows; one if no number is asked for.

    Args:
        extra: 1 if a window needs one token more than its length for its last label, else 0.
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
    """Windows in so many epochs; a last, partial one counts if it is to be kept.

    In integers: Megatron rounds up in float32 and is off by one past 16 million windows.
    """
    tokens = epochs * tokens_per_epoch - extra
    return max(0, -(-tokens // seq_length) if keep_partial else tokens // seq_length)


class SampleIndices(NamedTuple):
    """The three arrays; see the head of this file."""

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
    """The three arrays, drawn in Megatron's order from one generator.

    Args:
        lengths: tokens of every sequence of the files [S].
        documents: the sequences to read, a part of range(S).
        epochs: from `plan_epochs`.
        add_extra_token: windows carry one token more than seq_length, for the last label.
        keep_partial: keep the last window though it is not full.

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
    """The documents, `epochs.count` times, shuffled as a whole or with the last time apart."""
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
    """Where each window starts, and where the last one ends. [N + 1, 2]

    Window i starts at token i * seq_length of the stream, which lies in the first document whose
    cumulative length exceeds it. Without an extra token, a window's end is the place *after* its
    last token: on the border of two documents that is the end of the first, not the start of the
    second, hence the search from the left.
    """
    ends = np.cumsum(lengths[document], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    at = np.minimum(np.arange(num_windows + 1, dtype=np.int64) * seq_length, total - extra)
    place = np.searchsorted(ends, at, side="right" if extra else "left")
    # The start of the stream is the start of its first document, however many are empty.
    place[0] = 0
    starts = ends[place] - lengths[document[place]]
    biggest = max(len(document), int(lengths.max()))
    dtype = np.int32 if biggest <= np.iinfo(np.int32).max else np.int64
    return np.stack([place, at - starts], axis=1).astype(dtype)


def _shuffle_index(first: int, total: int, random: np.random.RandomState) -> Ints:
    """A permutation of [0, first), then one of [first, total)."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    parts = []
    for start, stop in ((0, first), (first, total)):
        if start < stop:
            part = np.arange(start, stop, dtype=dtype)
            random.shuffle(part)
            parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def index_folder(prefix: Path) -> Path:
    """Where indices lie by default: beside the data, under Megatron's name for the folder."""
    return prefix.parent / "cache" / "GPTDataset_indices"

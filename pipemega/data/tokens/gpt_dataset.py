"""Map-style dataset over Megatron's token files: sample i -> (tokens, labels).

GPT samples: windows of fixed length over shuffled documents, identical to Megatron's.

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
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipemega.data.tokens.token_files import IndexedDataset, Mappings
from pipemega.data.tokens.tokenizers import UNKNOWN_EOD
from pipemega.errors import DataError
from pipemega.printing import counted
from pipemega.storage.build_once import (
    Say,
    cached_arrays,
    digest_of,
    user_cache_folder,
    writable_folder,
)

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
        epochs: the result of `plan_epochs`.
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


IGNORE = -100
# Padding; it becomes token 0 with an ignored label, as in Megatron.
PAD = -1

Sample = tuple[Tensor | tuple[Tensor, Tensor] | dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class SampleFormat:
    """How windows of tokens become samples.

    Attributes:
        seq_length: number of tokens of a sample.
        vocab_size: upper bound of the token ids.
        eod: the end-of-document id; required by the next two.
        eod_mask_loss: no loss where the *input* token is the end of a document.
        reset_position_ids: restart positions from 0 after each end of a document; the inputs are
            then (tokens, position_ids).
        reset_attention_mask: no attention across documents; the inputs are then a dict of
            `input_ids` and `position_ids`.
        add_extra_token: read one more token than seq_length, for the last label; otherwise the
            last label is ignored.
        keep_partial: keep the last window if it is not full, padded and with ignored labels
            (Megatron's drop_last_partial_validation_sequence turned off).
    """

    seq_length: int
    vocab_size: int
    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    add_extra_token: bool = True
    keep_partial: bool = False

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise DataError(f"model.seq_length is {self.seq_length}, but must be at least 1")
        for key in ("eod_mask_loss", "reset_position_ids"):
            if getattr(self, key) and self.eod is None:
                raise DataError(UNKNOWN_EOD.format(key=key))
        if self.eod is not None and self.eod >= self.vocab_size:
            raise DataError(
                f"data.eod_id is {self.eod}, which is outside of the vocabulary of "
                f"{self.vocab_size} tokens"
            )


class GPTDataset(Dataset[Sample]):
    """Megatron's GPT samples of one split of one pair of token files.

    Args:
        data: the token files.
        split: name ("train", "valid" or "test") and sequences; see `samples.split_ranges`.
        sample_format: how windows become samples.
        num_samples: minimum number of samples, over as many epochs as needed; None: one epoch.
        seed: seed of the shuffling.
        cache: folder of the indices; None: next to the data, else in the user's cache folder.
        say: called with a progress line if building takes long.

    Shape:
        [i] -> (tokens int64 [seq], labels int64 [seq]), or ((tokens, position_ids int64 [seq]),
        labels), or a dict of these two; labels are -100 where the loss ignores them

    Raises:
        DataError: the split has no documents or is too short for one sample. While reading: a token
            is outside of the vocabulary.
    """

    # The loader does not shuffle again, as in Megatron.
    already_shuffled = True
    deterministic = True

    def __init__(
        self,
        data: IndexedDataset,
        split: Split,
        *,
        sample_format: SampleFormat,
        num_samples: int | None,
        seed: int,
        cache: Path | None = None,
        say: Say | None = None,
    ) -> None:
        self.data = data
        self.name, self.sequences, self._key = split
        self.format = sample_format
        self.num_samples = num_samples
        self.tokens_per_epoch = int(
            data.lengths[self.sequences.start : self.sequences.stop].sum(dtype=np.int64)
        )
        self._extra = int(sample_format.add_extra_token)
        self._refuse_too_little()
        self.epochs = plan_epochs(
            self.tokens_per_epoch, sample_format.seq_length, num_samples, self._extra
        )
        self._description = self._describe(seed)
        self.fingerprint = digest_of(self._description)
        mapped = self._load_indices(seed, cache, say)
        self._mappings = Mappings(*mapped)
        # Plain arrays: each slice of a memmap runs Python code.
        self._indices = SampleIndices(*(array.view(np.ndarray) for array in mapped))
        self._length = len(mapped.shuffle)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Return one sample; a negative index counts from the end."""
        if not -self._length <= index < self._length:
            raise IndexError(f"sample index {index} is out of range: {self._length} samples")
        self._mappings.refuse_shortened()
        return self._sample_of(self._read(self._indices.shuffle.item(index)))

    def split_tokens(self) -> npt.NDArray[np.generic]:
        """Return all tokens of the split once, in file order; no copy."""
        return self.data.span(self.sequences.start, self.sequences.stop)

    def describe(self) -> str:
        """Return one line: the size of the split and the number of epochs."""
        per_epoch = count_windows(
            self.tokens_per_epoch, self.format.seq_length, 1, self._extra, self.format.keep_partial
        )
        requested = ""
        if self.num_samples is not None:
            needed = self.num_samples * self.format.seq_length + self._extra
            requested = (
                f"; {self.num_samples:,} requested = {needed / self.tokens_per_epoch:.2f} epochs"
            )
        return (
            f"{self.name}: {self.tokens_per_epoch:,} tokens in {len(self.sequences):,} sequences "
            f"of {self.data.prefix}, {per_epoch:,} samples of {self.format.seq_length} per "
            f"epoch{requested}"
        )

    def _refuse_too_little(self) -> None:
        if not len(self.sequences):
            raise DataError(
                f"{self._key} leaves no document of {self.data.prefix} for {self.name}: the "
                f"file has {counted(len(self.data), 'sequence')}; give {self.name} a larger share"
            )
        if self.data.dtype.kind == "f":
            raise DataError(f"{self.data.bin_path} contains {self.data.dtype.name}, not token ids")
        needed = (
            1 + self._extra if self.format.keep_partial else self.format.seq_length + self._extra
        )
        enough = self.tokens_per_epoch >= needed
        if self.tokens_per_epoch < 2 or (self.num_samples is None and not enough):
            raise DataError(
                f"{self.name} has {self.tokens_per_epoch} tokens in {self.data.prefix}, but one "
                f"sample needs {needed}: give {self.name} a larger part with {self._key}"
            )

    def _describe(self, seed: int) -> dict[str, object]:
        """Return what the indices depend on; without file paths and the number of samples."""
        return {
            "dataset": self.data.fingerprint(),
            "split": self.name,
            "first sequence": self.sequences.start,
            "last sequence": self.sequences.stop,
            "sequence length": self.format.seq_length,
            "epochs": self.epochs.count,
            "last epoch apart": self.epochs.last_apart,
            "seed": seed,
            "extra token": self._extra,
            "keep partial": self.format.keep_partial,
        }

    def _load_indices(self, seed: int, cache: Path | None, say: Say | None) -> SampleIndices:
        def build() -> dict[str, npt.NDArray[np.generic]]:
            indices = build_indices(
                self.data.lengths,
                self.sequences,
                self.format.seq_length,
                self.epochs,
                seed,
                add_extra_token=self.format.add_extra_token,
                keep_partial=self.format.keep_partial,
            )
            return {f"{key}_index": array for key, array in indices._asdict().items()}

        default = index_folder(self.data.prefix), user_cache_folder() / "GPTDataset_indices"
        arrays = cached_arrays(
            writable_folder(*default) if cache is None else writable_folder(cache, cache),
            f"GPTDataset-{self.name}",
            self._description,
            [f"{key}_index" for key in SampleIndices._fields],
            build,
            what=f"the {self.name} index of {self.data.prefix}",
            say=say,
        )
        return SampleIndices(*(arrays[f"{key}_index"] for key in SampleIndices._fields))  # type: ignore[arg-type]

    def _read(self, window: int) -> npt.NDArray[np.int64]:
        """Return the tokens of one window, padded at the end. [seq + extra]"""
        (first, start), (last, end) = self._indices.sample[window : window + 2].tolist()
        documents = self._indices.document[first : last + 1].tolist()
        read = self.data.joined(documents, start, end + self._extra)
        signed = read.dtype.kind == "i"
        if read.size and (read.max() >= self.format.vocab_size or (signed and read.min() < 0)):
            self._refuse_foreign_token(documents)
        size = self.format.seq_length + self._extra
        if len(read) == size:
            return read.astype(np.int64)
        text = np.full(size, PAD, dtype=np.int64)
        text[: len(read)] = read
        return text

    def _refuse_foreign_token(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            part = self.data.get(sequence).astype(np.int64)
            foreign = part[(part < 0) | (part >= self.format.vocab_size)]
            if foreign.size:
                raise DataError(
                    f"token id {foreign[0]} in document {self.data.document_of(sequence)} of "
                    f"{self.data.bin_path} is outside of the vocabulary of "
                    f"{self.format.vocab_size}: the data was made with another tokenizer, or "
                    "model.vocab_size is too small"
                )
        raise AssertionError("no token is outside of the vocabulary")

    def _sample_of(self, text: npt.NDArray[np.int64]) -> Sample:
        """Convert tokens [seq + extra] to a sample of `SampleFormat`."""
        if self._extra:
            # One copy, so that writing to the inputs does not change the labels.
            inputs, labels = text[:-1].copy(), text[1:]
        else:
            inputs, labels = text, np.append(text[1:], PAD)
        if labels.item(-1) == PAD:  # padding is at the end
            labels[labels == PAD] = IGNORE
            inputs[inputs == PAD] = 0
        if self.format.eod_mask_loss:
            labels[inputs == self.format.eod] = IGNORE
        tokens = torch.from_numpy(inputs)
        if self.format.reset_position_ids:
            positions = torch.from_numpy(positions_within_documents(inputs, self.format.eod))
            if self.format.reset_attention_mask:
                return {"input_ids": tokens, "position_ids": positions}, torch.from_numpy(labels)
            return (tokens, positions), torch.from_numpy(labels)
        return tokens, torch.from_numpy(labels)


def positions_within_documents(
    tokens: npt.NDArray[np.int64], eod: int | None
) -> npt.NDArray[np.int64]:
    """Return 0, 1, 2, ... restarting from 0 after each end-of-document id. [seq] -> [seq]"""
    starts = np.zeros(len(tokens), dtype=np.int64)
    after_eod = np.flatnonzero(tokens[:-1] == eod) + 1
    starts[after_eod] = after_eod
    positions: npt.NDArray[np.int64] = np.arange(len(tokens), dtype=np.int64)
    positions -= np.maximum.accumulate(starts)
    return positions

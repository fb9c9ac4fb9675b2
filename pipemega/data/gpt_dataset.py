"""Map-style dataset over Megatron's token files: sample i -> (tokens, labels)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipemega.data.file_cache import (
    Say,
    cached_arrays,
    digest_of,
    user_cache_folder,
    writable_folder,
)
from pipemega.data.indexed import IndexedDataset
from pipemega.data.mapped_files import Mappings
from pipemega.data.samples import (
    SampleIndices,
    Split,
    build_indices,
    count_windows,
    index_folder,
    plan_epochs,
)
from pipemega.data.tokenizer import UNKNOWN_EOD
from pipemega.errors import DataError
from pipemega.printing import counted

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

"""Map-style dataset of examples: packed into samples of one length, or padded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from pipemega.data.collate import stack_samples
from pipemega.data.file_cache import Say, cached_arrays, digest_of
from pipemega.data.finetuning.example_cache import CachedExamples
from pipemega.data.finetuning.packing import Truncation, cut, pack
from pipemega.data.gpt_dataset import IGNORE
from pipemega.data.mapped_files import Mappings
from pipemega.errors import DataError
from pipemega.printing import percent

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class ExampleSampling:
    """How examples become samples.

    Attributes:
        seq_length: number of tokens of a sample.
        packing: several examples in one sample.
        truncation: what to do with longer examples; see `data.truncation`.
        pad_to_multiple_of: without packing: pad a micro-batch to its longest sample, rounded up to
            a multiple of this; None: to seq_length.
        pad_id: token of the padding.
        seed: of the order in which examples are packed.
    """

    seq_length: int
    packing: bool
    truncation: Truncation
    pad_to_multiple_of: int | None
    pad_id: int
    seed: int

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        if multiple is not None and self.seq_length % multiple:
            raise DataError(
                f"data.pad_to_multiple_of ({multiple}) must divide model.seq_length "
                f"({self.seq_length}), to which the longest samples are padded"
            )


class FineTuningDataset(Dataset[tuple[Inputs, Tensor]]):
    """Samples of examples, in one order; the loader shuffles them in each epoch.

    Args:
        source: the examples.
        name: of the split, in messages.
        chosen: examples of the split.
        sampling: how examples become samples.
        folder: of the index.
        say: called with a progress line if building takes long.

    Shape:
        [i] -> ({"input_ids" int64 [seq], "position_ids" int64 [seq]}, labels int64 [seq]) with
        packing: position ids restart at each example, and at the padding. Without packing
        "attention_mask" takes their place; with `pad_to_multiple_of` samples have different
        lengths, and `collate_fn` pads them. Labels are the next tokens, or -100.

    Raises:
        DataError: no example is left.
    """

    already_shuffled = False
    deterministic = True

    def __init__(
        self,
        source: CachedExamples,
        name: str,
        chosen: npt.NDArray[np.int64],
        sampling: ExampleSampling,
        folder: Path,
        say: Say | None = None,
    ) -> None:
        self.name, self.sampling, self._examples = name, sampling, source.examples
        # `chosen` follows from the digest, the split and the seed.
        description = {
            "examples": source.digest,
            "split": [name, len(chosen), digest_of({"chosen": chosen.tolist()})],
            "sequence length": sampling.seq_length,
            "packing": sampling.packing,
            "truncation": sampling.truncation,
            "seed": sampling.seed,
        }
        self.fingerprint = digest_of(description)
        multiple = sampling.pad_to_multiple_of
        self.collate_fn = None if multiple is None else PadToLongest(multiple, sampling.pad_id)
        offsets = self._examples.offsets
        bounds = np.stack([offsets[chosen], offsets[chosen + 1]], axis=1)

        def build() -> dict[str, npt.NDArray[np.generic]]:
            return self._build(bounds)

        arrays = cached_arrays(
            folder,
            f"samples-{name}",
            description,
            ("pieces", "samples", "counts"),
            build,
            what=f"the {name} samples",
            say=say,
        )
        self._pieces, self._samples = arrays["pieces"], arrays["samples"]
        self._too_long, self._without_loss, self._tokens, self._labels = arrays["counts"].tolist()
        self._num_examples = len(chosen)
        self._mappings = Mappings(*self._examples, *arrays.values())

    def __len__(self) -> int:
        return len(self._samples) - 1

    def __getitem__(self, index: int) -> tuple[Inputs, Tensor]:
        """Return one sample; a negative index counts from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample index {index} is out of range: {len(self)} samples")
        index %= len(self)
        self._mappings.refuse_shortened()
        pieces = self._pieces[self._samples[index] : self._samples[index + 1]].tolist()
        parts = [self._examples.tokens[first:last] for first, last in pieces]
        counted = [self._examples.is_answer[first + 1 : last] for first, last in pieces]
        tokens = _tensor([part[:-1] for part in parts])
        labels = _tensor([part[1:] for part in parts])
        labels[~torch.from_numpy(np.concatenate(counted))] = IGNORE
        sampling = self.sampling
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if sampling.pad_to_multiple_of is not None:
            return inputs, labels
        inputs, labels = _padded(inputs, labels, sampling.seq_length, sampling.pad_id)
        if sampling.packing:
            sizes = [len(part) - 1 for part in parts] + [sampling.seq_length - len(tokens)]
            positions = torch.cat([torch.arange(size) for size in sizes])
            inputs = {"input_ids": inputs["input_ids"], "position_ids": positions}
        return inputs, labels

    def describe(self) -> str:
        """Return one line: examples, tokens, samples, and what was cut or left out."""
        length, number = self.sampling.seq_length, len(self)
        how = "packed" if self.sampling.packing else "single"
        line = (
            f"{self.name}: {self._num_examples:,} examples, {self._tokens:,} tokens "
            f"({self._labels:,} with loss) in {number:,} {how} samples of {length} "
            f"({percent(self._tokens / (number * length))} filled)"
        )
        what = {"truncate": "cut off", "split": "split", "drop": "left out"}
        if self._too_long:
            line += f"; {self._too_long:,} longer ones {what[self.sampling.truncation]}"
        if self._without_loss:
            line += f"; {self._without_loss:,} without an answer in their first {length} tokens"
        return line

    def _build(self, bounds: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        sampling, is_answer = self.sampling, self._examples.is_answer
        pieces = cut(bounds, is_answer, sampling.seq_length, sampling.truncation)
        if not len(pieces.bounds):
            raise DataError(
                f"none of the {len(bounds)} examples for {self.name} has an answer within "
                f"model.seq_length ({sampling.seq_length} tokens): increase it, or set "
                "data.truncation to 'split'"
            )
        kept = pieces.bounds
        lengths = kept[:, 1] - kept[:, 0] - 1
        samples: npt.NDArray[np.int64] = np.arange(len(kept) + 1, dtype=np.int64)
        if sampling.packing:
            random = np.random.RandomState([sampling.seed % 2**32])
            shuffled = random.permutation(len(kept))
            order, samples = pack(lengths[shuffled], sampling.seq_length)
            kept = kept[shuffled[order]]
        counts = [pieces.too_long, pieces.without_loss, lengths.sum(), pieces.labels.sum()]
        return {"pieces": kept, "samples": samples, "counts": np.array(counts, dtype=np.int64)}


@dataclass(frozen=True)
class PadToLongest:
    """Pads the samples of a micro-batch to its longest one, rounded up to a multiple."""

    multiple: int
    pad_id: int
    deterministic = True

    def __call__(self, samples: Sequence[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
        """Return the stacked samples."""
        longest = max(len(labels) for _, labels in samples)
        length = -(-longest // self.multiple) * self.multiple
        batch: tuple[Inputs, Tensor] = stack_samples(
            [_padded(inputs, labels, length, self.pad_id) for inputs, labels in samples]
        )
        return batch


def _padded(inputs: Inputs, labels: Tensor, length: int, pad_id: int) -> tuple[Inputs, Tensor]:
    right = (0, length - len(labels))
    padded = {
        "input_ids": F.pad(inputs["input_ids"], right, value=pad_id),
        "attention_mask": F.pad(inputs["attention_mask"], right),
    }
    return padded, F.pad(labels, right, value=IGNORE)


def _tensor(parts: Sequence[npt.NDArray[np.int32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))

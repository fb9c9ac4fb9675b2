"""Map-style dataset of examples: packed into samples of one length, or padded.

Cut examples to the length of a sample, and put several of them into one sample.

Examples as arrays on disk, which one process builds and all ranks map into memory.

Build the datasets of fine-tuning data from the config section `data`.
"""

import sys
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from tqdm import tqdm

from pipemega.config import load
from pipemega.config.sections.data_section import DataSection
from pipemega.data.finetuning.conversations import ChatFormat
from pipemega.data.finetuning.examples import Example, ExampleFormat, InstructionFormat, TextFormat
from pipemega.data.finetuning.record_files import Record, RecordObjects, Records, find_records
from pipemega.data.sample_reader import stack_samples
from pipemega.data.tokens.build_datasets import DataRequest, Datasets, vocabulary_size
from pipemega.data.tokens.gpt_dataset import IGNORE, SPLITS, split_ranges
from pipemega.data.tokens.token_files import Mappings
from pipemega.data.tokens.tokenizers import Tokenizer, load_tokenizer
from pipemega.errors import ConfigError, DataError
from pipemega.printing import counted, percent
from pipemega.storage.build_once import (
    Say,
    cached_arrays,
    digest_of,
    user_cache_folder,
    writable_folder,
)

Indices = npt.NDArray[np.int64]
Truncation = Literal["truncate", "split", "drop"]


class Pieces(NamedTuple):
    """Parts of examples that fit into a sample.

    Args:
        bounds: int64 [pieces, 2], first token of each and the one after its last. A piece of n + 1
            tokens has n inputs and n labels.
        labels: number of labels of each piece that count.
        too_long: examples that did not fit.
        without_loss: pieces that were left out, because none of their labels counts.
    """

    bounds: Indices
    labels: Indices
    too_long: int
    without_loss: int


def cut(
    bounds: Indices, is_answer: npt.NDArray[np.bool_], seq_length: int, truncation: Truncation
) -> Pieces:
    """Return pieces of at most seq_length + 1 tokens, each of which has labels that count.

    Pieces of one example overlap by one token: it is the last label of the first piece and the
    first input of the second.

    Args:
        bounds: first token of each example and the one after its last. [examples, 2]
        is_answer: for each token of all examples, whether the loss counts it.
        truncation: what to do with longer examples; see `data.truncation`.
    """
    starts, ends = bounds[:, 0], bounds[:, 1]
    inputs = ends - starts - 1
    is_long = inputs > seq_length
    if truncation == "drop":
        pieces = bounds[~is_long]
    elif truncation == "truncate":
        pieces = np.stack([starts, np.minimum(ends, starts + seq_length + 1)], axis=1)
    else:
        number = np.maximum(-(-inputs // seq_length), 1)
        first = np.repeat(starts, number)
        place = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        first = first + place * seq_length
        last = np.minimum(first + seq_length + 1, np.repeat(ends, number))
        pieces = np.stack([first, last], axis=1)
    # Number of labels that count before each token; the first token of a piece is no label.
    before = np.concatenate([[0], np.cumsum(is_answer, dtype=np.int64)])
    labels = before[pieces[:, 1]] - before[np.minimum(pieces[:, 0] + 1, pieces[:, 1])]
    has_loss = labels > 0
    return Pieces(pieces[has_loss], labels[has_loss], int(is_long.sum()), int((~has_loss).sum()))


def pack(lengths: Indices, capacity: int) -> tuple[Indices, Indices]:
    """Put items into bins: the longest first, each into the fullest bin that has space.

    Args:
        lengths: the lengths of the items, each at most `capacity`.

    Returns:
        The items bin by bin, and where each bin starts and the last one ends. [items], [bins + 1]
    """
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)  # space -> bins
    spaces: list[int] = []  # sorted, those that bins have
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            chosen = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
            bins[chosen].append(item)
        else:
            space, chosen = capacity, len(bins)
            bins.append([item])
        left = space - length
        if left:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(chosen)
    items = np.array([item for each in bins for item in each], dtype=np.int64)
    return items, np.cumsum([0, *(len(each) for each in bins)], dtype=np.int64)


# Increase it to invalidate files of older versions.
_VERSION = 1
_RECORDS_AT_ONCE = 512


class Examples(NamedTuple):
    """All examples of a source, one after the other.

    Args:
        tokens: int32 [tokens].
        is_answer: bool [tokens]: the loss counts the token as a label.
        offsets: int64 [examples + 1], start of each example.
        counts: int64 [2], records and records without an answer.
    """

    tokens: npt.NDArray[np.int32]
    is_answer: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class CachedExamples(NamedTuple):
    """Examples, and the digest of what they were made of."""

    examples: Examples
    digest: str


def _build(records: Records, form: ExampleFormat, progress: bool) -> Examples:
    found: list[Example] = []
    number = 0
    bar = tqdm(
        total=records.total, unit="B", unit_scale=True, desc="tokenizing", disable=not progress,
        file=sys.stderr,
    )  # fmt: skip
    with bar:
        for group in _groups(iter(records)):
            found += [example for example in form.examples(group) if example is not None]
            number += len(group)
            bar.update(sum(record.size for record in group))
    if not found:
        raise DataError(
            f"none of the {number} records of {records.name} has an answer to learn from"
            if number
            else f"{records.name} has no records"
        )
    lengths = [len(example.tokens) for example in found]
    return Examples(
        np.concatenate([example.tokens for example in found]),
        np.concatenate([example.is_answer for example in found]),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.array([number, number - len(found)], dtype=np.int64),
    )


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(islice(records, _RECORDS_AT_ONCE)):
        yield group


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
        seed: seed of the order in which examples are packed.
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
        name: name of the split, in messages.
        chosen: examples of the split.
        sampling: how examples become samples.
        folder: folder of the index.
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


def finetuning_dataset(
    records: Any,
    data: DataSection | Mapping[str, Any],
    *,
    seq_length: int,
    seed: int = 1234,
    say: Say | None = None,
    progress: bool = False,
) -> FineTuningDataset:
    """Return a dataset of `records` to fine-tune on, for `initialize`, `Trainer` or `evaluate`.

    Args:
        records: a list of dicts, or an object with `len` and `[i]` such as a dataset of the package
            `datasets`; or paths of files, as `data.path`.
        data: keys of the config section `data`: "format" and "tokenizer", and others for records.
        seq_length: number of tokens of a sample.
        seed: seed of the order in which examples are packed.
        say, progress: function that takes log lines, and whether to show a bar.

    Raises:
        ConfigError, DataError: `data` or a record is not valid.
    """
    section = data if isinstance(data, DataSection) else _section(data)
    is_path = isinstance(records, str | Path)
    is_path |= isinstance(records, list | tuple) and all(isinstance(r, str | Path) for r in records)
    if is_path and len(records if isinstance(records, list | tuple) else [records]):
        names = records if isinstance(records, list | tuple) else [records]
        source: Records = find_records([str(name) for name in names])
    else:
        source = RecordObjects(records)
    tokenizer = _tokenizer_of(section)
    builder = _Builder(section, seq_length, seed, tokenizer, say, progress)
    found = builder.examples(source)
    return builder.dataset(found, "train", np.arange(len(found.examples.offsets) - 1))


def build_finetuning(
    section: DataSection, request: DataRequest, say: Say | None, progress: bool
) -> Datasets:
    """Return the datasets of `data.path` and `data.valid_path`; every rank calls it.

    Args:
        section: the config section `data`, with a format.
        request, say, progress: as for `build_datasets`.

    Raises:
        ConfigError, DataError: the section or a record is not valid.
    """
    if section.path is None:
        raise ConfigError(
            f"data.format is {section.format!r}, but data.path names no records: set it to files "
            "of JSON lines or parquet"
        )
    tokenizer, seed = _tokenizer_of(section), request.seed
    builder = _Builder(section, request.seq_length, seed, tokenizer, say, progress)
    found = builder.examples(find_records(section.path))
    lines = [_describe(found, str(section.path))]
    number = len(found.examples.offsets) - 1
    order = np.random.RandomState([seed % 2**32]).permutation(number)
    weights = (1.0, 0.0, 0.0) if section.valid_path is not None else section.split_weights
    ranges = split_ranges(weights, number)
    sources = {name: (found, order[part.start : part.stop]) for name, part in ranges.items()}
    if section.valid_path is not None:
        other = builder.examples(find_records(section.valid_path, "data.valid_path"))
        sources["valid"] = other, np.arange(len(other.examples.offsets) - 1)
        lines.append(_describe(other, str(section.valid_path)))
    splits: dict[str, FineTuningDataset | None] = dict.fromkeys(SPLITS)
    for name in SPLITS:
        if request.samples[name] == 0:
            continue
        examples, chosen = sources[name]
        if not len(chosen):
            raise DataError(
                f"data.split leaves no example of {section.path} for {name}: the files have "
                f"{counted(number, 'example')}; give {name} a larger share, or name other "
                f"records with data.valid_path"
            )
        dataset = builder.dataset(examples, name, chosen)
        splits[name] = dataset
        lines.append(dataset.describe())
    vocab_size = vocabulary_size(request.vocab_size, tokenizer, str(section.path))
    return Datasets(**splits, vocab_size=vocab_size, tokenizer=tokenizer, description=tuple(lines))


class _Builder(NamedTuple):
    section: DataSection
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    say: Say | None
    progress: bool

    def examples(self, records: Records) -> CachedExamples:
        """Return the examples of `records`; one process per file system tokenizes them.

        Raises:
            DataError: a record is not valid, or no record has an answer.
        """
        form = self._format()
        description = {
            "version": _VERSION, "records": records.identity, "example": dict(form.identity)
        }  # fmt: skip

        def build() -> dict[str, npt.NDArray[np.generic]]:
            return dict(_build(records, form, self.progress)._asdict())

        arrays = cached_arrays(
            self._folder(),
            "examples",
            description,
            Examples._fields,
            build,
            what=f"the examples of {records.name}",
            say=self.say,
        )
        return CachedExamples(Examples(**arrays), digest_of(description))  # type: ignore[arg-type]

    def dataset(self, source: CachedExamples, name: str, chosen: Any) -> FineTuningDataset:
        section = self.section
        sampling = ExampleSampling(
            seq_length=self.seq_length,
            packing=section.packing,
            truncation=section.truncation or ("split" if section.format == "text" else "truncate"),
            pad_to_multiple_of=section.pad_to_multiple_of,
            pad_id=self.tokenizer.eod or 0,
            seed=self.seed,
        )
        return FineTuningDataset(source, name, chosen, sampling, self._folder(), self.say)

    def _format(self) -> ExampleFormat:
        section, tokenizer = self.section, self.tokenizer
        if section.format == "chat":
            assert section.tokenizer is not None, "checked by _tokenizer_of"
            return ChatFormat(section.tokenizer, section.chat_template, section.key)
        if section.format == "instruction":
            return InstructionFormat(tokenizer, section.prompt_template, section.key)
        return TextFormat(tokenizer, section.key)

    def _folder(self) -> Path:
        given = self.section.cache_path
        folder = Path(given).expanduser() if given else user_cache_folder() / "finetuning"
        return writable_folder(folder, folder)


def _tokenizer_of(section: DataSection) -> Tokenizer:
    if section.format is None:
        raise ConfigError("data.format is missing: set it to 'chat', 'instruction' or 'text'")
    if section.tokenizer is None:
        raise ConfigError(
            f"data.format is {section.format!r}, but data.tokenizer is missing: name the model's "
            "tokenizer, such as its folder"
        )
    return load_tokenizer(section.tokenizer, section.eod_id)


def _section(data: Mapping[str, Any]) -> DataSection:
    config = load({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "data": dict(data)})
    return config.data


def _describe(found: CachedExamples, name: str) -> str:
    records, without = found.examples.counts.tolist()
    line = f"{name}: {records:,} records, {len(found.examples.tokens):,} tokens"
    return line + (f"; {without:,} without an answer are left out" if without else "")

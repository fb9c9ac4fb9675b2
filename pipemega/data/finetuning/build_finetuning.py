"""Build the datasets of fine-tuning data from the config section `data`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipemega.config import load
from pipemega.config.data import DataSection
from pipemega.data.file_cache import Say, user_cache_folder, writable_folder
from pipemega.data.finetuning.chat_format import ChatFormat
from pipemega.data.finetuning.example_cache import CachedExamples, cached_examples
from pipemega.data.finetuning.example_format import ExampleFormat, InstructionFormat, TextFormat
from pipemega.data.finetuning.finetuning_dataset import ExampleSampling, FineTuningDataset
from pipemega.data.finetuning.record_files import RecordObjects, Records, find_records
from pipemega.data.load_tokenizer import load_tokenizer
from pipemega.data.samples import SPLITS, split_ranges
from pipemega.data.tokenizer import Tokenizer
from pipemega.errors import ConfigError, DataError
from pipemega.printing import counted


class Reporting(NamedTuple):
    """Function that takes log lines, and whether to show a progress bar."""

    say: Say | None = None
    progress: bool = False


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
        seed: of the order in which examples are packed.
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
    builder = _Builder(section, seq_length, seed, tokenizer, Reporting(say, progress))
    found = builder.examples(source)
    return builder.dataset(found, "train", np.arange(len(found.examples.offsets) - 1))


class FineTuningData(NamedTuple):
    """The datasets of a run, their tokenizer, and lines that describe them."""

    splits: dict[str, FineTuningDataset | None]
    tokenizer: Tokenizer
    description: tuple[str, ...]


def build_finetuning(
    section: DataSection,
    wanted: Mapping[str, int | None],
    *,
    seq_length: int,
    seed: int,
    reporting: Reporting,
) -> FineTuningData:
    """Return the datasets of `data.path` and `data.valid_path`; every rank calls it.

    Args:
        section: the config section `data`, with a format.
        wanted: split -> number of samples; 0: no dataset.

    Raises:
        ConfigError, DataError: the section or a record is not valid.
    """
    if section.path is None:
        raise ConfigError(
            f"data.format is {section.format!r}, but data.path names no records: set it to files "
            "of JSON lines or parquet"
        )
    tokenizer = _tokenizer_of(section)
    builder = _Builder(section, seq_length, seed, tokenizer, reporting)
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
        if wanted[name] == 0:
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
    return FineTuningData(splits, tokenizer, tuple(lines))


class _Builder(NamedTuple):
    section: DataSection
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    reporting: Reporting

    def examples(self, records: Records) -> CachedExamples:
        say, progress = self.reporting
        return cached_examples(records, self._format(), self._folder(), say=say, progress=progress)

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
        folder, say = self._folder(), self.reporting.say
        return FineTuningDataset(source, name, chosen, sampling, folder, say)

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

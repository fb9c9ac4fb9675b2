"""Build the datasets of a run from the config section `data`."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Literal, Protocol

from pipemega.config.sections.data_section import DataSection, TokenFiles
from pipemega.data.tokens.blending import SURPLUS, BlendedDataset, normalized, sizes_of_parts
from pipemega.data.tokens.corpus import prefix_of
from pipemega.data.tokens.data_files import KINDS, corpus_prefix, find_tokenizer, token_prefixes
from pipemega.data.tokens.generated_data import BigramLoss, MockDataset, bigram_loss
from pipemega.data.tokens.gpt_dataset import (
    SPLITS,
    GPTDataset,
    SampleFormat,
    Split,
    index_folder,
    split_ranges,
)
from pipemega.data.tokens.prepare import PrepareOptions, prepare
from pipemega.data.tokens.token_files import IndexedDataset
from pipemega.data.tokens.tokenizers import Tokenizer
from pipemega.errors import ConfigError, DataError
from pipemega.lazy_imports import load_name
from pipemega.storage.build_once import Say, user_cache_folder, writable_folder


class SplitDataset(Protocol):
    """The dataset of one split, of any kind of data."""

    already_shuffled: bool

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    Attributes:
        train, valid, test: None if no samples were requested.
        vocab_size: vocabulary size of the model; None: samples are not tokens.
        tokenizer: None if the data has no tokenizer.
        description: lines that say what is read, its size and the number of epochs.
    """

    train: SplitDataset | None
    valid: SplitDataset | None
    test: SplitDataset | None
    vocab_size: int | None
    tokenizer: Tokenizer | None
    description: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify the training data and its order."""
        return self.train.fingerprint if self.train is not None else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of images; empty for other data."""
        return getattr(self.train or self.valid or self.test, "classes", ())

    def bigram(self) -> BigramLoss | None:
        """Return the bigram model's loss on the validation tokens.

        None unless both splits come from one pair of token files.
        """
        if not (isinstance(self.train, GPTDataset) and isinstance(self.valid, GPTDataset)):
            return None
        assert self.vocab_size is not None, "both are token files"
        return bigram_loss(self.train.split_tokens(), self.valid.split_tokens(), self.vocab_size)


@dataclass(frozen=True)
class DataRequest:
    """What a run needs from its data.

    Attributes:
        seq_length: number of tokens of a sample.
        seed: seed of the order of documents and samples.
        train_samples, valid_samples, test_samples: required numbers; 0: no dataset; None: one
            epoch.
        vocab_size: vocabulary size of the model; "auto": the tokenizer's vocabulary size.
        keep_partial: read all tokens: the last sample of a split may be padded.
    """

    seq_length: int
    seed: int
    train_samples: int | None
    valid_samples: int | None = 0
    test_samples: int | None = 0
    vocab_size: int | Literal["auto"] = "auto"
    keep_partial: bool = False

    @property
    def samples(self) -> dict[str, int | None]:
        """Split name -> number of samples."""
        counts = (self.train_samples, self.valid_samples, self.test_samples)
        return dict(zip(SPLITS, counts, strict=True))


def build_datasets(
    section: DataSection,
    request: DataRequest,
    *,
    say: Say | None = None,
    progress: bool = False,
    deadline_seconds: float = 3600.0,
) -> Datasets:
    """Prepare, open, split and index the data of `section`; every rank calls it with equal values.

    Ranks do not communicate: one rank per file system builds, the others wait for its files.

    Args:
        section: the config section `data`.
        request: lengths, numbers of samples, seed and vocabulary size.
        say, progress: on one rank: function that takes log lines, and whether to show a bar.
        deadline_seconds: maximum wait for another rank that prepares text.

    Raises:
        ConfigError: `section` names no data, or weights without a number of samples.
        DataError: files, tokens or splits are invalid.
    """
    if section.format is not None:
        found: Datasets = load_name(KINDS["format"].build)(section, request, say, progress)
        return found
    if not (section.corpus or section.keyed_token_files or section.mock):
        raise ConfigError(
            "the config names no data: set data.corpus (text; 'python-stdlib' needs no download), "
            "data.data_path (token files), data.format and data.path (records to fine-tune on), "
            "data.images (with a model of images) or data.mock"
        )
    if section.mock:
        return _build_mock(section, request)
    lines: list[str] = []
    if section.corpus:
        prefix, line = _prepare_corpus(section, say, progress, deadline_seconds)
        prefixes = [prefix]
        lines.append(line)
    else:
        prefixes = token_prefixes(section)
    tokenizer = find_tokenizer(prefixes, section.tokenizer, section.eod_id)
    sample_format = _sample_format(section, request, tokenizer, prefixes[0])
    files = {prefix: IndexedDataset(prefix) for prefix in prefixes}
    cache = Path(section.cache_path).expanduser() if section.cache_path else None
    builder = _SplitBuilder(section, files, sample_format, request.seed, cache, say)
    splits = {name: builder.build(name, number) for name, number in request.samples.items()}
    lines += [dataset.describe() for dataset in splits.values() if dataset is not None]
    return Datasets(
        **splits,
        vocab_size=sample_format.vocab_size,
        tokenizer=tokenizer,
        description=tuple("\n".join(lines).splitlines()),
    )


def _sample_format(
    section: DataSection, request: DataRequest, tokenizer: Tokenizer | None, prefix: Path
) -> SampleFormat:
    return SampleFormat(
        seq_length=request.seq_length,
        vocab_size=vocabulary_size(request.vocab_size, tokenizer, prefix),
        eod=_end_of_document(section, tokenizer, prefix),
        eod_mask_loss=section.eod_mask_loss,
        reset_position_ids=section.reset_position_ids,
        reset_attention_mask=section.reset_attention_mask,
        keep_partial=request.keep_partial,
    )


def _end_of_document(section: DataSection, tokenizer: Tokenizer | None, prefix: Path) -> int | None:
    """Return the id that ends a document: the tokenizer's, or `data.eod_id`; None: unknown."""
    if tokenizer is not None:
        return tokenizer.eod
    if isinstance(section.eod_id, str):
        raise DataError(
            f"data.eod_id is the text {section.eod_id!r}, but {prefix} has no tokenizer next to "
            "it: set data.eod_id to the id, or data.tokenizer"
        )
    return section.eod_id


def _build_mock(section: DataSection, request: DataRequest) -> Datasets:
    size = section.vocab_size if request.vocab_size == "auto" else request.vocab_size
    sample_format = SampleFormat(
        request.seq_length,
        size,
        eod_mask_loss=section.eod_mask_loss,
        reset_position_ids=section.reset_position_ids,
        reset_attention_mask=section.reset_attention_mask,
    )
    splits = {
        name: None if number == 0 else MockDataset(name, sample_format, number, request.seed)
        for name, number in request.samples.items()
    }
    return Datasets(
        **splits,
        vocab_size=size,
        tokenizer=None,
        description=tuple(each.describe() for each in splits.values() if each is not None),
    )


def _prepare_corpus(
    section: DataSection, say: Say | None, progress: bool, deadline_seconds: float
) -> tuple[Path, str]:
    """Prepare `section.corpus` in the cache folder; return the prefix and a line for the log."""
    assert section.corpus, "checked by the caller"
    corpus, prefix = corpus_prefix(section)
    writable_folder(prefix.parents[2], prefix.parents[2])
    prepared = prepare(
        section.corpus,
        prefix,
        PrepareOptions(
            tokenizer=section.tokenizer, vocab_size=section.vocab_size, eod=section.eod_id
        ),
        say=say,
        progress=progress,
        deadline_seconds=deadline_seconds,
    )
    return prefix, f"corpus {corpus.name}: {prepared.describe()}, kept in {prefix.parent}"


def vocabulary_size(
    requested: int | Literal["auto"], tokenizer: Tokenizer | None, prefix: Path | str
) -> int:
    """Return the vocabulary size of the model: `requested`, or the tokenizer's.

    Raises:
        DataError: it is smaller than the tokenizer's, or unknown.
    """
    own = None if tokenizer is None else tokenizer.vocab_size
    if requested == "auto":
        if own is None:
            raise DataError(
                f"model.vocab_size is 'auto', but {prefix} has no tokenizer next to it: set "
                "model.vocab_size or data.tokenizer"
            )
        return own
    if own is not None and requested < own:
        raise DataError(
            f"model.vocab_size is {requested}, but the tokenizer of {prefix} has {own} tokens: "
            f"make it at least {own}, or 'auto'"
        )
    return requested


# Split -> what sets its number of samples.
_KEYS_OF_SAMPLES = {
    "train": "training.train_steps in place of training.epochs",
    "valid": "training.eval_steps",
    "test": "test_samples of the DataRequest",
}


@dataclass(frozen=True)
class _SplitBuilder:
    """Builds the dataset of each split.

    Attributes:
        files: all token files, by prefix.
    """

    section: DataSection
    files: Mapping[Path, IndexedDataset]
    format: SampleFormat
    seed: int
    cache: Path | None
    say: Say | None

    def build(self, name: str, num_samples: int | None) -> GPTDataset | BlendedDataset | None:
        """Return the dataset of a split; None if it needs no samples, or has no data.

        Raises:
            ConfigError: there is no training data, or the number of samples of a blend.
        """
        if num_samples == 0:
            return None
        section = self.section
        if name not in section.splits:
            if name == "train":
                raise ConfigError(f"data.split is {section.split!r}, which leaves no training data")
            return None
        parts = section.token_files(name)
        if section.corpus:
            parts = tuple(TokenFiles(None, str(prefix)) for prefix in self.files)
        weights = [part.weight for part in parts if part.weight is not None] or None
        # Megatron ignores the weight of the only files of a split that has its own.
        if len(parts) == 1 and (weights is None or section.train_data_path):
            return self._part(parts[0], name, num_samples)
        sizes: list[int | None] = [None] * len(parts)
        total = num_samples
        if weights is not None:
            if num_samples is None:
                raise ConfigError(
                    f"data.{self._key(name)} has weights, so the number of {name} samples must be "
                    f"given: set {_KEYS_OF_SAMPLES[name]}, or remove the weights"
                )
            # Normalised twice, as in Megatron, to get the same last bits.
            weights = normalized(weights).tolist()
            sizes = [*sizes_of_parts(weights, num_samples, SURPLUS)]
            total = sum(sizes_of_parts(weights, num_samples))
        datasets = [self._part(*each) for each in zip(parts, repeat(name), sizes)]
        folder = (
            writable_folder(index_folder(datasets[0].data.prefix), user_cache_folder() / "blends")
            if self.cache is None
            else self.cache
        )
        return BlendedDataset(datasets, weights, total, cache=folder, say=self.say)

    def _key(self, name: str) -> str:
        return f"{name}_data_path" if self.section.train_data_path else "data_path"

    def _part(self, part: TokenFiles, name: str, num_samples: int | None) -> GPTDataset:
        data = self.files[prefix_of(part.prefix)]
        split = Split(name, split_ranges(self.section.split_weights, len(data))[name])
        if self.section.train_data_path:
            start, end = part.documents or (0.0, 1.0)
            sequences = range(round(start * len(data)), round(end * len(data)))
            split = Split(name, sequences, f"data.{self._key(name)}")
        return GPTDataset(
            data,
            split,
            sample_format=self.format,
            num_samples=num_samples,
            seed=self.seed,
            cache=self.cache,
            say=self.say,
        )

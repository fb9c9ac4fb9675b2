"""From the configuration's data section to the datasets of a run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pipemega.config.data import DataSection
from pipemega.data.bigram import BigramLoss, bigram_loss
from pipemega.data.blending import SURPLUS, BlendedDataset, normalized, sizes_of_parts
from pipemega.data.caching import Say, digest_of, user_cache_folder, writable_folder
from pipemega.data.corpus import find_corpus
from pipemega.data.gpt_dataset import GPTDataset, SampleFormat
from pipemega.data.indexed import IndexedDataset, prefix_of
from pipemega.data.mock import MockDataset
from pipemega.data.prepare import (
    Prepared,
    digest_of_tokenizer,
    prepare,
    read_manifest,
    tokenizer_of,
)
from pipemega.data.samples import SPLITS, index_folder, split_ranges
from pipemega.data.tokenizer import TextTokenizer
from pipemega.errors import ConfigError, DataError

AnyDataset: TypeAlias = GPTDataset | BlendedDataset | MockDataset


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    Attributes:
        train, valid, test: None where no samples were asked for.
        vocab_size: what the model must know.
        tokenizer: for text; None when the data came without one.
        description: lines that say what is read, how much, and how often.
    """

    train: AnyDataset | None
    valid: AnyDataset | None
    test: AnyDataset | None
    vocab_size: int
    tokenizer: TextTokenizer | None
    description: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """32 hex digits for the training data and its order."""
        return self.train.fingerprint if self.train is not None else ""

    def bigram(self) -> BigramLoss | None:
        """The bigram model's loss on the validation tokens; None unless both splits are of one
        pair of token files."""
        if not (isinstance(self.train, GPTDataset) and isinstance(self.valid, GPTDataset)):
            return None
        return bigram_loss(self.train.split_tokens(), self.valid.split_tokens(), self.vocab_size)


@dataclass(frozen=True)
class Blend:
    """The token files to read, and their weights if any were given."""

    prefixes: tuple[Path, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def of(cls, pairs: tuple[tuple[float | None, str], ...]) -> "Blend":
        """From `DataSection.blend`: (weight or None, prefix) for each."""
        weights = tuple(weight for weight, _ in pairs if weight is not None)
        return cls(tuple(prefix_of(prefix) for _, prefix in pairs), weights or None)


def build_datasets(
    section: DataSection,
    *,
    seq_length: int,
    seed: int,
    train_samples: int | None,
    valid_samples: int | None = 0,
    test_samples: int | None = 0,
    vocab_size: int | Literal["auto"] = "auto",
    say: Say | None = None,
    progress: bool = False,
    deadline_seconds: float = 3600.0,
) -> Datasets:
    """Prepare, open, split and index what `section` names; every rank calls it with equal values.

    Ranks need not speak to each other: what one builds, the others of its file system wait for.

    Args:
        section: the configuration's data section.
        seq_length: tokens of a sample.
        seed: of the order of documents and samples.
        train_samples, valid_samples, test_samples: how many are needed; 0: no such dataset;
            None: one epoch.
        vocab_size: the model's; "auto" takes the tokenizer's.
        say, progress: on one rank: takes lines, shows a bar, while text is prepared.
        deadline_seconds: how long to wait for another rank that prepares text.

    Raises:
        ConfigError: `section` names no data, or weights without a number of samples.
        DataError: files, tokens or splits are not what they must be.
    """
    if not (section.corpus or section.data_path or section.mock):
        raise ConfigError(
            "there is nothing to read: give data.corpus (text; 'python-stdlib' is always there), "
            "data.data_path (token files) or data.mock"
        )
    samples = dict(zip(SPLITS, (train_samples, valid_samples, test_samples), strict=True))
    if section.mock:
        return _build_mock(section, seq_length, seed, samples, vocab_size)
    lines: list[str] = []
    if section.corpus:
        prefix, line = _prepare_corpus(section, say, progress, deadline_seconds)
        blend = Blend((prefix,))
        lines.append(line)
    else:
        blend = Blend.of(section.blend)
    origin = _Origin.find(blend.prefixes, section.tokenizer)
    sample_format = SampleFormat(
        seq_length=seq_length,
        vocab_size=origin.vocabulary(vocab_size),
        eod=origin.eod,
        eod_mask_loss=section.eod_mask_loss,
        reset_position_ids=section.reset_position_ids,
    )
    cache = Path(section.cache_path).expanduser() if section.cache_path else None
    builder = _SplitBuilder(blend, section.split_weights, sample_format, seed, cache, say)
    splits = {name: builder.build(name, number) for name, number in samples.items()}
    lines += [dataset.describe() for dataset in splits.values() if dataset is not None]
    return Datasets(
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        vocab_size=sample_format.vocab_size,
        tokenizer=origin.tokenizer,
        description=tuple("\n".join(lines).splitlines()),
    )


def _build_mock(
    section: DataSection,
    seq_length: int,
    seed: int,
    samples: dict[str, int | None],
    vocab_size: int | Literal["auto"],
) -> Datasets:
    size = section.vocab_size if vocab_size == "auto" else vocab_size
    sample_format = SampleFormat(
        seq_length, size, None, section.eod_mask_loss, section.reset_position_ids
    )
    splits = {
        name: None if number == 0 else MockDataset(name, sample_format, number, seed)
        for name, number in samples.items()
    }
    return Datasets(
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        vocab_size=size,
        tokenizer=None,
        description=tuple(each.describe() for each in splits.values() if each is not None),
    )


def _prepare_corpus(
    section: DataSection, say: Say | None, progress: bool, deadline_seconds: float
) -> tuple[Path, str]:
    """Token files of `section.corpus` in the cache folder, and a line about them."""
    assert section.corpus, "the caller has looked"
    corpus = find_corpus(section.corpus)
    given = section.tokenizer
    key = digest_of(
        {
            "corpus": corpus.identity,
            "tokenizer": section.vocab_size
            if given is None
            else digest_of_tokenizer(TextTokenizer.load(given)),
        }
    )
    label = re.sub(r"[^A-Za-z0-9]+", "-", Path(corpus.name).name).strip("-")[:40] or "corpus"
    root = Path(section.cache_path).expanduser() if section.cache_path else user_cache_folder()
    prefix = writable_folder(root, root) / "corpora" / f"{label}-{key[:16]}" / "text"
    prepared = prepare(
        section.corpus,
        prefix,
        tokenizer=given,
        vocab_size=section.vocab_size,
        say=say,
        progress=progress,
        deadline_seconds=deadline_seconds,
    )
    return prefix, f"corpus {corpus.name}: {prepared.describe()}, kept in {prefix.parent}"


@dataclass(frozen=True)
class _Origin:
    """What is known of how the token files were made."""

    prefixes: tuple[Path, ...]
    tokenizer: TextTokenizer | None
    manifests: tuple[Prepared | None, ...]

    @classmethod
    def find(cls, prefixes: tuple[Path, ...], named: str | None) -> "_Origin":
        """Read the manifests; load the tokenizer that was named, or that lies beside the files.

        Raises:
            DataError: files that were made with different tokenizers.
        """
        manifests = tuple(read_manifest(prefix) for prefix in prefixes)
        beside = tokenizer_of(prefixes[0])
        tokenizer = None
        if named is not None:
            tokenizer = TextTokenizer.load(named)
        elif manifests[0] is not None and beside.is_file():
            tokenizer = TextTokenizer.load(beside)
        origin = cls(prefixes, tokenizer, manifests)
        origin._refuse_other_tokenizers(named or str(beside))
        return origin

    @property
    def eod(self) -> int | None:
        """The token that ends a document."""
        return None if self.tokenizer is None else self.tokenizer.eod

    def vocabulary(self, asked: int | Literal["auto"]) -> int:
        """The model's vocabulary: as asked, or the tokenizer's.

        Raises:
            DataError: smaller than the tokenizer's, or nothing says what it is.
        """
        own = None if self.tokenizer is None else self.tokenizer.vocab_size
        if asked == "auto":
            if own is None:
                raise DataError(
                    f"model.vocab_size is 'auto', and nothing beside {self.prefixes[0]} says what "
                    "it is: set model.vocab_size or data.tokenizer"
                )
            return own
        if own is not None and asked < own:
            raise DataError(
                f"model.vocab_size is {asked}, and the tokenizer of {self.prefixes[0]} has "
                f"{own} tokens: make it at least {own}, or 'auto'"
            )
        return asked

    def _refuse_other_tokenizers(self, named: str) -> None:
        if self.tokenizer is None:
            return
        digest = digest_of_tokenizer(self.tokenizer)
        for prefix, manifest in zip(self.prefixes, self.manifests, strict=True):
            if manifest is not None and manifest.tokenizer_digest != digest:
                raise DataError(
                    f"{prefix} was not made with the tokenizer {named}, so its token ids mean "
                    "other text: name the tokenizer that made it with data.tokenizer, or prepare "
                    "the text again"
                )


class _SplitBuilder:
    """Builds the dataset of one split after the other, over the same files."""

    def __init__(
        self,
        blend: Blend,
        split: tuple[float, float, float],
        sample_format: SampleFormat,
        seed: int,
        cache: Path | None,
        say: Say | None,
    ) -> None:
        self.blend = blend
        self.files = [IndexedDataset(prefix) for prefix in blend.prefixes]
        self.ranges = [split_ranges(split, len(data)) for data in self.files]
        self.format = sample_format
        self.seed = seed
        self.cache = cache
        self.say = say

    def build(self, name: str, num_samples: int | None) -> GPTDataset | BlendedDataset | None:
        """The split's dataset; None when it needs no samples."""
        if num_samples == 0:
            return None
        weights = self.blend.weights
        if len(self.files) == 1 and weights is None:
            return self._part(0, name, num_samples)
        sizes: list[int | None] = [None] * len(self.files)
        total = num_samples
        if weights is not None:
            if num_samples is None:
                raise ConfigError(
                    f"data.data_path gives weights, so the number of {name} samples must be known"
                )
            # Twice normalised, as in Megatron, whose last bits these are.
            weights = tuple(normalized(weights).tolist())
            sizes = [*sizes_of_parts(weights, num_samples, SURPLUS)]
            total = sum(sizes_of_parts(weights, num_samples))
        parts = [self._part(i, name, size) for i, size in enumerate(sizes)]
        folder = (
            writable_folder(index_folder(self.files[0].prefix), user_cache_folder() / "blends")
            if self.cache is None
            else self.cache
        )
        return BlendedDataset(parts, weights, total, cache=folder, say=self.say)

    def _part(self, place: int, name: str, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            self.files[place],
            self.ranges[place][name],
            name=name,
            sample_format=self.format,
            num_samples=num_samples,
            seed=self.seed,
            cache=self.cache,
            say=self.say,
        )

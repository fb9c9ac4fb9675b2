"""`data`: the training data.

`data.images` and `data.transforms`: images with classes, and how they become samples.

The keys that name token files: one prefix, several, or a blend in one of Megatron's forms.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, ValidationInfo, field_validator

from pipemega.config.declarations import (
    Count,
    Name,
    NotNegative,
    Section,
    Whole,
    own,
    rule,
    section,
)
from pipemega.printing import counted

ImageSource = Literal["cifar10", "cifar100", "folder", "digits", "glyphs"]

# Sources that are files, in `data.path`.
SOURCES_OF_FILES = ("cifar10", "cifar100", "folder")

# Sources whose validation images `data.split` cuts off.
_CUT_SOURCES = ("folder", "digits", "glyphs")

_PartOfSide = Annotated[float, Field(gt=0, le=1)]
_Spread = Annotated[float, Field(gt=0)]

_SCALES = (0.08, 1.0)


class ImageTransforms(Section):
    """How images become samples of the size that the model has.

    An image is scaled until its shorter side has the model's size, and its centre is cut out. The
    random changes are for training images only; they are drawn from the seed, the epoch and the
    number of the sample, so that every mesh sees the same.
    """

    random_crop: Whole = own(
        0, "Pixels that are added to each side of a training image before a random part is cut out."
    )
    random_resized_crop: bool | tuple[_PartOfSide, _PartOfSide] = own(
        False,
        "Cut a random part out of a training image and scale it: true for parts of "
        f"{_SCALES[0]:g} to {_SCALES[1]:g} of the area, or [smallest, largest]; needs torchvision.",
    )
    flip: bool = own(False, "Mirror training images left to right, half of them.")
    auto_augment: Literal["imagenet", "cifar10", "svhn"] | None = own(
        None, "AutoAugment's policy for this data set, for training images; needs torchvision."
    )
    mixup: NotNegative = own(
        0.0,
        "Mix each training image with another one, with a share from Beta(mixup, mixup); the label "
        "is then a share of each class; 0: off.",
    )
    center_crop: _PartOfSide = own(
        1.0,
        "Size of the centre that is cut out, divided by the shorter side of the scaled image; "
        "0.875: a model of 224 pixels gets the centre of an image of 256.",
    )
    mean: tuple[float, ...] | None = own(
        None,
        "Mean of each channel, subtracted from values of 0 to 1; null: the mean of the data set; "
        "for a folder, ImageNet's mean.",
    )
    std: tuple[_Spread, ...] | None = own(
        None,
        "Divisor of each channel after `mean` is subtracted; null: the standard deviation of the "
        "data set; for a folder, ImageNet's.",
    )

    @property
    def scales(self) -> tuple[float, float] | None:
        """Smallest and largest area of `random_resized_crop`; None: it is off."""
        given = self.random_resized_crop
        return given if isinstance(given, tuple) else _SCALES if given else None

    @property
    def is_random(self) -> bool:
        """Whether training images have random changes."""
        return bool(self.random_crop or self.scales or self.flip or self.auto_augment or self.mixup)

    @rule("mean", "std")
    def _mean_and_std(self) -> Iterator[str]:
        if (self.mean is None) != (self.std is None):
            here, there = ("mean", "std") if self.std is None else ("std", "mean")
            yield f"data.transforms.{here} is set without data.transforms.{there}: set both"
        elif self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            yield (
                f"data.transforms.mean has {counted(len(self.mean), 'number')}, and "
                f"data.transforms.std has {len(self.std)}: give both one number per channel"
            )

    @rule("random_crop", "random_resized_crop")
    def _one_crop(self) -> Iterator[str]:
        if self.random_crop and self.scales:
            yield (
                "data.transforms.random_crop and data.transforms.random_resized_crop are set: keep "
                "one"
            )
        if self.scales and self.scales[0] > self.scales[1]:
            yield (
                f"data.transforms.random_resized_crop is [{self.scales[0]:g}, {self.scales[1]:g}]: "
                "give the smallest area first"
            )


def errors_of_images(data: Any, default_split: str) -> Iterator[str]:
    """Yield errors between `data.images` and other keys of the section `data`."""
    kinds = ", ".join(repr(kind) for kind in get_args(ImageSource))
    if data.images is None:
        if data.transforms != ImageTransforms():
            yield f"data.transforms needs data.images: set it to one of {kinds}"
        return
    for key in ("path", "valid_path"):
        value = getattr(data, key)
        if value is not None and data.images not in SOURCES_OF_FILES:
            yield f"data.{key} is set, and data.images {data.images!r} needs no files: remove one"
        elif isinstance(value, tuple):
            yield f"data.{key} of data.images must be one folder, not a list of {len(value)}"
    if data.valid_path is not None and data.images.startswith("cifar"):
        yield (
            f"data.valid_path is set, and the files of data.images {data.images!r} contain the "
            "validation images: remove it"
        )
    if data.split != default_split and (data.images not in _CUT_SOURCES or data.valid_path):
        yield (
            f"data.split ({data.split!r}) is set, and the validation images are those of "
            f"{'data.valid_path' if data.valid_path else data.images}: remove data.split"
        )
    if data.format is not None:
        yield f"data.format {data.format!r} is for texts, and data.images is set: keep one"


# A key's value: text, or a list of prefixes and weights.
DataPaths = str | tuple[str | float, ...]

# "NAME: WEIGHT START:END PREFIX, ...", the form of BigScience's Megatron-DeepSpeed.
_GROUP = re.compile(r"\s*(?:[^\s:,]+\s*:\s+)?([^\s,]+\s+[\d.]+:[\d.]+\s+\S.*)", re.DOTALL)


class TokenFiles(NamedTuple):
    """One pair of token files of a blend.

    Args:
        weight: its share of the samples; None: by its number of samples.
        prefix: common prefix of `.bin` and `.idx`.
        documents: start and end of the part that is read, as shares of its sequences; None: the
            part that `data.split` gives.
    """

    weight: float | None
    prefix: str
    documents: tuple[float, float] | None = None


def parse_data_paths(key: str, given: DataPaths) -> tuple[TokenFiles, ...]:
    """Convert the value of a key to the files that it names.

    "A", "0.3 A 0.7 B", "A B", ["A", "B"], [0.3, "A", 0.7, "B"], ["0.3", "A", "0.7", "B"] and
    "NAME: 0.3 0:0.9 A, 0.7 0:1 B". Text with spaces is one prefix, unless its words are weights
    and prefixes, or prefixes of files that exist.

    Args:
        key: the name of the key, for messages.

    Raises:
        ValueError: it has none of these forms, or a weight is not a positive number.
    """
    parts = (given,) if isinstance(given, str) else given
    groups = [match[1] for part in parts if isinstance(part, str) and (match := _group(part))]
    if groups:
        if len(parts) > 1:
            raise ValueError(
                f"{key} has {len(parts)} groups of token files, and a split is one group: keep "
                f"one; 'pipemega evaluate --data' evaluates on further files"
            )
        files = tuple(_ranges(key, groups[0]))
    else:
        files = _pairs(key, _words(parts[0]) if len(parts) == 1 else list(parts), given)
    _check_weights(key, [part.weight for part in files if part.weight is not None])
    return files


def _group(text: str) -> re.Match[str] | None:
    return _GROUP.fullmatch(text)


def _ranges(key: str, group: str) -> Iterator[TokenFiles]:
    for part in group.split(","):
        try:
            weight, documents, prefix = part.split()
            start, end = map(float, documents.split(":"))
            found = TokenFiles(float(weight), prefix, (start, end))
        except ValueError:
            found = None
        if found is None or not 0 <= start < end <= 1:
            raise ValueError(
                f"{key}: {part.strip()!r} must be WEIGHT START:END PREFIX with 0 <= START < END "
                "<= 1, such as '0.3 0:0.9 data/wiki'; the parts are separated by commas"
            )
        yield found


def _words(text: str | float) -> list[str | float]:
    if not isinstance(text, str):
        return [text]
    words: list[str | float] = [*text.split()]
    is_weighted = len(words) % 2 == 0 and all(_number(word) is not None for word in words[::2])
    # A prefix may contain spaces.
    several = is_weighted or (len(words) > 1 and all(_exists(str(word)) for word in words))
    return words if several else [text.strip()]


def _pairs(key: str, words: Sequence[str | float], given: DataPaths) -> tuple[TokenFiles, ...]:
    words = [word.strip() if isinstance(word, str) else word for word in words]
    weights = [_number(word) for word in words[::2]]
    prefixes = [str(word) for word in words[1::2] if isinstance(word, str)]
    if len(words) == 2 * len(prefixes) and None not in weights and words:
        return tuple(map(TokenFiles, weights, prefixes))
    is_text = all(isinstance(word, str) and word for word in words)
    # Megatron too decides by the words at the places of weights.
    if not words or not is_text or (len(words) % 2 == 0 and any(w is not None for w in weights)):
        shown = given if isinstance(given, str) else list(given)
        raise ValueError(
            f"{key} must be a prefix, a list of prefixes, or a list of weight, prefix, weight, "
            f"prefix, ... (or such words in one text), not {shown!r}"
        )
    return tuple(TokenFiles(None, str(word)) for word in words)


def _check_weights(key: str, weights: Sequence[float]) -> None:
    # nan and inf fail this comparison.
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(
            f"the weights in {key} {list(weights)} must be positive numbers; remove a prefix that "
            "should not be read"
        )


def _number(word: str | float) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _exists(prefix: str) -> bool:
    return Path(re.sub(r"\.(bin|idx)$", "", prefix) + ".idx").expanduser().is_file()


# 256 bytes and the end-of-document token.
_SMALLEST_VOCABULARY = 257

_SPLIT = "969,30,1"
_SPLITS = ("train", "valid", "test")

# Keys that name token files.
PATH_KEYS = ("data_path", *(f"{name}_data_path" for name in _SPLITS))

# Keys that only records to fine-tune on have.
RECORD_KEYS = (
    "format", "path", "valid_path", "key", "prompt_template", "chat_template", "packing",
    "truncation", "pad_to_multiple_of",
)  # fmt: skip


class DataSection(Section):
    """The training data: text (`corpus`), token files (`data_path`), examples to fine-tune on
    (`format` and `path`), images with classes (`images`) or random tokens (`mock`)."""

    corpus: Name | tuple[Name, ...] | None = own(
        None, "Text files, folders, globs (tokenized once), or `python-stdlib`: Python's sources."
    )
    data_path: Name | tuple[Name | float, ...] | None = own(
        None,
        "Megatron token files: a prefix, a list of prefixes, or a list of weight, prefix, weight, "
        "...; text such as `0.3 A 0.7 B` too.",
    )
    train_data_path: Name | tuple[Name | float, ...] | None = own(
        None,
        "Instead of `data_path` and `split`: the token files of the training set, in the same "
        "forms, or as `NAME: WEIGHT START:END PREFIX, ...`.",
    )
    valid_data_path: Name | tuple[Name | float, ...] | None = own(
        None, "Token files of the validation set; only with `train_data_path`."
    )
    test_data_path: Name | tuple[Name | float, ...] | None = own(
        None, "Token files of the test set; only with `train_data_path`."
    )
    format: Literal["chat", "instruction", "text"] | None = own(
        None,
        "Fine-tune on the records of `path`: conversations, prompts with responses, or texts. The "
        "loss counts answers only (texts: all tokens).",
    )
    images: ImageSource | None = own(
        None,
        "Images with a class each: the files of CIFAR-10 or CIFAR-100 in `path`; a folder with a "
        "sub-folder per class; or, without files, `glyphs` (digits that pipemega draws) or "
        "`digits` (the handwritten digits of scikit-learn; if it is not installed, the same as "
        "`glyphs`).",
    )
    transforms: ImageTransforms = section(
        ImageTransforms, "How the images of `images` become samples.", own=True
    )
    path: Name | tuple[Name, ...] | None = own(
        None,
        "Files of records: JSON lines or parquet; a list and globs are allowed. With `images`: the "
        "folder of the images; null: the folder that the environment variable `DATA` names.",
    )
    valid_path: Name | tuple[Name, ...] | None = own(
        None,
        "Files of validation records, or folder of validation images. null: for CIFAR, its test "
        "images; for a folder of images with a sub-folder `train`, its sub-folder `val` (or "
        "`valid`, `validation`, `test`); for all other data, a share of the data, by `split`.",
    )
    key: Name | None = own(
        None,
        "Key under which a record has its messages, response or text; null: the usual keys "
        "(docs/finetuning.md).",
    )
    prompt_template: str | None = own(
        None,
        "Prompt of an instruction, such as `Q: {question} A: `: each name is a key of the record; "
        "null: the key `prompt`, or Alpaca's template.",
    )
    chat_template: Name | None = own(
        None, "File with the chat template (Jinja); null: the template of the tokenizer."
    )
    packing: bool = own(
        True,
        "Put several records in one sample, with position ids that restart and attention within "
        "each record; false: one record per sample, padded.",
    )
    truncation: Literal["truncate", "split", "drop"] | None = own(
        None,
        "What to do with a record that is longer than `model.seq_length`: cut its end off, split "
        'it, or leave it out; null: `"split"` for texts, otherwise `"truncate"`.',
    )
    pad_to_multiple_of: Count | None = own(
        None,
        "Without packing: pad a micro-batch to its longest sample, rounded up to a multiple of "
        "this; null: to `model.seq_length`.",
    )
    mock: bool = own(False, "Use random tokens, to try a mesh or a model without data.")
    split: str = own(
        _SPLIT, "Shares of the training, validation and test sets; missing shares are 0."
    )
    dataloader_type: Literal["single", "cyclic"] | None = own(
        None,
        "Order of map-style data. `single`: the order of the dataset; `cyclic`: Megatron's random "
        "sampler, with a permutation per epoch; null: shuffled in each epoch, except the token "
        "files of this section, whose samples are shuffled already.",
    )
    data_sharding: bool = own(
        True,
        "With `cyclic`: each data rank permutes its own part of the data; false: all permute the "
        "whole data (Megatron's `--no-data-sharding`).",
    )
    tokenizer: Name | None = own(
        None,
        "A `tokenizer.json`, GPT-2's `vocab.json` (`merges.txt` beside it; for other names "
        "`VOCAB.json,MERGES.txt`), a SentencePiece `.model`, a folder of a Hugging Face tokenizer, "
        "or `tiktoken:NAME`; null: the tokenizer of the Hugging Face model, else a BPE that is "
        "trained on `corpus`.",
    )
    eod_id: Whole | Name | None = own(
        None,
        "Id (or text) of the token that ends a document; an id needs no tokenizer. null: the "
        "end-of-sequence token that the tokenizer's files name, otherwise `<|endoftext|>`.",
    )
    vocab_size: int = own(8192, "Vocabulary size of the trained BPE.", ge=_SMALLEST_VOCABULARY)
    cache_path: Name | None = own(
        None, "Folder of indices and tokenized text; null: beside the data, or the user's cache."
    )
    num_workers: Whole = own(
        0,
        "Number of worker processes that read samples of a map-style dataset; 0: none. If the "
        "dataset has `deterministic = True`, the workers are threads. All datasets of this section "
        "have this attribute, except training images with random transforms.",
    )
    prefetch: Whole = own(
        2,
        "Micro-batches to read ahead, if `num_workers` is above 0 or the dataset is deterministic.",
    )
    compare_every: Whole = own(
        100,
        "Compare what the pipeline and tensor ranks of a data rank have read, in the first three "
        "calls of `train_batch` (and of `eval_batch`), and then once per this many calls; "
        "datasets with `deterministic = True` are not compared; 0: never.",
    )
    eod_mask_loss: bool = own(False, "Mask the loss where the input is the end-of-document token.")
    reset_position_ids: bool = own(
        False,
        "Restart position ids after each end-of-document token; with `model.type` hf only together "
        "with `reset_attention_mask`.",
    )
    reset_attention_mask: bool = own(
        False,
        "Prevent attention across the documents of a sample; requires `reset_position_ids`.",
    )

    @property
    def packs(self) -> bool:
        """Whether a sample contains several records, which do not see each other."""
        return self.format is not None and self.packing

    @property
    def inputs_per_token(self) -> int:
        """Numbers per token that the layers of the GPT need: positions (1), and documents (2)."""
        if self.format is not None:
            return 2
        return self.reset_position_ids + self.reset_attention_mask

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """`split` as three shares that add up to 1."""
        numbers = _shares(self.split)
        first, second, third = (number / sum(numbers) for number in numbers)
        return first, second, third

    def token_files(self, split: str) -> tuple[TokenFiles, ...]:
        """Return the token files of a split, "train", "valid" or "test"; empty: it has none."""
        key = "data_path" if self.data_path else f"{split}_data_path"
        given: DataPaths | None = getattr(self, key)
        return parse_data_paths(f"data.{key}", given) if given else ()

    @property
    def keyed_token_files(self) -> tuple[tuple[str, str], ...]:
        """(key, prefix) of all token files, each once."""
        keys = [key for key in PATH_KEYS if getattr(self, key)]
        found = [
            (f"data.{key}", part.prefix)
            for key in keys
            for part in parse_data_paths(f"data.{key}", getattr(self, key))
        ]
        return tuple(dict.fromkeys(found))

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have data; all if the section does not tell."""
        if self.train_data_path:
            return tuple(name for name in _SPLITS if self.token_files(name))
        shares = zip(_SPLITS, self.split_weights, strict=True)
        return tuple(name for name, share in shares if share or self.mock)

    @field_validator("split")
    @classmethod
    def _three_shares(cls, split: str) -> str:
        try:
            shares = _shares(split)
        except ValueError:
            shares = []
        # nan and inf fail this comparison.
        if len(shares) != 3 or not all(0 <= s < float("inf") for s in shares) or not sum(shares):
            raise ValueError(
                f"data.split must be three shares such as '969,30,1' (training, validation, test; "
                f"missing ones are 0), not {split!r}"
            )
        return split

    @field_validator("data_path", "train_data_path", "valid_data_path", "test_data_path")
    @classmethod
    def _prefixes_or_pairs(cls, given: Any, info: ValidationInfo) -> Any:
        key = f"data.{info.field_name}"
        files = () if given is None else parse_data_paths(key, given)
        if key == "data.data_path" and any(part.documents for part in files):
            raise ValueError(
                "data.data_path cannot have START:END, because data.split divides it: give "
                "START:END in data.train_data_path and data.valid_data_path"
            )
        return given

    @rule("corpus", "data_path", "train_data_path", "mock", "images", "path")
    def _one_source(self) -> Iterator[str]:
        sources = ["corpus", "data_path", "train_data_path", "mock", "images"]
        if self.images is None:  # which `path` may belong to
            sources.append("path")
        given = [f"data.{name}" for name in sources if getattr(self, name)]
        if len(given) > 1:
            yield f"{' and '.join(given)} are set: keep one"

    @rule(*PATH_KEYS, "split")
    def _splits_have_one_source(self) -> Iterator[str]:
        others = [f"data.{key}" for key in PATH_KEYS[2:] if getattr(self, key)]
        if others and not self.train_data_path:
            yield (
                f"{' and '.join(others)} without data.train_data_path: set it too, or give all "
                "files in data.data_path, and data.split"
            )
        if self.train_data_path and self.split != _SPLIT:
            yield (
                f"data.split ({self.split!r}) divides the files of data.data_path, and "
                "data.train_data_path has its own: remove one of the two"
            )

    @rule("data_sharding", "dataloader_type")
    def _sharding_is_of_the_cyclic_order(self) -> Iterator[str]:
        if not self.data_sharding and self.dataloader_type != "cyclic":
            yield (
                "data.data_sharding false changes the order of data.dataloader_type 'cyclic' only: "
                "set data.dataloader_type to 'cyclic', or remove data.data_sharding"
            )

    @rule("reset_attention_mask", "reset_position_ids")
    def _documents_are_separated_by_positions(self) -> Iterator[str]:
        if self.reset_attention_mask and not self.reset_position_ids:
            yield (
                "data.reset_attention_mask separates documents where the position ids restart: set "
                "data.reset_position_ids to true too"
            )

    @rule("images", "transforms", "path", "valid_path", "split", "format")
    def _images_have_their_keys(self) -> Iterator[str]:
        yield from errors_of_images(self, _SPLIT)

    @rule(*RECORD_KEYS, "images")
    def _records_have_a_format(self) -> Iterator[str]:
        if self.format is not None:
            return
        own_keys = {"path", "valid_path"} if self.images is not None else set()
        keys = [name for name in RECORD_KEYS if name not in own_keys]
        given = [f"data.{name}" for name in keys if getattr(self, name) not in (None, True)]
        if given:
            yield (
                f"{' and '.join(given)} need data.format: set it to 'chat', 'instruction' or 'text'"
            )

    @rule("format", "prompt_template", "chat_template", "packing", "pad_to_multiple_of")
    def _keys_fit_the_format(self) -> Iterator[str]:
        if self.format is None:
            return
        if self.prompt_template is not None and self.format != "instruction":
            yield (
                f"data.prompt_template is for data.format 'instruction', not {self.format!r}: "
                "remove one of them"
            )
        if self.chat_template is not None and self.format != "chat":
            yield (
                f"data.chat_template is for data.format 'chat', not {self.format!r}: remove one of "
                "them"
            )
        if self.pad_to_multiple_of is not None and self.packing:
            yield (
                "data.pad_to_multiple_of is for samples that are padded: set data.packing to "
                "false, or remove it (a packed sample is padded to model.seq_length)"
            )


def _shares(split: str) -> list[float]:
    """Return the numbers of `data.split`, with zeros for missing ones."""
    numbers = [float(part) for part in re.split(r"[,/]", split)]
    return numbers + [0.0] * (3 - len(numbers))


def errors_of_padding(config: Any) -> Iterator[str]:
    """Yield errors of samples with different lengths on the mesh of a `Config`."""
    multiple, mesh, shapes = config.data.pad_to_multiple_of, config.mesh, config.pipeline.shapes
    if multiple is None:
        return
    if mesh.pipeline > 1 and shapes != "exchanged":
        yield (
            "data.pad_to_multiple_of gives micro-batches different lengths, and pipeline.shapes is "
            f"{shapes!r}: set it to 'exchanged', or remove data.pad_to_multiple_of (samples are "
            "then padded to model.seq_length)"
        )
    if mesh.sequence_parallel and multiple % mesh.tensor:
        yield (
            f"data.pad_to_multiple_of ({multiple}) must be a multiple of mesh.tensor "
            f"({mesh.tensor}), which shards the sequence"
        )


def warnings_of_evaluation(config: Any) -> Iterator[str]:
    """Yield the warning of a `Config` that evaluates, and has no validation data."""
    data, training = config.data, config.training
    if training.evaluates(training.epochs) and "valid" not in data.splits:
        why = "data.valid_data_path is not set" if data.train_data_path else "data.split has none"
        yield f"the run has no validation data, and does not evaluate: {why}"

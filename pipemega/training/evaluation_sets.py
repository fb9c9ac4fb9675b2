"""The data sets that `pipemega evaluate` reads, from the words of its command line.

Prompts as token ids, with the tokenizer of a model.

The images of a run, in the size that its model takes.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from pipemega.config import Config, load
from pipemega.config.sections.data_section import PATH_KEYS, RECORD_KEYS, DataSection
from pipemega.data.loader import is_map_style
from pipemega.data.tokens.build_datasets import DataRequest, Datasets, build_datasets
from pipemega.data.tokens.corpus import files_of, prefix_of
from pipemega.data.tokens.data_files import (
    KINDS,
    check_data_inputs,
    load_chat_tokenizer,
    run_tokenizer,
)
from pipemega.data.tokens.tokenizers import Tokenizer
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError, DataError, short_cause
from pipemega.lazy_imports import load_name
from pipemega.models.build_model import ModelContext, model_section, sample_from


def load_images(config: Config, section: DataSection, splits: Sequence[str]) -> Datasets:
    """Return the images of `section` for the model of `config`.

    Args:
        splits: the sets that are needed: "train", "valid", "test".

    Raises:
        ConfigError, DataError: the model takes no images, or as `build_images`.
    """
    shape, classes = image_shape(config), model_section(config).number_of_classes()
    found: Datasets = load_name(KINDS["images"].build)(section, shape, classes, splits)
    return found


def image_shape(config: Config) -> tuple[int, int, int]:
    """Return channels, height and width of the images that the model takes.

    Raises:
        ConfigError: it takes no images.
    """
    mesh = config.mesh
    topology = Topology(mesh.pipeline, config.smallest_data_size, mesh.tensor, mesh.expert)
    inputs, _ = sample_from(ModelContext.of(config, topology))
    if isinstance(inputs, Tensor) and inputs.dim() == 4:
        _, channels, height, width = inputs.shape
        return channels, height, width
    got = f"{list(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
    raise ConfigError(
        f"data.images gives images [samples, channels, height, width], and model.type "
        f"{model_section(config).type!r} takes {got}: set model.type to 'vit' or 'resnet', or "
        f"remove data.images",
        on_every_rank=True,
    )


def model_tokenizer(config: Config) -> tuple[str, Tokenizer]:
    """Return path and tokenizer of the run, or of the folder of a model of transformers.

    Raises:
        ConfigError: there is none; or the model takes images.
        DataError: it does not exist, or cannot be read.
    """
    if config.data.images is not None:
        raise ConfigError(
            f"the model was trained on images (data.images {config.data.images!r}): it takes no "
            "text, and has no tokenizer",
            on_every_rank=True,
        )
    try:
        found = run_tokenizer(config)
    except DataError as error:
        raise DataError(f"{error}; give --set data.tokenizer=PATH", on_every_rank=True) from error
    if found is None:
        raise ConfigError(
            "the tokenizer of the model is not known: the config names none, and there is none "
            "beside its data; give --set data.tokenizer=PATH",
            on_every_rank=True,
        )
    return found


@dataclass(frozen=True)
class PromptEncoder:
    """Text to prompts, and new tokens to text.

    Args:
        tokenizer: the tokenizer of the model.
        path: path of the tokenizer.
        chat_template: file with a chat template; None: the template of the tokenizer.
        stop: ids of the tokens that end a text.
        adds_special_tokens: the model knows texts with the tokens that its tokenizer adds to an
            example, such as one at its beginning.
    """

    tokenizer: Tokenizer
    path: str
    chat_template: str | None
    stop: frozenset[int]
    adds_special_tokens: bool

    @classmethod
    def of(cls, config: Config, stop: Sequence[str] = ()) -> "PromptEncoder":
        """Return the encoder of a model.

        Args:
            stop: texts of tokens that end a text, besides the end of a document.

        Raises:
            ConfigError, DataError: the errors of `model_tokenizer`; or a token is not in the
                vocabulary.
        """
        path, tokenizer = model_tokenizer(config)
        found = {_id_of(text, tokenizer, path) for text in stop}
        if tokenizer.eod is not None:
            found.add(tokenizer.eod)
        # Pretraining reads documents without these tokens.
        is_pretrained_here = config.model is None or config.model.type != "hf"
        return cls(
            tokenizer, path, config.data.chat_template, frozenset(found), not is_pretrained_here
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt; an empty one begins a document.

        Raises:
            ConfigError: the prompt is empty, and no token begins a document.
        """
        encode = (
            self.tokenizer.encode_example if self.adds_special_tokens else self.tokenizer.encode
        )
        ids = encode(text)
        if not ids and self.tokenizer.eod is not None:
            ids = [self.tokenizer.eod]
        if not ids:
            raise ConfigError(
                f"the prompt {text!r} has no tokens, and the tokenizer {self.path} has no "
                f"end-of-document token to begin with: write a prompt, or set data.eod_id",
                on_every_rank=True,
            )
        return ids

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """Return the ids of a conversation, up to the beginning of the answer to `text`.

        Raises:
            DataError: the tokenizer is not one of transformers, or has no chat template.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        ids = self.chat_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return [int(number) for number in ids]

    @cached_property
    def chat_tokenizer(self) -> Any:
        """The tokenizer of transformers, with a chat template."""
        return load_chat_tokenizer(self.path, self.chat_template)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of new tokens."""
        return self.tokenizer.decode(ids)


def _id_of(text: str, tokenizer: Tokenizer, path: str) -> int:
    """Return the id of a token as the vocabulary writes it, or of a text that is one token."""
    number = tokenizer.id_of(text)
    ids = tokenizer.encode(text) if number is None else [number]
    if len(ids) != 1:
        raise ConfigError(
            f"--stop {text!r} is {len(ids)} tokens of {path}, and must be one", on_every_rank=True
        )
    return ids[0]


SplitName = Literal["train", "valid", "test"]

FormatName = Literal["corpus", "chat", "instruction", "text"]
FORMATS = get_args(FormatName)

# Keys that name the source of the data, or a part of it.
_SOURCES = ("corpus", *PATH_KEYS, "mock", "path", "valid_path", "split")
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_OBJECT = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class EvaluationSet:
    """One data set.

    Args:
        name: name of the set in the results.
        data: dataset of (inputs, labels).
    """

    name: str
    data: Any


class EvaluationSets:
    """Opens data sets for one model.

    Args:
        config: the config of the model; its section `data` says how text becomes samples.
        vocab_size: vocabulary size of the model; None: it has no tokens.
        format_name: format of the files that are named; None: the format of the run's data.
        num_samples: largest number of samples to read of each set; a blend with weights needs it.
            None: all samples.
        say: takes log lines, on one rank.
        progress: show a progress bar, on one rank.
    """

    def __init__(
        self,
        config: Config,
        vocab_size: int | None,
        *,
        format_name: FormatName | None = None,
        num_samples: int | None = None,
        say: Callable[[str], None] | None = None,
        progress: bool = False,
    ) -> None:
        self._config, self._vocab_size, self._num_samples = config, vocab_size, num_samples
        self._format = format_name or config.data.format or "corpus"
        self._say, self._progress = say, progress

    def own(self, split: SplitName) -> EvaluationSet:
        """Return a split of the data that the model was trained with.

        Raises:
            ConfigError, DataError: the config names no data, or it cannot be read.
        """
        return self._limited(self._built(split, self._config.data, split))

    def named(self, words: Sequence[str]) -> list[EvaluationSet]:
        """Return the data sets of `[NAME=]SOURCE` each.

        SOURCE is the prefix of token files, a text file, folder or glob, or MODULE:NAME, a dataset
        or a function that returns one.

        Raises:
            ConfigError: two sets have the same name; a module has no such dataset.
            DataError: a source does not exist, or cannot be read.
        """
        sets: list[EvaluationSet] = []
        for word in words:
            found = None if os.path.exists(word) else _NAMED.fullmatch(word)
            name, source = found.groups() if found else (_name_of(word), word)
            if name in [other.name for other in sets]:
                raise ConfigError(
                    f"--data: two data sets have the name {name!r}: write --data NAME={source}",
                    on_every_rank=True,
                )
            sets.append(self._limited(self._named(name, source)))
        return sets

    def _limited(self, whole: EvaluationSet) -> EvaluationSet:
        """Return the first samples of a set."""
        limit = self._num_samples
        if limit is None or (hasattr(whole.data, "__len__") and len(whole.data) <= limit):
            return whole
        if not is_map_style(whole.data):
            raise ConfigError(
                f"--samples needs data of which single samples can be read, and {whole.name} is a "
                f"{type(whole.data).__name__}: leave it out, or give a dataset with __getitem__ "
                f"and __len__",
                on_every_rank=True,
            )
        return EvaluationSet(whole.name, _FirstSamples(whole.data, limit))

    def _named(self, name: str, source: str) -> EvaluationSet:
        is_object = None if os.path.exists(source) else _OBJECT.fullmatch(source)
        if is_object:
            return EvaluationSet(name, _object(*is_object.groups()))
        section = self._section(source)
        try:
            check_data_inputs(section)
            return self._built(name, section, "valid")
        except DataError as error:
            raise DataError(f"--data {source}: {error}") from error

    def _section(self, source: str) -> DataSection:
        """Return the section `data` whose only source is `source`, all of it in one split."""
        tree = self._config.to_dict()
        if (images := self._config.data.images) is not None:
            # The classes of a folder are the classes of the training images.
            key = "valid_path" if images == "folder" else "path"
            return load({**tree, "data": {**self._config.given()["data"], key: source}}).data
        dropped, sources = set(_SOURCES), dict[str, Any]()
        if all(path.is_file() for path in files_of(prefix_of(source))):
            sources["data_path"] = source
            dropped |= set(RECORD_KEYS)
        else:
            # Without it a new tokenizer would be trained, whose ids have another meaning.
            path, tokenizer = model_tokenizer(self._config)
            sources |= {"tokenizer": path, "eod_id": tokenizer.eod}
            if self._format != self._config.data.format:
                dropped |= set(RECORD_KEYS)
            if self._format == "corpus":
                sources["corpus"] = source
            else:
                sources |= {"path": source, "format": self._format}
        kept = {key: value for key, value in tree["data"].items() if key not in dropped}
        return load({**tree, "data": {**kept, "split": "0,1,0", **sources}}).data

    def _built(self, name: str, section: DataSection, split: SplitName) -> EvaluationSet:
        if section.images is None:
            datasets = self._tokens(section, split)
        else:
            datasets = load_images(self._config, section, (split,))
        found = getattr(datasets, split)
        if found is None:
            raise ConfigError(
                f"the data of the run has no {split} set (data.split, data.{split}_data_path): "
                "name files with --data",
                on_every_rank=True,
            )
        return EvaluationSet(name, found)

    def _tokens(self, section: DataSection, split: SplitName) -> Datasets:
        model = self._config.model
        length = model.sample_tokens() if model is not None else None
        if length is None or self._vocab_size is None:
            raise ConfigError(
                f"the samples of model.type {model.type if model else None!r} are not token ids "
                f"alone, so the data must be a dataset of yours: --data MODULE:NAME",
                on_every_rank=True,
            )
        files = section.token_files(split)
        is_weighted = len(files) > 1 and files[0].weight is not None
        if is_weighted and self._num_samples is None:
            key = "data_path" if section.data_path else f"{split}_data_path"
            raise ConfigError(
                f"data.{key} has weights, so its validation set has no end: give --samples, or "
                "name its files with --data",
                on_every_rank=True,
            )
        request = DataRequest(
            seq_length=length,
            seed=self._config.seed,
            **{f"{part}_samples": 0 for part in ("train", "valid", "test")}
            | {f"{split}_samples": self._num_samples if is_weighted else None},
            vocab_size=self._vocab_size,
            keep_partial=True,
        )
        return build_datasets(section, request, say=self._say, progress=self._progress)


class _FirstSamples:
    """The first samples of a dataset."""

    def __init__(self, whole: Any, count: int) -> None:
        self._whole, self._count = whole, count
        for name in ("collate_fn", "deterministic", "classes"):
            if hasattr(whole, name):
                setattr(self, name, getattr(whole, name))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._whole[index]


def _name_of(word: str) -> str:
    """Return the name of a source that has none: the last part of its path, without its ending."""
    return word if _OBJECT.fullmatch(word) else Path(word).stem or word


def _object(module: str, name: str) -> Any:
    """Return the dataset `name` of a module, or what this function returns."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
        found = found() if callable(found) and not hasattr(found, "__getitem__") else found
    # The user's module can raise anything.
    except Exception as error:
        raise ConfigError(f"--data {module}:{name}: {short_cause(error)}") from error
    if not (is_map_style(found) or hasattr(found, "__iter__")):
        raise ConfigError(
            f"--data {module}:{name} is no dataset but {type(found).__name__}: it has neither "
            f"__getitem__ and __len__ nor __iter__",
            on_every_rank=True,
        )
    return found

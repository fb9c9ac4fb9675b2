"""Prompts as token ids, with the tokenizer of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipemega.config import Config
from pipemega.data.data_files import run_tokenizer
from pipemega.data.finetuning.chat_format import load_chat_tokenizer
from pipemega.data.tokenizer import Tokenizer
from pipemega.errors import ConfigError, DataError


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
        tokenizer: of the model.
        path: of the tokenizer.
        chat_template: file with a chat template; None: that of the tokenizer.
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
            ConfigError, DataError: as `model_tokenizer`; a token is not in the vocabulary.
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

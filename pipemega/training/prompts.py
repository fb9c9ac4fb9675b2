"""Prompts as token ids, with the tokenizer of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemega.config import Config
from pipemega.data.data_files import run_tokenizer
from pipemega.data.tokenizer import Tokenizer
from pipemega.errors import ConfigError


def model_tokenizer(config: Config) -> tuple[str, Tokenizer]:
    """Return path and tokenizer of the run, or of the folder of a model of transformers.

    Raises:
        ConfigError: there is none.
        DataError: it does not exist, or cannot be read.
    """
    found = run_tokenizer(config)
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
        stop: ids of the tokens that end a text.
        adds_special_tokens: the model knows texts with the tokens that its tokenizer adds to an
            example, such as one at its beginning.
    """

    tokenizer: Tokenizer
    path: str
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
        ids = {text: tokenizer.id_of(text) for text in stop}
        for text, number in ids.items():
            if number is None:
                raise ConfigError(
                    f"--stop {text!r}: the tokenizer {path} has no such token", on_every_rank=True
                )
        found = {number for number in (*ids.values(), tokenizer.eod) if number is not None}
        # Pretraining reads documents without these tokens.
        is_pretrained_here = config.model is None or config.model.type != "hf"
        return cls(tokenizer, path, frozenset(found), not is_pretrained_here)

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

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of new tokens."""
        return self.tokenizer.decode(ids)

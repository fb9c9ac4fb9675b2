"""How a record becomes an example: its tokens, and which of them the loss counts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipemega.data.finetuning.record_files import Record
from pipemega.data.tokens.tokenizers import Tokenizer
from pipemega.errors import DataError

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)

_RESPONSE_KEYS = ("response", "completion", "output", "answer")


class Example(NamedTuple):
    """One example.

    Shape:
        tokens int32 [length], is_answer bool [length]: the loss counts the token as a label
    """

    tokens: npt.NDArray[np.int32]
    is_answer: npt.NDArray[np.bool_]


class ExampleFormat(ABC):
    """Converts records to examples.

    Attributes:
        identity: what the examples depend on, besides the records; JSON-serialisable.
    """

    identity: Mapping[str, object]

    @abstractmethod
    def examples(self, records: Sequence[Record]) -> list[Example | None]:
        """Return an example for each record; None if the record has no answer.

        Raises:
            DataError: a record does not have the format; the message says which one.
        """


class InstructionFormat(ExampleFormat):
    """A prompt and a response; the loss counts the response and the end of the document.

    Args:
        prompt_template: text with names of keys in braces; None: the key `prompt`, or Alpaca's
            `instruction` and `input`.
        key: key of the response; None: `response`, `completion`, `output` or `answer`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_template: str | None, key: str | None) -> None:
        self._tokenizer, self._end = tokenizer, end_of_document(tokenizer)
        self._template, self._key = prompt_template, key
        self._names = None if prompt_template is None else _names_in(prompt_template)
        self.identity = {
            "format": "instruction",
            "tokenizer": tokenizer.digest(),
            "eod": self._end,
            "prompt": prompt_template or [ALPACA, ALPACA_WITH_INPUT],
            "key": key,
        }

    def examples(self, records: Sequence[Record]) -> list[Example | None]:
        responses = [_text_at(record, self._response_key(record)) for record in records]
        prompts = [self._prompt(record) for record in records]
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        tokens = example_tokens(self._tokenizer, [*prompts, *texts])
        pairs = zip(tokens[: len(records)], tokens[len(records) :], strict=True)
        return [
            self._example(*pair) if response.strip() else None
            for pair, response in zip(pairs, responses, strict=True)
        ]

    def _example(self, prompt: list[int], text: list[int]) -> Example:
        tokens = with_end(text, self._end)
        # A token that contains both prompt and response is part of the response.
        start = next(
            (i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b),
            min(len(prompt), len(tokens)),
        )
        return Example(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= start)

    def _response_key(self, record: Record) -> str:
        if self._key is not None:
            return self._key
        found = next((key for key in _RESPONSE_KEYS if key in record.content), None)
        if found is None:
            raise _missing_key(record, " or ".join(map(repr, _RESPONSE_KEYS)))
        return found

    def _prompt(self, record: Record) -> str:
        if self._template is not None and self._names is not None:
            values = {name: _text_at(record, name) for name in self._names}
            return self._template.format(**values)
        if "prompt" in record.content:
            return _text_at(record, "prompt")
        if "instruction" not in record.content:
            raise _missing_key(record, "'prompt' or 'instruction'")
        values = {"instruction": _text_at(record, "instruction")}
        if not record.content.get("input"):
            return ALPACA.format(**values)
        return ALPACA_WITH_INPUT.format(input=_text_at(record, "input"), **values)


class TextFormat(ExampleFormat):
    """A text; the loss counts all tokens and the end of the document.

    Args:
        key: key of the text; None: `text`.
    """

    def __init__(self, tokenizer: Tokenizer, key: str | None) -> None:
        self._tokenizer, self._end = tokenizer, end_of_document(tokenizer)
        self._key = key or "text"
        self.identity = {
            "format": "text",
            "tokenizer": tokenizer.digest(),
            "eod": self._end,
            "key": self._key,
        }

    def examples(self, records: Sequence[Record]) -> list[Example | None]:
        texts = [_text_at(record, self._key) for record in records]
        encoded = example_tokens(self._tokenizer, texts)
        return [
            self._example(tokens) if text.strip() else None
            for text, tokens in zip(texts, encoded, strict=True)
        ]

    def _example(self, tokens: list[int]) -> Example:
        tokens = with_end(tokens, self._end)
        return Example(np.array(tokens, dtype=np.int32), np.ones(len(tokens), dtype=np.bool_))


def end_of_document(tokenizer: Tokenizer) -> int:
    """Return the id that ends an example.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.eod is None:
        raise DataError(
            "the tokenizer names no token that ends a document, so a model could not learn where "
            "an answer ends: name it with data.eod_id"
        )
    return tokenizer.eod


def example_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text, of which the first is not the start of a sequence twice.

    A prompt template may contain that token, and the tokenizer adds it too.
    """
    added = tokenizer.encode_example("")[:1]
    return [
        tokens[1:] if len(tokens) > 1 and added == tokens[:1] == tokens[1:2] else tokens
        for tokens in tokenizer.encode_examples(texts)
    ]


def with_end(tokens: list[int], end: int) -> list[int]:
    """Return tokens that end with `end` once."""
    return tokens if tokens and tokens[-1] == end else [*tokens, end]


def _names_in(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise DataError(f"data.prompt_template is not valid: {error}") from error
    if not names or not all(name.isidentifier() for name in names):
        raise DataError(
            f"data.prompt_template is {template!r}, but must contain keys of the records in "
            "braces, such as {question}; write other braces twice"
        )
    return names


def _text_at(record: Record, key: str) -> str:
    if key not in record.content:
        raise _missing_key(record, repr(key))
    value: Any = record.content[key]
    if not isinstance(value, str):
        raise DataError(
            f"{record.where}: {key!r} must be text, not {type(value).__name__}"
            + ("; for messages set data.format to 'chat'" if isinstance(value, list) else "")
        )
    return value


def _missing_key(record: Record, wanted: str) -> DataError:
    return DataError(
        f"{record.where} has no key {wanted}; its keys are "
        f"{', '.join(map(repr, record.content))}: name the right one with data.key, or the keys of "
        "a prompt with data.prompt_template"
    )

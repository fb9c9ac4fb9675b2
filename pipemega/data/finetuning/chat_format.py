"""Conversations: the chat template of a Hugging Face tokenizer, with the loss on answers."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipemega.data.finetuning.answer_spans import Span, answer_spans, check_is_shown, text_of
from pipemega.data.finetuning.example_format import Example, ExampleFormat
from pipemega.data.finetuning.record_files import Record
from pipemega.errors import ConfigError, DataError

Messages = list[dict[str, Any]]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

# ShareGPT's names: keys of a message, and speakers.
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


class ChatFormat(ExampleFormat):
    """A list of messages; the loss counts the answers of the assistant.

    If the template marks the answers by {% generation %}, the marked tokens count. Otherwise the
    answers are found by comparing the texts of the first messages; see `answer_spans`.

    Args:
        tokenizer: path of a Hugging Face tokenizer.
        template: file with a chat template; None: that of the tokenizer.
        key: of the messages; None: `messages`, or ShareGPT's `conversations`.
    """

    def __init__(self, tokenizer: str, template: str | None, key: str | None) -> None:
        self._tokenizer = load_chat_tokenizer(tokenizer, template)
        self._key = key
        self._marks_answers = bool(_GENERATION_TAG.search(self._template_text()))
        self.identity = {
            "format": "chat",
            "tokenizer": _digest_of(self._tokenizer),
            "template": self._template_text(),
            "key": key,
        }

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks answers by {% generation %}."""
        return self._marks_answers

    def examples(self, records: Sequence[Record]) -> list[Example | None]:
        chats = [(record, self._messages(record)) for record in records]
        kept = [(record, messages) for record, messages in chats if _has_answers(messages)]
        texts = [self._render(record, messages, False) for record, messages in kept]
        if not texts:
            return [None] * len(records)
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        found: list[Example] = []
        for place, (record, messages) in enumerate(kept):
            tokens = np.array(encoded["input_ids"][place], dtype=np.int32)
            offsets = np.array(encoded["offset_mapping"][place], dtype=np.int64).reshape(-1, 2)
            is_answer = self._is_answer(record, messages, texts[place], tokens, offsets)
            found.append(Example(tokens, is_answer))
        examples = iter(found)
        return [next(examples) if _has_answers(messages) else None for _, messages in chats]

    def _is_answer(
        self,
        record: Record,
        messages: Messages,
        text: str,
        tokens: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        try:
            if self._marks_answers:
                return self._marked(record, messages, text, tokens, offsets)
            spans = answer_spans(messages, lambda m, add: self._render(record, m, add), text)
        except DataError as error:
            raise DataError(f"{record.where}: {error}") from error
        return tokens_in(spans, offsets)

    def _marked(
        self,
        record: Record,
        messages: Messages,
        text: str,
        tokens: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Return the tokens that the template marks by {% generation %}."""
        marked = self._tokenizer.apply_chat_template(
            messages,
            tools=record.content.get("tools") or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert list(marked["input_ids"]) == tokens.tolist(), "the text is tokenized in one way"
        is_answer = np.array(marked["assistant_masks"], dtype=np.bool_)
        edges = np.flatnonzero(np.diff(is_answer, prepend=False, append=False)).reshape(-1, 2)
        answers = [text[offsets[first, 0] : offsets[last - 1, 1]] for first, last in edges]
        for place, message in enumerate(messages):
            if message.get("role") == "assistant":
                check_is_shown(message, place, *answers)
        return is_answer

    def _render(self, record: Record, messages: Sequence[Mapping[str, Any]], add: bool) -> str:
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=record.content.get("tools") or None,
                tokenize=False,
                add_generation_prompt=add,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{record.where}: the chat template refuses the messages: {error}"
            ) from error
        return str(rendered)

    def _template_text(self) -> str:
        return str(self._tokenizer.get_chat_template())

    def _messages(self, record: Record) -> Messages:
        content = record.content
        keys = ("messages", "conversations") if self._key is None else (self._key,)
        key = next((key for key in keys if key in content), None)
        if key is None:
            raise DataError(
                f"{record.where} has no key {' or '.join(map(repr, keys))}; its keys are "
                f"{', '.join(map(repr, content))}: name the key of the messages with data.key"
            )
        messages = content[key]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{record.where}: {key!r} must be a list of messages, and not empty")
        return [
            _message(message, f"{record.where}: {key}[{i}]") for i, message in enumerate(messages)
        ]


def load_chat_tokenizer(tokenizer: str, template: str | None = None) -> Any:
    """Return the tokenizer of transformers with a chat template.

    Raises:
        ConfigError: transformers is not installed.
        DataError: the tokenizer cannot be loaded, has no chat template or no offsets.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "data.format 'chat' needs transformers: pip install 'pipemega[hf]'"
        ) from error
    path = Path(tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    has_config = any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    try:
        if path.is_dir() or (path.name == "tokenizer.json" and has_config):
            found: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        else:
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # transformers and tokenizers raise many classes
        raise DataError(
            f"data.tokenizer {tokenizer!r} is not a Hugging Face tokenizer, which data.format "
            f"'chat' needs: {error}"
        ) from error
    if template is not None:
        found.chat_template = _template_of(Path(template).expanduser())
    if found.chat_template is None:
        raise DataError(
            f"the tokenizer {tokenizer} has no chat template: name a file with one by "
            "data.chat_template, or use data.format 'instruction'"
        )
    if not found.is_fast:
        raise DataError(
            f"{type(found).__name__} of {tokenizer} cannot say which text a token is from, so the "
            "answers cannot be found: use a tokenizer with a tokenizer.json"
        )
    return found


def tokens_in(spans: Sequence[Span], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which tokens contain characters of a span.

    Shape:
        offsets [tokens, 2]: first character and the one after the last  ->  bool [tokens]
    """
    firsts, lasts = offsets[:, 0], offsets[:, 1]
    # Tokenizers that trim white space from offsets leave nothing of a token of white space: it is
    # behind the token before it.
    firsts = np.where(firsts == lasts, np.append([0], lasts[:-1]), firsts)
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        inside |= (lasts > start) & (firsts < end) & (lasts > firsts)
    return inside


def _template_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {str(path)!r} cannot be read: {error}") from error


def _digest_of(tokenizer: Any) -> str:
    return hashlib.sha256(str(tokenizer.backend_tokenizer.to_str()).encode()).hexdigest()


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with the keys `role` and `content`.

    Keys with null are left out: parquet stores each key for each message.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is a {type(message).__name__}, but must be an object")
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept and "from" in kept:
        role = str(kept.pop("from"))
        kept = {"role": _ROLES.get(role, role), "content": kept.pop("value", ""), **kept}
    if not isinstance(kept.get("role"), str):
        raise DataError(f"{where} has no role; its keys are {', '.join(map(repr, message))}")
    return kept


def _has_answers(messages: Messages) -> bool:
    """Return whether there are answers, and none of them is empty."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return bool(answers) and all(text_of(each) or each.get("tool_calls") for each in answers)

"""Conversations: the chat template of a Hugging Face tokenizer, with the loss on answers.

Find the answers in a rendered conversation.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipemega.data.finetuning.examples import Example, ExampleFormat
from pipemega.data.finetuning.record_files import Record
from pipemega.data.tokens.data_files import load_chat_tokenizer
from pipemega.errors import DataError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether to add the generation prompt) -> text."""

Span = tuple[int, int]

_WAY_OUT = (
    "mark the answers in the template with {% generation %} ... {% endgeneration %} "
    "(data.chat_template names a file with a template)"
)


def answer_spans(messages: Sequence[Message], render: Render, full: str) -> list[Span]:
    """Return [start, end) of each answer in `full`, the text of all messages.

    An answer starts behind the generation prompt that follows the messages before it, and ends
    where the text of all messages up to it ends: it includes the token that ends a turn.

        full                 <user>hello<end><assistant>hi<end><user>...
        messages[:1]         <user>hello<end><assistant>                       + generation prompt
        messages[:2]         <user>hello<end><assistant>hi<end>
        span                                            ^^^^^^^

    Templates may render a message differently if it is the last one (Qwen3 does). Such an answer
    is found by its content, and by the text that follows it in messages[:i + 1].

    Raises:
        DataError: the text of earlier messages depends on later ones, or an answer is not in the
            text.
    """
    spans: list[Span] = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = _start(messages, place, render, full)
        end = len(full)
        if place < len(messages) - 1:
            end = _end(messages, place, render, full, start)
        check_is_shown(message, place, full[start:end])
        if spans and start < spans[-1][1]:
            raise DataError(_moved(place))
        spans.append((start, end))
    return spans


def check_is_shown(message: Message, place: int, *texts: str) -> None:
    """Check that one of the answers' texts has the content of `message`.

    Raises:
        DataError: none has.
    """
    content = text_of(message)
    if any(content in text for text in texts):
        return
    raise DataError(
        f"the chat template hides the answer in message {place} ({_shortened(content)!r}), so no "
        "loss could be computed for it: use a template that renders it, or make it the last "
        "message of its own record"
    )


def text_of(message: Message) -> str:
    """Return the text of a message, without surrounding white space."""
    content = message.get("content")
    if isinstance(content, list):  # parts, as {"type": "text", "text": ...}
        content = "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content.strip() if isinstance(content, str) else ""


def _start(messages: Sequence[Message], place: int, render: Render, full: str) -> int:
    if place == 0:  # nothing to render: the answer is not behind a prompt
        return max(full.find(text_of(messages[0])), 0)
    prompt = render(messages[:place], True)
    if full.startswith(prompt):
        return len(prompt)
    # Some generation prompts start the answer too, for example with <think>.
    before = render(messages[:place], False)
    if not full.startswith(before):
        raise DataError(_moved(place))
    differs = (i for i, (a, b) in enumerate(zip(full, prompt, strict=False)) if a != b)
    return next(differs, min(len(full), len(prompt)))


def _end(messages: Sequence[Message], place: int, render: Render, full: str, start: int) -> int:
    until = render(messages[: place + 1], False)
    if full.startswith(until) and len(until) > start:
        return len(until)
    content = text_of(messages[place])
    if not content:
        raise DataError(_moved(place))
    found = until.rfind(content, start)
    tail = until[found + len(content) :]
    at = full.find(content + tail, start)
    check_is_shown(messages[place], place, full[start:] if found >= 0 and at >= 0 else "")
    return at + len(content) + len(tail)


def _moved(place: int) -> str:
    return (
        f"the chat template renders the messages before message {place} differently if later ones "
        f"follow, so the answer in it cannot be found: {_WAY_OUT}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


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
        template: file with a chat template; None: the tokenizer's template.
        key: key of the messages; None: `messages`, or ShareGPT's `conversations`.
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

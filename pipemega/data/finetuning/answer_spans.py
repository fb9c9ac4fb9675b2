"""Find the answers in a rendered conversation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

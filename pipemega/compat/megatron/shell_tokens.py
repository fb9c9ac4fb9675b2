"""Split a script in the bash language into words, operators and redirections."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipemega.errors import ConfigError

_OPERATORS = (";;&", ";;", ";&", "&&", "||", "&>>", "&>", "|&", ";", "&", "|", "(", ")", "\n")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|>\||<>|>|<)")
_ASSIGNED_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")


class ScriptError(ConfigError):
    """A script cannot be parsed."""


@dataclass(frozen=True)
class Array:
    """The assignment NAME=(words) or NAME+=(words)."""

    name: str
    append: bool
    words: tuple[str, ...]


@dataclass(frozen=True)
class Token:
    """A word, an operator (`kind` "op"), an array assignment or a redirection.

    Args:
        target: of a redirection; with "<<" the text of the here-document.
        literal: a here-document in which nothing is expanded.
    """

    kind: str
    text: str
    line: int
    array: Array | None = None
    target: str = ""
    literal: bool = False


def skip_quoted(text: str, start: int) -> int:
    """Return the position after the quote, expansion or escaped character that is at `start`.

    Returns `start` if there is none of them.

    Raises:
        ScriptError: it is not closed.
    """
    char = text[start]
    if char == "\\":
        return min(start + 2, len(text))
    if char == "'":
        return _find(text, "'", start + 1) + 1
    if text.startswith("$'", start):
        return _skip_until(text, start + 2, "'", only_escapes=True)
    if char == '"':
        return _skip_until(text, start + 1, '"')
    if char == "`":
        return _skip_until(text, start + 1, "`", only_escapes=True)
    if text.startswith("${", start):
        return _skip_until(text, start + 2, "}")
    if text.startswith(("$(", "<(", ">("), start):
        return _skip_brackets(text, start + 1)
    return start


def _find(text: str, what: str, start: int) -> int:
    found = text.find(what, start)
    if found < 0:
        raise ScriptError(f"line {text.count(chr(10), 0, start) + 1}: {what} is not closed")
    return found


def _skip_until(text: str, start: int, end: str, only_escapes: bool = False) -> int:
    at = start
    while at < len(text):
        if text[at] == end:
            return at + 1
        inside = text[at] == "\\" or not only_escapes
        # Within double quotes an apostrophe is an ordinary character.
        plain = text[at] == "'" and end in '"}'
        after = skip_quoted(text, at) if inside and not plain else at
        at = max(after, at + 1)
    raise ScriptError(f"line {text.count(chr(10), 0, start) + 1}: {end} is missing")


def _skip_brackets(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth, at = 0, start
    while at < len(text):
        char = text[at]
        if char == "#" and text[at - 1] in " \t\n" and "\n" in text[at:]:
            at = text.index("\n", at)
            continue
        depth += (char == "(") - (char == ")")
        if char == ")" and not depth:
            return at + 1
        at = max(skip_quoted(text, at), at + 1) if char not in "()" else at + 1
    raise ScriptError(f"line {text.count(chr(10), 0, start) + 1}: ) is missing")


def tokens_of(text: str) -> Iterator[Token]:
    at, line = 0, 1
    waiting: list[Token] = []
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif char == "\n" and waiting:
            yield Token("op", "\n", line)
            at, line = at + 1, line + 1
            for token in waiting:
                body, at = _here_document(text, at, token)
                yield Token("here", "<<", line, target=body, literal=token.literal)
                line = text.count("\n", 0, at) + 1
            waiting = []
        elif not text.startswith(("<(", ">("), at) and (found := _REDIRECT.match(text, at)):
            end = _word_end(text, _after_blanks(text, found.end()))
            target = text[_after_blanks(text, found.end()) : end]
            kind = found[0].lstrip("0123456789")
            if kind in ("<<", "<<-"):
                quoted = bool(target) and target[0] in "'\"\\"
                mark = target.strip("'\"\\")
                token = Token("here", kind, line, target=mark, literal=quoted)
                waiting.append(token)
            else:
                yield Token("redirect", kind, line, target=target)
            at = end
        elif operator := next((op for op in _OPERATORS if text.startswith(op, at)), ""):
            yield from _operator(text, at, operator, line)
            if operator in ("&>", "&>>"):
                at = _word_end(text, _after_blanks(text, at + len(operator)))
                continue
            if text.startswith("((", at):
                end = _skip_brackets(text, at)
                line, at = line + text.count("\n", at, end), end
                continue
            at += len(operator)
            line += operator == "\n"
        else:
            token, end = _word(text, at, line)
            yield token
            line, at = line + text.count("\n", at, end), end
    yield Token("op", "\n", line)


def _operator(text: str, at: int, operator: str, line: int) -> Iterator[Token]:
    if operator in ("&>", "&>>"):
        start = _after_blanks(text, at + len(operator))
        yield Token("redirect", ">", line, target=text[start : _word_end(text, start)])
    elif text.startswith("((", at):
        yield Token("word", text[at : _skip_brackets(text, at)], line)
    else:
        yield Token("op", operator, line)


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and (text[at] in " \t" or text.startswith("\\\n", at)):
        at += 2 if text[at] == "\\" else 1
    return at


def _word_end(text: str, at: int) -> int:
    while at < len(text) and text[at] not in " \t\r\n;&|()<>":
        if text.startswith("\\\n", at):
            break
        at = max(skip_quoted(text, at), at + 1)
    return at


def _word(text: str, at: int, line: int) -> tuple[Token, int]:
    if found := _ASSIGNED_ARRAY.match(text, at):
        end = _skip_brackets(text, found.end() - 1)
        inner = tokens_of(text[found.end() : end - 1])
        words = tuple(token.text for token in inner if token.kind == "word")
        array = Array(found[1], found[2] == "+", words)
        return Token("array", found[1], line, array), end
    end = _word_end(text, at)
    if text[at:end] == "[[":  # a pattern after =~ may have brackets and |
        close = re.compile(r"\s\]\](?=[\s;&|)]|$)").search(text, at)
        if close is not None:
            return Token("word", text[at : close.end()], line), close.end()
    # A single "<" or ")" that nothing above handles is part of a word.
    return Token("word", text[at : max(end, at + 1)], line), max(end, at + 1)


def _here_document(text: str, at: int, token: Token) -> tuple[str, int]:
    lines = []
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        content = text[at:end]
        at = min(end + 1, len(text))
        if (content.lstrip("\t") if token.text == "<<-" else content).rstrip("\r") == token.target:
            break
        lines.append(content)
    return "\n".join(lines) + "\n", at

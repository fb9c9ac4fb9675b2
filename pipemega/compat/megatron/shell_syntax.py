"""Parse the part of the bash language that launch scripts use.  Nothing is executed here.

script     list of nodes, in the order of the text
word       the text of a word as written, with its quotes and `$NAME`; shell_words expands it

Split a script in the bash language into words, operators and redirections.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

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
        target: the file of a redirection; with "<<" the text of the here-document.
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


_FUNCTION = re.compile(r"[A-Za-z_][\w\-.:]*")
_CLOSING = {"if": "fi", "for": "done", "select": "done", "while": "done", "until": "done",
            "case": "esac", "{": "}"}  # fmt: skip
_ENDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


@dataclass
class Simple:
    """A simple command: assignments and words, with its redirections."""

    line: int
    words: list[Array | str] = field(default_factory=list)
    redirects: list[Token] = field(default_factory=list)


@dataclass
class AndOr:
    """Pipelines with the operator ("", "&&" or "||") before each of them."""

    parts: list[tuple[str, "Pipeline"]]


@dataclass
class Pipeline:
    """Commands joined by `|`; `!` before them negates the status."""

    negated: bool
    commands: list["Node"]


@dataclass
class If:
    """Pairs (condition, body); the condition of `else` is empty."""

    branches: list[tuple[list[AndOr], list[AndOr]]]


@dataclass
class For:
    """A loop over words; None: an arithmetic loop, whose three expressions are `header`."""

    name: str
    words: list[str] | None
    header: str
    body: list[AndOr]


@dataclass
class While:
    """A loop `while`, or `until`."""

    until: bool
    condition: list[AndOr]
    body: list[AndOr]


@dataclass
class Case:
    """A word, and pairs (patterns, body)."""

    word: str
    branches: list[tuple[list[str], list[AndOr]]]


@dataclass
class ShellFunction:
    """The definition of a function."""

    name: str
    body: list[AndOr]


@dataclass
class Group:
    """Commands in braces or parentheses."""

    body: list[AndOr]


Node = Simple | If | For | While | Case | ShellFunction | Group


def parse(text: str) -> list[AndOr]:
    """Return the commands of a script.

    Raises:
        ScriptError: a quote, a bracket or a block is not closed; the message names the line.
    """
    parser = _Parser(list(tokens_of(text)))
    body = parser.body(())
    if (rest := parser.peek()) is not None:
        raise ScriptError(f"line {rest.line}: {rest.text.strip() or 'end of line'!r} is unexpected")
    return body


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at = tokens, 0
        self.last: Simple | None = None

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> Token:
        token = self.peek()
        if token is None:
            raise ScriptError(f"line {self.tokens[-1].line}: the script ends inside of a block")
        self.at += 1
        return token

    def is_op(self, *operators: str) -> bool:
        token = self.peek()
        return token is not None and token.kind == "op" and token.text in operators

    def is_word(self, *words: str) -> bool:
        token = self.peek()
        return token is not None and token.kind == "word" and token.text in words

    def take(self, word: str) -> None:
        token = self.next()
        if token.text != word:
            raise ScriptError(f"line {token.line}: {word!r} is missing before {token.text!r}")

    def separators(self) -> None:
        while (token := self.peek()) is not None:
            if token.kind == "here":
                if self.last is not None:
                    self.last.redirects.append(token)
            elif not (token.kind == "op" and token.text in ("\n", ";", "&")):
                return
            self.at += 1

    def body(self, ends: tuple[str, ...]) -> list[AndOr]:
        found = []
        self.separators()
        while (token := self.peek()) is not None:
            if token.kind == "op" and token.text in (")", ";;", ";&", ";;&"):
                break
            if token.kind == "word" and (token.text in ends or token.text in _ENDS):
                break
            found.append(self.and_or())
            self.separators()
        return found

    def and_or(self) -> AndOr:
        parts = [("", self.pipeline())]
        while self.is_op("&&", "||"):
            operator = self.next().text
            self.separators()
            parts.append((operator, self.pipeline()))
        return AndOr(parts)

    def pipeline(self) -> Pipeline:
        negated = False
        while self.is_word("!", "time"):
            negated ^= self.next().text == "!"
        commands = [self.command()]
        while self.is_op("|", "|&"):
            self.next()
            self.separators()
            commands.append(self.command())
        return Pipeline(negated, commands)

    def command(self) -> Node:
        if self.is_op("("):
            self.next()
            body = self.body(())
            self.take(")")
            return self.with_redirects(Group(body))
        token = self.peek()
        if token is not None and token.kind == "word":
            if token.text in _CLOSING:
                block = self.block(self.next().text)
                return self.with_redirects(block)
            if token.text == "function":
                self.next()
                return self.function(self.next().text)
            following = self.tokens[self.at + 1 : self.at + 3]
            brackets = [t.text for t in following if t.kind == "op"]
            if brackets == ["(", ")"] and _FUNCTION.fullmatch(token.text):
                return self.function(self.next().text)
        return self.simple()

    def with_redirects(self, node: Node) -> Node:
        while (token := self.peek()) is not None and token.kind == "redirect":
            self.at += 1
        return node

    def function(self, name: str) -> ShellFunction:
        if self.is_op("("):
            self.take("(")
            self.take(")")
        self.separators()
        body = self.command()
        return ShellFunction(name, body.body if isinstance(body, Group) else [])

    def block(self, word: str) -> Node:
        end = _CLOSING[word]
        node: Node
        if word == "if":
            node = self.conditional()
        elif word in ("for", "select"):
            return self.loop()
        elif word in ("while", "until"):
            condition = self.body(("do",))
            self.take("do")
            node = While(word == "until", condition, self.body(()))
        elif word == "case":
            node = self.cases()
        else:
            node = Group(self.body(()))
        self.take(end)
        return node

    def conditional(self) -> If:
        condition = self.body(("then",))
        self.take("then")
        branches = [(condition, self.body(()))]
        while self.is_word("elif"):
            self.next()
            condition = self.body(("then",))
            self.take("then")
            branches.append((condition, self.body(())))
        if self.is_word("else"):
            self.next()
            branches.append(([], self.body(())))
        return If(branches)

    def loop(self) -> For:
        name, header = self.next().text, ""
        words: list[str] | None = ["$@"]
        if name.startswith("(("):
            name, words, header = "", None, name[2:-2]
        self.separators_before("in", "do")
        if self.is_word("in"):
            self.next()
            words = []
            while (token := self.peek()) is not None and token.kind == "word":
                words.append(self.next().text)
        self.separators()
        self.take("do")
        body = self.body(())
        self.take("done")
        return For(name, words, header, body)

    def separators_before(self, *words: str) -> None:
        start = self.at
        self.separators()
        if not self.is_word(*words):
            self.at = start

    def cases(self) -> Case:
        word, branches = self.next().text, []
        self.separators()
        self.take("in")
        self.separators()
        while not self.is_word("esac"):
            patterns = []
            if self.is_op("("):
                self.next()
            while not self.is_op(")"):
                token = self.next()
                if token.kind == "word":
                    patterns.append(token.text)
            self.next()
            branches.append((patterns, self.body(("esac",))))
            if self.is_op(";;", ";&", ";;&"):
                self.next()
            self.separators()
        return Case(word, branches)

    def simple(self) -> Simple:
        first = self.peek()
        found = Simple(first.line if first else 0)
        while (token := self.peek()) is not None:
            if token.kind == "word":
                found.words.append(token.text)
            elif token.kind == "array" and token.array is not None:
                found.words.append(token.array)
            elif token.kind == "redirect":
                found.redirects.append(token)
            else:
                break
            self.at += 1
        if not found.words and not found.redirects:
            token = self.next()
            raise ScriptError(
                f"line {token.line}: {token.text.strip() or 'a line'!r} is unexpected"
            )
        self.last = found
        return found

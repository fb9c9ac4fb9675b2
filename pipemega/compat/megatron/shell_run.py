"""Follow a launch script: set its variables, and record the commands that it would start.

No command is started. `echo`, `expr`, `bc`, `basename` and the like are computed here; the output
of every other program is unknown. A condition that cannot be decided counts as false. Files that
the script writes with `cat << EOF > FILE` are kept in memory.

The output of simple programs: echo, printf, expr, bc, basename, dirname, pwd, cat and sed.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipemega.compat.megatron.shell_syntax import (
    AndOr,
    Array,
    Case,
    For,
    Group,
    If,
    Node,
    Pipeline,
    ScriptError,
    ShellFunction,
    Simple,
    While,
    parse,
)
from pipemega.compat.megatron.shell_words import (
    Scope,
    calculate,
    condition_result,
    names_of_unknown,
    shown,
    unknown,
    within_unknown_folder,
)


def printed(words: list[str]) -> str:
    """Return what echo or printf prints."""
    rest = words[1:]
    while words[0] == "echo" and rest and re.fullmatch(r"-[neE]+", rest[0]):
        rest = rest[1:]
    if words[0] == "printf" and rest:
        parts = re.split(r"%[-\d.]*[sdif]", rest[0])
        filled = [*rest[1:], *[""] * len(parts)]
        return "".join(a + b for a, b in zip(parts, filled, strict=False)).replace("\\n", "\n")
    return " ".join(rest)


def folder_of(commands: Sequence[list[str]], start: str | None) -> str | None:
    """Return the output of `cd A; cd B && pwd` in the folder `start`; None if it is unknown."""
    for words in commands[:-1]:
        names = [word for word in words[1:] if word not in ("-P", "-L", "--")]
        if words[:1] != ["cd"] or len(names) != 1:
            return None
        start = _absolute(names[0], start)
    return start if commands[-1][:1] == ["pwd"] else None


def _absolute(name: str, start: str | None) -> str | None:
    if names_of_unknown(name) or name.startswith("~") or (start is None and name[:1] != "/"):
        return None
    return os.path.normpath(os.path.join(start or "/", name))


def output_of(
    commands: list[list[str]], files: Mapping[str, str], folder: str | None = None
) -> str | None:
    """Return the output of a pipeline of simple programs; None if it is unknown.

    Args:
        files: contents of the files that the script wrote.
        folder: the folder in which the script runs; None: unknown.
    """
    words = commands[0] or [""]
    if any(names_of_unknown(word) for one in commands for word in one):
        return None
    name, rest = words[0], words[1:]
    text: str | None = None
    if name in ("echo", "printf"):
        text = printed(words)
    elif name == "expr":
        value = calculate(" ".join(rest))
        text = None if value is None else str(value)
    elif name == "basename" and rest:
        text = PurePosixPath(rest[0]).name
        text = text.removesuffix(rest[1]) if len(rest) > 1 else text
    elif name == "dirname" and rest:
        text = str(PurePosixPath(rest[0]).parent)
    elif name in ("realpath", "readlink") and rest:
        text = _absolute(rest[-1], folder)
    elif name == "pwd":
        text = folder
    elif name == "cat" and len(rest) == 1:
        text = files.get(rest[0])
    elif name == "bc" and rest:
        text, commands = rest[-1], [[], ["bc", *rest[:-1]]]
    for following in commands[1:]:
        text = None if text is None or following[:1] != ["bc"] else _bc(text, "-l" in following)
    return text


def _bc(text: str, decimals: bool) -> str | None:
    """Return what the calculator `bc` prints."""
    scale = 20 if decimals else 0
    for part in text.strip().split(";"):
        if found := re.fullmatch(r"\s*scale\s*=\s*(\d+)\s*", part):
            scale = int(found[1])
            continue
        value = calculate(part, integers=not scale)
        if value is None:
            return None
        return (
            str(int(value)) if not scale or value == int(value) else f"{value:.{min(scale, 12)}f}"
        )
    return None


def filtered(commands: Sequence[list[str]], read: Callable[[str], str | None]) -> str | None:
    """Return the output of `sed s/A/B/ FILE | sed s/C/D/ | ...`; None if it is unknown.

    Args:
        read: returns the content of a file, None if there is none.
    """
    text: str | None = None
    for words in commands:
        rest = [word for word in words[1:] if word not in ("-e", "-E", "-r")]
        edits = [word for word in rest if words[0] == "sed" and re.match(r"s(\W)", word)]
        files = [word for word in rest if word not in edits]
        if files:
            text = read(files[-1])
        for edit in edits:
            text = None if text is None else _substituted(text, edit)
        if text is None:
            return None
    return text


def _substituted(text: str, edit: str) -> str | None:
    """Apply sed's s/PATTERN/TEXT/FLAGS to each line."""
    parts = edit[2:].split(edit[1])
    if len(parts) != 3:
        return None
    pattern, new, flags = parts
    try:
        count = 0 if "g" in flags else 1
        lines = [re.sub(pattern, lambda _: new, line, count=count) for line in text.split("\n")]
    except re.error:
        return None
    return "\n".join(lines)


_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
# Loops run at most this often, and scripts include each other at most this deep.
_MOST_ROUNDS = 64
_DEEPEST = 12
_SHELLS = {"bash", "sh", "zsh"}


class Command(NamedTuple):
    """A program that the script starts, with its arguments."""

    line: int
    words: tuple[str, ...]


class ScriptRun:
    """The result of a script.

    Args:
        folder: the folder of the script; files that the script includes are searched there. None:
            no file is searched.
        variables: variables that are set before the script starts; "0" is the name of the script.
        parameters: $1, $2, ...
    """

    def __init__(
        self,
        folder: Path | None,
        variables: Mapping[str, str] | None = None,
        parameters: Sequence[str] = (),
    ) -> None:
        self.commands: list[Command] = []
        self.files: dict[str, str] = {}
        self.notes: list[str] = []
        self._folder = folder
        self._functions: dict[str, list[AndOr]] = {}
        self._depth = 0
        self.scope = Scope(dict(variables or {}), list(parameters), self._output)
        if isinstance(name := self.scope.get("0"), str):
            self.scope.variables["BASH_SOURCE"] = [name]

    def script(self, text: str) -> None:
        """Follow the text of a script.

        Raises:
            ScriptError: it cannot be parsed.
        """
        self._body(parse(text.replace("\r\n", "\n")))

    def _body(self, body: Iterable[AndOr]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: AndOr) -> bool | None:
        """Follow a statement and return its exit status as a condition; None if it is unknown."""
        result: bool | None = True
        for operator, pipeline in statement.parts:
            # Commands are taken to succeed.
            if (operator == "&&" and result is False) or (operator == "||" and result is not False):
                continue
            result = self._pipeline(pipeline)
        return result

    def _pipeline(self, pipeline: Pipeline) -> bool | None:
        result: bool | None = None
        if self._edited_file(pipeline.commands):
            return None
        for command in pipeline.commands:
            result = self._node(command)
        return (None if result is None else not result) if pipeline.negated else result

    def _node(self, node: Node) -> bool | None:
        if isinstance(node, Simple):
            return self._simple(node)
        if isinstance(node, If):
            for condition, body in node.branches:
                if not condition or self._condition(condition):
                    self._body(body)
                    break
        elif isinstance(node, For):
            self._loop(node)
        elif isinstance(node, While):
            # The body of a loop over unknown input is followed once: it may start the training.
            if self._condition(node.condition, otherwise=True) is not node.until:
                self._body(node.body)
        elif isinstance(node, Case):
            self._case(node)
        elif isinstance(node, ShellFunction):
            self._functions[node.name] = node.body
        elif isinstance(node, Group):
            self._body(node.body)
        return None

    def _condition(self, condition: list[AndOr], otherwise: bool = False) -> bool:
        self.scope.unset_is_empty = True
        commands = len(self.commands)
        results = [self._statement(statement) for statement in condition]
        # A program in a condition is a test, not the training.
        del self.commands[commands:]
        self.scope.unset_is_empty = False
        return otherwise if results[-1] is None else results[-1]

    def _loop(self, loop: For) -> None:
        if loop.words is None:
            first = _ASSIGNMENT.match(loop.header.split(";")[0].strip())
            if first is not None:
                self.scope.variables[first[1]] = self.scope.arithmetic(first[3])
            return self._body(loop.body)
        values = [text for word in loop.words for text in self.scope.fields(word)]
        for value in values[:_MOST_ROUNDS]:
            self.scope.variables[loop.name] = value
            self._body(loop.body)
        return None

    def _case(self, case: Case) -> None:
        self.scope.unset_is_empty = True
        value = self.scope.text(case.word)
        texts = [[self.scope.text(pattern) for pattern in one] for one, _ in case.branches]
        self.scope.unset_is_empty = False
        for patterns, (_, body) in zip(texts, case.branches, strict=True):
            if any(PurePosixPath("/" + value).match("/" + text) or value == text or text == "*"
                   for text in patterns):  # fmt: skip
                return self._body(body)
        return None

    def _simple(self, simple: Simple) -> bool | None:
        words = list(simple.words)
        local: dict[str, str] = {}
        while words and (isinstance(words[0], Array) or _ASSIGNMENT.match(words[0])):
            word = words.pop(0)
            if isinstance(word, Array):
                self.scope.assign(word)
            else:
                name, value = self._assigned(word)
                local[name] = value
        if not words:
            self.scope.variables.update(local)
            self._write(simple, "")
            return True
        first = words[0]
        if isinstance(first, str) and first.startswith("[[") and len(first) > len("[["):
            return condition_result(first[2:-2], self.scope)
        if isinstance(first, str) and first.startswith("(("):
            return self._arithmetic(first[2:-2])
        if isinstance(first, str) and first in ("[", "test"):
            inner = [word for word in words[1:] if isinstance(word, str)]
            return condition_result(" ".join(inner[:-1] if first == "[" else inner), self.scope)
        if isinstance(first, str) and first in _DECLARATIONS:
            return self._declare(words[1:])
        expanded = [text for word in words if isinstance(word, str)
                    for text in self.scope.fields(word)]  # fmt: skip
        return self._call(simple, expanded, local) if expanded else True

    def _assigned(self, word: str) -> tuple[str, str]:
        found = _ASSIGNMENT.match(word)
        assert found is not None, "checked by the caller"
        old = self.scope.variables.get(found[1], "") if found[2] else ""
        return found[1], (old if isinstance(old, str) else " ".join(old)) + self.scope.text(
            found[3]
        )

    def _declare(self, words: Iterable[Array | str]) -> bool:
        for word in words:
            if isinstance(word, Array):
                self.scope.assign(word)
            elif _ASSIGNMENT.match(word):
                name, value = self._assigned(word)
                self.scope.variables[name] = value
        return True

    def _arithmetic(self, expression: str) -> bool | None:
        found = re.fullmatch(r"\s*(\w+)\s*([-+*/%]?)=(?!=)(.*)", expression, re.DOTALL)
        if found is not None:
            whole = f"{found[1]} {found[2]} ({found[3]})" if found[2] else found[3]
            self.scope.variables[found[1]] = self.scope.arithmetic(whole)
            return True
        value = self.scope.arithmetic(expression)
        return None if names_of_unknown(value) else value != "0"

    def _call(self, simple: Simple, words: list[str], local: dict[str, str]) -> bool | None:
        name, rest = words[0], words[1:]
        if name in self._functions:
            outer, self.scope.parameters = self.scope.parameters, rest
            self._nested(self._functions[name])
            self.scope.parameters = outer
        elif name in ("true", "false", ":"):
            return name != "false"
        elif name == "let":
            return self._arithmetic(" ".join(rest))
        elif name == "eval":
            self._text(" ".join(rest))
        elif name in ("source", "."):
            self._include(simple, rest)
        elif name == "shift":
            del self.scope.parameters[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "set" and rest[:1] == ["--"]:
            self.scope.parameters = rest[1:]
        elif name == "cat" and simple.redirects:
            self._write(simple, "")
        elif name in ("echo", "printf"):
            self._write(simple, printed(words) + "\n")
        elif name == "read":
            for variable in rest:
                self.scope.variables.setdefault(variable, unknown(f"${variable}"))
        else:
            self._program(simple, words)
        return None

    def _program(self, simple: Simple, words: list[str]) -> None:
        """Record a program, and follow the script that `bash -c` or `bash FILE` runs."""
        self.commands.append(Command(simple.line, tuple(words)))
        shells = [at for at, word in enumerate(words) if PurePosixPath(word).name in _SHELLS]
        for at in shells[:1]:
            options = [word for word in words[at + 1 :] if word.startswith("-")]
            others = [word for word in words[at + 1 :] if not word.startswith("-")]
            if any(re.fullmatch(r"-\w*c", option) for option in options) and others:
                self._text(others[0], simple.line)
            elif others and others[0] in self.files:
                outer, self.scope.parameters = self.scope.parameters, others[1:]
                self._text(self.files[others[0]], simple.line)
                self.scope.parameters = outer

    def _text(self, text: str, line: int | None = None) -> None:
        before = len(self.commands)
        try:
            self._nested(parse(text))
        except ScriptError as error:
            self.notes.append(f"a part of the script was not read: {shown(str(error))}")
        if line is not None:  # lines within the text mean nothing to the user
            self.commands[before:] = [Command(line, c.words) for c in self.commands[before:]]

    def _nested(self, body: list[AndOr]) -> None:
        if self._depth < _DEEPEST:
            self._depth += 1
            self._body(body)
            self._depth -= 1

    def _include(self, simple: Simple, words: list[str]) -> None:
        name = words[0] if words else ""
        content = self._content(name)
        if content is not None:
            self._text(content)
        else:
            self.notes.append(
                f"line {simple.line}: {shown(name)} was not read (source): variables that it sets "
                "are unknown"
            )

    def _write(self, simple: Simple, text: str) -> None:
        """Keep what a command writes into a file: a here-document, or its own output."""
        for redirect in simple.redirects:
            if redirect.kind == "here":
                text = redirect.target if redirect.literal else self._here(redirect.target)
            elif redirect.text == "<<<":
                text = self.scope.text(redirect.target) + "\n"
        for redirect in simple.redirects:
            if redirect.text in (">", ">>", ">|"):
                name = self.scope.text(redirect.target)
                old = self.files.get(name, "") if redirect.text == ">>" else ""
                self.files[name] = old + text

    def _edited_file(self, commands: list[Node]) -> bool:
        """Keep the file that `sed s/A/B/ TEMPLATE | sed ... > FILE` writes, if it can be computed.

        Scripts of Megatron-DeepSpeed write the DeepSpeed JSON so.
        """
        last = commands[-1]
        targets = [r for r in last.redirects if r.text == ">"] if isinstance(last, Simple) else []
        lists = [self._plain(node) for node in commands] if targets else []
        if not targets or any(not words or words[0] not in ("sed", "cat") for words in lists):
            return False
        text = filtered([words or [] for words in lists], self._content)
        if text is not None:
            self.files[self.scope.text(targets[0].target)] = text
        return text is not None

    def _content(self, name: str) -> str | None:
        """Return the content of a file that the script wrote, or that is beside the script."""
        # A folder that is not known is usually the folder of the script.
        beside = within_unknown_folder(name) or name
        if name in self.files or self._folder is None or names_of_unknown(beside):
            return self.files.get(name)
        path = self._folder / beside
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    def _here(self, text: str) -> str:
        # Quotes are ordinary characters in a here-document.
        return self.scope.text('"' + text.replace('"', '\\"') + '"')

    def _output(self, command: str) -> str:
        """Return the output of $(command), as a marker if it cannot be computed."""
        result = None
        try:
            statements = parse(command)
        except ScriptError:
            statements = []
        pipelines = [pipeline for one in statements for _, pipeline in one.parts]
        lists = [[self._plain(node) for node in pipeline.commands] for pipeline in pipelines]
        known = [[words for words in one if words is not None] for one in lists]
        if known == lists and known:
            folder = self.scope.get("PWD")
            start = folder if isinstance(folder, str) else None
            result = (
                output_of(known[0], self.files, start)
                if len(known) == 1
                else folder_of([words for one in known for words in one], start)
            )
        return unknown(f"$({command.strip()})") if result is None else result.rstrip("\n")

    def _plain(self, node: Node) -> list[str] | None:
        if not isinstance(node, Simple) or any(isinstance(word, Array) for word in node.words):
            return None
        words = [word for word in node.words if isinstance(word, str)]
        fed = [r for r in node.redirects if r.text == "<<<"]
        extra = [self.scope.text(r.target) for r in fed]
        return [text for word in words for text in self.scope.fields(word)] + extra

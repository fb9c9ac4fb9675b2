"""The arguments of Megatron-LM and Megatron-DeepSpeed: `arguments.json` has all of them.

A row has the keys that an argument sets, or the reason why it has no key.

The arguments of one launch: read from words, with the types that their values must have.

The table of all arguments, docs/megatron.md: made from the tables that the conversion uses.
"""

import ast
import fnmatch
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipemega.compat.megatron.shell_words import names_of_unknown, shown
from pipemega.config.name_suggestions import did_you_mean, nearest

Kind = Literal["flag", "int", "float", "text", "list", "pattern"]
Effect = Literal["none", "differs", "refused"]


class Argument(NamedTuple):
    """An argument with a counterpart.

    Args:
        name: without `--`, with `-` for `_`.
        kind: number and type of its values.
        keys: config keys that it sets, separated by spaces; empty: another argument needs it.
        note: how the value is converted, for the table.
        aliases: names in other versions and forks.
    """

    name: str
    kind: Kind
    keys: str
    note: str = ""
    aliases: tuple[str, ...] = ()


class Absent(NamedTuple):
    """Arguments without a counterpart.

    Args:
        effect: "none": the training is the same without it; "differs": the same training, but a
            detail that the reason names; "refused": the config would train something else.
        why: no key is needed, or what to use.
        names: separated by spaces, with `*` for any text.
        harmless: values with which the argument changes nothing.
        needs: the argument without which it has no effect; empty: none.
    """

    effect: Effect
    why: str
    names: str
    harmless: tuple[str, ...] = ()
    needs: str = ""

    def has(self, name: str) -> bool:
        """Return whether the argument `name` is one of these."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names.split())


_TABLE = json.loads(Path(__file__).with_name("arguments.json").read_text(encoding="utf-8"))

SECTIONS: Mapping[str, tuple[Argument, ...]] = {
    section: tuple(
        Argument(**{"keys": "", **row, "aliases": tuple(row.get("aliases", ()))}) for row in rows
    )
    for section, rows in _TABLE["arguments"].items()
}
"""The arguments with a counterpart, by section of the page."""

ARGUMENTS: Mapping[str, Argument] = {
    name: argument
    for section in SECTIONS.values()
    for argument in section
    for name in (argument.name, *argument.aliases)
}

ABSENT = tuple(
    Absent(**{**row, "harmless": tuple(row.get("harmless", ()))}) for row in _TABLE["absent"]
)
"""All other arguments of Megatron-LM and Megatron-DeepSpeed; the first entry that fits counts."""


def absent(name: str) -> Absent | None:
    """Return the first entry that has the argument; None if it is not known at all."""
    return next((entry for entry in ABSENT if entry.has(name)), None)


def normalized(option: str) -> str:
    """Return the name of an option without `--`, and with `-` for `_`."""
    return option.lstrip("-").replace("_", "-")


_OPTION = re.compile(r"--?[A-Za-z][\w\-.]*(=.*)?", re.DOTALL)
Level = Literal["note", "changed", "ignored", "refused", "unknown"]


class Remark(NamedTuple):
    """A line about an argument, or about the whole launch (`argument` is empty).

    Args:
        level: "refused" and "unknown": the config does not train what the launch trains.
    """

    level: Level
    argument: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.argument}{': ' if self.argument else ''}{self.text}"


@dataclass
class Given:
    """The arguments of a launch by name, and what there is to say about them."""

    values: dict[str, list[str]]
    remarks: list[Remark] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_words(cls, words: Sequence[str]) -> "Given":
        """Read `--name value ...` and `--name=value`; the last one of a name counts."""
        given, stray = cls({}), []
        name: str | None = None
        for word in (_unquoted(word) for word in words if word.strip()):
            if _OPTION.fullmatch(word):
                option, equals, value = word.partition("=")
                name = _main_name(normalized(option))
                given.values[name] = [value] if equals else []
                given.written[name] = "--" + option.lstrip("-")
            elif name is None or not given._takes_more(name):
                stray.append(word)
            else:
                given.values[name].append(word)
        if stray:
            text = " ".join(dict.fromkeys(map(shown, stray)))
            given.say("note", "", f"words that belong to no argument were left out: {text}")
        return given

    def _takes_more(self, name: str) -> bool:
        known = ARGUMENTS.get(name)
        if known is None or known.kind == "list":
            return True
        return known.kind != "flag" and not self.values[name]

    def say(self, level: Level, name: str, text: str) -> None:
        """Add a line about the argument `name`."""
        shown_name = self.written.get(name, f"--{name}") if name else ""
        value = shown(" ".join(self.values.get(name, ()))) if name else ""
        value = value if len(value) <= 60 else value[:57] + "..."
        self.remarks.append(Remark(level, f"{shown_name} {value}".strip(), text))

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def flag(self, name: str) -> bool:
        """Return whether the flag is given; `--flag false` is not."""
        values = self.values.get(name)
        return values is not None and [v.lower() for v in values] not in (["false"], ["0"])

    def text(self, name: str, default: Any = None) -> Any:
        """Return the value as text; a part that the script does not determine as `$NAME`."""
        values = self.values.get(name)
        if not values:
            return default
        return shown(values[0])

    def number(self, name: str, default: Any = None) -> Any:
        """Return the value as int or float; the default if it cannot be read."""
        values = self.values.get(name)
        if values is None:
            return default
        kind: Callable[[str], float] = int if ARGUMENTS[name].kind == "int" else float
        try:
            return kind(values[0])
        except (ValueError, IndexError):
            self._unreadable(name, values)
            return default

    def numbers(self, name: str) -> list[int] | None:
        """Return the values as integers; None if the argument is not given."""
        values = self.values.get(name)
        try:
            return None if values is None else [int(value) for value in values]
        except ValueError:
            self._unreadable(name, values or [])
            return None

    def pattern(self, name: str) -> Any:
        """Return an integer or a list such as `([0]*3+[1]*58)`; None if it cannot be read."""
        values = self.values.get(name)
        if values is None:
            return None
        try:
            return _evaluated(ast.parse(values[0].strip(), mode="eval").body)
        except (SyntaxError, ValueError, TypeError, IndexError, RecursionError, MemoryError):
            self._unreadable(name, values)
            return None

    def _unreadable(self, name: str, values: list[str]) -> None:
        missing = [found for value in values for found in names_of_unknown(value)]
        if missing:
            set_it = [f"--var {text.lstrip('$')}=VALUE" for text in missing if text[1:].isalnum()
                      or text[1:].replace("_", "").isalnum()]  # fmt: skip
            way = f": give {' '.join(set_it)}" if set_it else ": give a script with its value"
            self.say("unknown", name, f"{', '.join(missing)} has no value in the script{way}")
        else:
            kind = _VALUES.get(ARGUMENTS[name].kind, "an integer")
            self.say("refused", name, f"the value must be {kind}")

    def differs(self, name: str, harmless: Iterable[str]) -> bool:
        """Return whether the argument is given with a value that is not in `harmless`."""
        values = self.values.get(name)
        if values is None or [value.lower() for value in values] == ["false"]:
            return False
        return not values or any(value not in harmless for value in values)

    def report_absent(self) -> None:
        """Say what happens to each argument that has no counterpart."""
        for name in self.values:
            if name in ARGUMENTS:
                continue
            entry = absent(name)
            if entry is None:
                near = did_you_mean(name, ARGUMENTS) if nearest(name, ARGUMENTS) else ""
                self.say("ignored", name, f"not an argument of Megatron-LM or its forks{near}")
            elif entry.needs and not self.differs(entry.needs, ("0", "1")):
                self.say("note", name, f"no effect without --{entry.needs}")
            elif not self.differs(name, entry.harmless):
                self.say("ignored", name, "this value is what pipemega does")
            elif entry.effect == "refused":
                self.say("refused", name, entry.why)
            else:
                self.say("changed" if entry.effect == "differs" else "ignored", name, entry.why)


_VALUES = {"float": "a number", "pattern": "an integer, or a list such as ([0]*3+[1]*58)"}
_LONGEST = 10_000


def _evaluated(node: ast.expr) -> Any:
    """Return the value of integers and lists with + and *.

    Raises:
        ValueError: the expression has other parts, or a list is too long.
        TypeError: an operator is between an integer and a list.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(element) for element in node.elts]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Mult):
        raise ValueError("only + and * are operators")
    left, right = _evaluated(node.left), _evaluated(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    sizes = [len(one) if isinstance(one, list) else one for one in (left, right)]
    if math.prod(sizes) > _LONGEST:
        raise ValueError("the list is too long")
    return left * right


def _unquoted(word: str) -> str:
    """Remove quotes around a word, which stay in words from `ARGS="--a 'b'"; cmd $ARGS`."""
    for mark in "'\"":
        if len(word) >= 2 and word[0] == word[-1] == mark:
            return word[1:-1]
    return word


def _main_name(name: str) -> str:
    known = ARGUMENTS.get(name)
    return known.name if known is not None else name


_HEAD = Path(__file__).with_name("argument_page.md")
_EFFECTS = {
    "refused": ("Refused", "`from-megatron` cannot convert these arguments. It prints the reason, "
                "which may name an alternative, and its exit code is 1."),
    "differs": ("Without a key: a detail of the training differs", "The training is the same, "
                "except for the detail that the reason names."),
    "none": ("Without a key, because none is needed", "The results do not depend on these."),
}  # fmt: skip


def argument_page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD.read_text(encoding="utf-8").rstrip()]
    for title, arguments in SECTIONS.items():
        lines += ["", f"## {title}", "", "| argument | key | value |", "| --- | --- | --- |"]
        lines += map(_row, arguments)
    for effect, (title, text) in _EFFECTS.items():
        lines += ["", f"## {title}", "", text, "", "| arguments | because |", "| --- | --- |"]
        lines += _absent_rows(effect)
    return "\n".join(lines) + "\n"


def _row(argument: Argument) -> str:
    names = ", ".join(f"`--{name}`" for name in (argument.name, *argument.aliases))
    keys = ", ".join(f"`{key}`" for key in argument.keys.split()) or "-"
    return f"| {names} | {keys} | {_escaped(argument.note)} |"


def _absent_rows(effect: str) -> Iterator[str]:
    for entry in ABSENT:
        if entry.effect == effect:
            names = ", ".join(f"`--{name}`" for name in entry.names.split())
            why = entry.why
            if entry.harmless:
                why += f" (accepted: {', '.join(f'`{value}`' for value in entry.harmless)})"
            if entry.needs:
                why += f" (no effect without `--{entry.needs}`)"
            yield f"| {names} | {_escaped(why)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")

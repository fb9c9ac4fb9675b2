"""The arguments of one launch: read from words, with the types that their values must have."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipemega.compat.megatron.absent_arguments import absent
from pipemega.compat.megatron.arguments import ARGUMENTS, normalized
from pipemega.compat.megatron.shell_words import names_of_unknown, shown
from pipemega.config.name_suggestions import did_you_mean, nearest

_OPTION = re.compile(r"--?[A-Za-z][\w\-.]*(=.*)?", re.DOTALL)
Level = Literal["note", "changed", "ignored", "refused", "unknown"]


class Remark(NamedTuple):
    """A line about an argument, or about the whole launch (`argument` is empty).

    Args:
        level: "refused" and "unknown" mean that the config is not that of the launch.
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

    def _unreadable(self, name: str, values: list[str]) -> None:
        missing = [found for value in values for found in names_of_unknown(value)]
        if missing:
            set_it = [f"--var {text.lstrip('$')}=VALUE" for text in missing if text[1:].isalnum()
                      or text[1:].replace("_", "").isalnum()]  # fmt: skip
            way = f": give {' '.join(set_it)}" if set_it else ": give a script with its value"
            self.say("unknown", name, f"{', '.join(missing)} has no value in the script{way}")
        else:
            kind = "an integer" if ARGUMENTS[name].kind in ("int", "list") else "a number"
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
            elif not self.differs(name, entry.harmless):
                self.say("ignored", name, "this value is what pipemega does")
            elif entry.effect == "refused":
                self.say("refused", name, entry.why)
            else:
                self.say("changed" if entry.effect == "differs" else "ignored", name, entry.why)


def _unquoted(word: str) -> str:
    """Remove quotes around a word, which stay in words from `ARGS="--a 'b'"; cmd $ARGS`."""
    for mark in "'\"":
        if len(word) >= 2 and word[0] == word[-1] == mark:
            return word[1:-1]
    return word


def _main_name(name: str) -> str:
    known = ARGUMENTS.get(name)
    return known.name if known is not None else name

"""Decide the conditions of a script: `[ ... ]` and `[[ ... ]]`."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pipemega.compat.megatron.shell_words import Scope, names_of_unknown

_NUMBERS: Mapping[str, Callable[[float, float], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\{[^}]*\}|\$\([^)]*\)|[^\s()])+|[()]""")


def condition_result(condition: str, scope: Scope) -> bool | None:
    """Return whether the condition holds; None if that is unknown.

    Args:
        condition: the text between the brackets.
    """
    words = _WORD.findall(condition)
    return _any(words, scope)


def _any(words: list[str], scope: Scope) -> bool | None:
    """`a || b`, `a -o b`."""
    results = [_every(part, scope) for part in _split(words, ("||", "-o"))]
    return True if True in results else None if None in results else False


def _every(words: list[str], scope: Scope) -> bool | None:
    """`a && b`, `a -a b`."""
    results = [_one(part, scope) for part in _split(words, ("&&", "-a"))]
    return False if False in results else None if None in results else True


def _split(words: list[str], operators: tuple[str, ...]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word == "(") - (word == ")")
        if word in operators and not depth:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _one(words: list[str], scope: Scope) -> bool | None:
    if words[:1] == ["!"]:
        result = _one(words[1:], scope)
        return None if result is None else not result
    if words[:1] == ["("] and words[-1:] == [")"]:
        return _any(words[1:-1], scope)
    if len(words) == 1:
        text = scope.text(words[0])
        return None if names_of_unknown(text) else bool(text)
    if len(words) == 2:
        return _of_one(words[0], scope.text(words[1]))
    if len(words) == 3:
        return _of_two(scope.text(words[0]), words[1], scope.text(words[2]))
    return None


def _of_one(test: str, text: str) -> bool | None:
    if names_of_unknown(text):
        # Text with an unknown part is still text.
        return {"-z": False, "-n": True}.get(test)
    if test in ("-z", "-n"):
        return bool(text) == (test == "-n")
    if test in ("-f", "-e", "-s", "-r"):
        return Path(text).is_file() or (test != "-f" and Path(text).exists())
    return Path(text).is_dir() if test == "-d" else None


def _of_two(left: str, test: str, right: str) -> bool | None:
    if names_of_unknown(left) or names_of_unknown(right):
        return None
    if test in _NUMBERS:
        try:
            return _NUMBERS[test](float(left or 0), float(right or 0))
        except ValueError:
            return None
    if test in ("=", "==", "!="):
        same = left == right or fnmatch.fnmatchcase(left, right)
        return same == (test != "!=")
    if test == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return {"<": left < right, ">": left > right}.get(test)

"""The output of simple programs: echo, printf, expr, bc, basename, dirname, pwd, cat and sed."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from pipemega.compat.megatron.shell_words import calculate, names_of_unknown


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
        folder: in which the script runs, if it is known.
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

"""From a config as the user wrote it to plain JSON values, and where each key stands.  Floor 1.

A file is JSON with //, /* */ and # comments and trailing commas, as DeepSpeed reads it.  Keys that
begin with `_comment` are dropped wherever they stand.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import json5

from pipemega.errors import ConfigError

KeyPath = tuple[str, ...]

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)
      | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<mark>[{}\[\],:])
      | (?P<word>[^\s{}\[\],:"'\#/]+)""",
    re.DOTALL | re.VERBOSE,
)


class Invalid(Exception):
    """A value that cannot be, before it is known in which file and line it stands."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class Source:
    """A config as plain values, and what a message needs to point at a place in it."""

    tree: Any
    name: str = ""
    lines: Mapping[KeyPath, Sequence[int]] = field(default_factory=dict)

    def at(self, path: KeyPath) -> str:
        """` (ds.json, line 7)`, or as much of that as is known."""
        lines = self.lines.get(path, ())
        numbers = f", line {' and '.join(map(str, lines))}" if lines else ""
        return f" ({self.name}{numbers})" if self.name else ""

    def error(self, invalid: Invalid) -> ConfigError:
        return ConfigError(f"{invalid}{self.at(invalid.path)}")


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """A path, a text that begins with `{`, or a mapping.

    Raises:
        ConfigError: no such file; no JSON; a key that is there twice; a number that JSON lacks.
    """
    if isinstance(source, Mapping):
        return _plain(Source(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a config is a path, a mapping or a Config, not {type(source).__name__}")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _plain(_parsed(source, "the given text"))
    path = Path(source)
    try:
        # utf-8-sig: editors on Windows begin a file with a mark that JSON does not know.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or a path that no file can have
        raise ConfigError(f"cannot read the config {str(path)!r}: {error}") from error
    return _plain(_parsed(text, str(path)))


def override(source: Source, overrides: Sequence[str]) -> Source:
    """The config with `a.b=value` written over it; a value that is no JSON is a text.

    Raises:
        ConfigError: there is no `=`, or the path goes through something that is no object.
    """
    tree = source.tree
    for text in overrides:
        name, equals, value = text.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {text!r}: write KEY=VALUE, such as pipeline.schedule=gpipe")
        tree = _with(tree, path, _value(value), text)
    named = [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]
    lines = {path: line for path, line in source.lines.items() if path not in named}
    return _plain(Source(tree, source.name, lines))


def _parsed(text: str, name: str) -> Source:
    # json5 knows no # comments.
    text = _TOKEN.sub(lambda m: "" if m[0].startswith("#") else m[0], text)
    try:
        tree = json5.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split()).removeprefix("<string>:")
        raise ConfigError(
            f"{name} is not JSON: line {said}"
            if said[:1].isdigit()
            else f"{name} is not JSON: {said or type(error).__name__}"
        ) from None
    return Source(tree, name, key_lines(text))


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys that were written twice."""

    def __init__(self, items: Iterable[tuple[str, Any]]) -> None:
        pairs = list(items)
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.twice = [key for key in self if keys.count(key) > 1]


def key_lines(text: str) -> dict[KeyPath, list[int]]:
    """The lines in which each key of a JSON text stands; objects in a list share its path."""
    found: dict[KeyPath, list[int]] = {}
    path: list[str] = []  # the keys of the open objects, down to the one that was read last
    depths: list[int] = []  # how long `path` was where each open bracket began
    line, end, last = 1, 0, ""
    for token in _TOKEN.finditer(text):
        line += text.count("\n", end, token.start())
        if token["mark"] in ("{", "["):
            depths.append(len(path))
        elif token["mark"] in ("}", "]") and depths:
            del path[depths.pop() :]
        elif token["mark"] == ":" and depths:
            del path[depths[-1] :]
            path.append(last)
            found.setdefault(tuple(path), []).append(line)
        elif token["text"] or token["word"]:
            last = _unquoted(token[0])
        end = token.start()
    return found


def _unquoted(token: str) -> str:
    if token[0] not in "\"'":
        return token
    try:
        return str(json.loads(f'"{token[1:-1]}"'))
    except ValueError:
        return token[1:-1]


def _plain(source: Source) -> Source:
    try:
        return Source(_copy(source.tree, ()), source.name, source.lines)
    except Invalid as invalid:
        raise source.error(invalid) from None
    except RecursionError:
        raise ConfigError("the config contains itself, or is nested too deeply") from None


def _copy(value: Any, path: KeyPath) -> Any:
    """`value` in dicts, tuples and plain values, without comments; nothing in it is shared."""
    if isinstance(value, Mapping):
        for key in getattr(value, "twice", ()):
            if not key.startswith("_comment"):
                raise Invalid((*path, key), f"key '{dotted((*path, key))}' is written twice")
        for key in value:
            if not isinstance(key, str):
                raise Invalid(path, f"{dotted(path)} has the key {key!r}: keys are texts")
        kept = {str(k): v for k, v in value.items() if not k.startswith("_comment")}
        return {key: _copy(below, (*path, key)) for key, below in kept.items()}
    if isinstance(value, list | tuple):
        return tuple(_copy(element, path) for element in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise Invalid(path, f"{dotted(path)} is {value}: a config has finite numbers only")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Invalid(path, f"{dotted(path)} is a {type(value).__name__}, which JSON does not have")


def _value(text: str) -> Any:
    try:
        return json5.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError):
        return text.strip()


def _with(tree: Any, path: KeyPath, value: Any, text: str) -> Any:
    if not path:
        return value
    below = {} if tree is None else tree
    if not isinstance(below, Mapping):
        raise ConfigError(f"--set {text!r}: there is {show(tree)} above '{path[0]}', and no object")
    return {**below, path[0]: _with(below.get(path[0]), path[1:], value, text)}


def dotted(path: KeyPath) -> str:
    return ".".join(path) or "the config"


def show(value: Any) -> str:
    """A value as JSON writes it, cut where it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

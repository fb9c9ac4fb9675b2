"""Read a config file: JSON values, and the line of each key for error messages.

A file is JSON with //, /* */ and # comments and trailing commas, as DeepSpeed reads it. Keys that
start with `_`, such as `_comment`, are dropped at any depth. A python file: see `python_source`.
"""

import base64
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import json5

from pipemega.config.python_source import run_python
from pipemega.errors import ConfigError

KeyPath = tuple[str, ...]

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)
      | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<mark>[{}\[\],:])
      | (?P<word>[^\s{}\[\],:"'\#/]+)""",
    re.DOTALL | re.VERBOSE,
)


class Invalid(NamedTuple):
    """An error of the key at `path`; `Source.error` adds file and line.

    Args:
        others: further keys that the error is about.
    """

    path: KeyPath
    message: str
    others: tuple[KeyPath, ...] = ()


@dataclass(frozen=True)
class Source:
    """A config as plain values, with the file name and the lines of its keys.

    Args:
        lines: of each key; empty for a key that an override set.
        errors: that were found while reading.
    """

    tree: Any
    name: str = ""
    lines: Mapping[KeyPath, Sequence[int]] = field(default_factory=dict)
    errors: tuple[Invalid, ...] = ()

    def error(self, errors: Sequence[Invalid]) -> ConfigError:
        """Return all errors as one, with file and lines, in the order of the lines."""
        if len(errors) == 1:
            lines = self._lines_of(errors[0])
            where = f" ({self.name}{', ' if lines else ''}{lines})" if self.name else ""
            return ConfigError(f"{errors[0].message}{where}")
        last = 1 + max((n for lines in self.lines.values() for n in lines), default=0)
        ordered = sorted(errors, key=lambda error: (*self._numbers_of(error), last)[0])
        problems = []
        for error in ordered:
            lines = self._lines_of(error)
            problems.append(f"{lines}: {error.message}" if lines else error.message)
        return all_problems(problems, self.name)

    def _numbers_of(self, error: Invalid) -> Sequence[int]:
        """Return the lines of the first of its keys that the file has, or of the section."""
        others = [path for path in error.others if not self._is_object(path)]
        above = [error.path[:depth] for depth in range(len(error.path) - 1, 0, -1)]
        paths = (error.path, *others, *above)
        return next((self.lines[path] for path in paths if path in self.lines), ())

    def _lines_of(self, error: Invalid) -> str:
        numbers = self._numbers_of(error)
        plural = "s" if len(numbers) > 1 else ""
        return f"line{plural} {' and '.join(map(str, numbers))}" if numbers else ""

    def _is_object(self, path: KeyPath) -> bool:
        value = self.tree
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return isinstance(value, Mapping)


def all_problems(problems: Sequence[str], name: str = "") -> ConfigError:
    """Return one error with a line for each problem; `name` is that of the config's file."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    title = f"{name or 'the config'} has {len(problems)} errors:"
    return ConfigError("\n  ".join((title, *problems)), problems=tuple(problems))


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """Read a path, a text that starts with `{` (also in base64, as DeepSpeed), or a mapping.

    A file that ends with .py runs.

    Raises:
        ConfigError: the file does not exist, is not JSON, or contains itself; a python file fails.
    """
    if isinstance(source, Mapping):
        return _plain(Source(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a config is a path, a mapping or a Config, not {type(source).__name__}",
            on_every_rank=True,
        )
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _plain(_parsed(source, "the given text"))
    if isinstance(source, str) and (decoded := _decoded(source)) is not None:
        return _plain(_parsed(decoded, "the given base64 text"))
    path = Path(source)
    if path.suffix == ".py":
        tree, lines = run_python(path)
        return _plain(Source(tree, str(path), lines))
    if path.suffix in (".yaml", ".yml", ".toml"):
        raise ConfigError(
            f"the config {str(path)!r} has the format of {path.suffix}: write JSON, JSON5, or a "
            "python file with the same keys"
        )
    try:
        # utf-8-sig: Windows editors write a byte order mark, which JSON does not allow.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or an invalid path
        raise ConfigError(f"cannot read the config {str(path)!r}: {error}") from error
    return _plain(_parsed(text, str(path)))


def override(source: Source, overrides: Sequence[str]) -> Source:
    """Set keys by `a.b=value`; a value that is not JSON is text.

    Raises:
        ConfigError: `=` is missing, or a part of the path is not an object.
    """
    tree = source.tree
    for text in overrides:
        name, equals, value = text.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {text!r}: write KEY=VALUE, such as pipeline.schedule=gpipe")
        tree = _with(tree, path, _value(value), text)
    named = [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]
    kept = [e for e in source.errors if not any(e.path[: len(path)] == path for path in named)]
    lines = {**source.lines, **dict.fromkeys(named, ())}
    return _plain(Source(tree, source.name, lines, tuple(kept)))


def _decoded(text: str) -> str | None:
    """Return the JSON text that base64 text contains, else None."""
    # Objects start with "{", which base64 writes as "e" and one of w, x, y and z.
    if not re.fullmatch(r"e[w-z][\w+/\-]{6,}={0,2}", text.strip()):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text.strip().replace("+", "-").replace("/", "_"))
        return decoded.decode() if decoded.lstrip()[:1] == b"{" else None
    except ValueError:
        return None


def _parsed(text: str, name: str) -> Source:
    try:
        tree = _json(text)
    except RecursionError:
        raise ConfigError(f"{name} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        reason = " ".join(str(error).split()).removeprefix("<string>:")
        raise ConfigError(
            f"{name} is not JSON: line {reason}"
            if reason[:1].isdigit()
            else f"{name} is not JSON: {reason or type(error).__name__}"
        ) from None
    return Source(tree, name, key_lines(text))


def _json(text: str) -> Any:
    try:
        # json5 needs a minute for 3 MB.
        return json.loads(text, object_pairs_hook=_Object)
    except ValueError:
        # json5 does not support # comments.
        text = _TOKEN.sub(lambda m: "" if m[0].startswith("#") else m[0], text)
    with suppress(ValueError):
        # JSON with comments, such as the configs here: json5 needs 20 ms for 2 KB.
        plain = _TOKEN.sub(lambda m: " " if m["comment"] else m[0], text)
        return json.loads(plain, object_pairs_hook=_Object)
    return json5.loads(text, object_pairs_hook=_Object)


class _Object(dict[str, Any]):
    """A JSON object that records which keys occur twice."""

    def __init__(self, items: Iterable[tuple[str, Any]]) -> None:
        pairs = list(items)
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        many = len(keys) > len(self)
        self.duplicates = [key for key in self if keys.count(key) > 1] if many else []


def key_lines(text: str) -> dict[KeyPath, list[int]]:
    """Return the lines of each key of a JSON text; objects in a list share the path of the list."""
    found: dict[KeyPath, list[int]] = {}
    path: list[str] = []  # keys of the open objects, down to the last key read
    depths: list[int] = []  # length of `path` at each open bracket
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
    errors = list(source.errors)
    try:
        tree = _copy(source.tree, (), errors)
    except RecursionError:
        raise ConfigError("the config contains itself, or is nested too deeply") from None
    return Source(tree, source.name, source.lines, tuple(errors))


def _copy(value: Any, path: KeyPath, errors: list[Invalid]) -> Any:
    """Deep-copy `value` into dicts, tuples and plain values, without comment keys."""
    if isinstance(value, Mapping):
        for key in getattr(value, "duplicates", ()):
            if not key.startswith("_"):
                where = (*path, key)
                errors.append(Invalid(where, f"key '{dotted(where)}' occurs twice"))
        copied = {}
        for key, below in value.items():
            if not isinstance(key, str):
                message = f"{dotted(path)} has the key {key!r}: keys must be text"
                errors.append(Invalid(path, message))
            elif not key.startswith("_"):
                copied[str(key)] = _copy(below, (*path, key), errors)
        return copied
    if isinstance(value, list | tuple):
        return tuple(_copy(element, path, errors) for element in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        errors.append(Invalid(path, f"{dotted(path)} is {value}: numbers must be finite"))
        return 0.0
    if value is None or isinstance(value, bool | int | float | str):
        return value
    message = f"{dotted(path)} is of type {type(value).__name__}, which JSON does not have"
    errors.append(Invalid(path, message))
    return None


def _value(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=_Object)
    try:
        return json5.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError):
        return text.strip()


def _with(tree: Any, path: KeyPath, value: Any, text: str) -> Any:
    if not path:
        return value
    below = {} if tree is None else tree
    if not isinstance(below, Mapping):
        raise ConfigError(f"--set {text!r}: '{path[0]}' needs an object above it, not {show(tree)}")
    return {**below, path[0]: _with(below.get(path[0]), path[1:], value, text)}


def dotted(path: KeyPath) -> str:
    """Return the path of a key as text: `pipeline.schedule`."""
    return ".".join(path) or "the config"


def show(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

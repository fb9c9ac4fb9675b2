"""Read a config file: JSON values, and the line of each key for error messages.

A file is JSON with //, /* */ and # comments and trailing commas, as DeepSpeed reads it. Keys that
start with `_`, such as `_comment`, are dropped at any depth. A python file: see `python_source`.

Read a config from a Python file: its values, and the lines of its keys.

The file runs, so it may compute values, and must be trusted as any other script. Its names are the
keys:

    train_batch_size = 64
    mesh = dict(pipeline=2, tensor=2)
    BATCH_SIZE = 16                 # upper case: a value of your own, config.user.BATCH_SIZE
    _half = train_batch_size // 2   # starts with _: no key

Or one of them, `config` or `CONFIG`, is a dict with the keys; then its other names are no keys.
Imported modules, functions and classes are no keys.
"""

import ast
import base64
import json
import math
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import json5

from pipemega.errors import ConfigError

# Names of a dict with the whole config.
_WHOLE = ("config", "CONFIG")

# Upper-case names with a meaning in configs of Colossal-AI: as keys they are errors that name ours.
_COLOSSAL = ("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE")

# Modules that configs have imported from their own folders -> the folder.
_NEIGHBOURS: dict[str, str] = {}


def run_python(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], list[int]]]:
    """Run the file; return the config as a dict, and the lines of its keys.

    Raises:
        ConfigError: the file raises an error; the message has its line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        names = _run(path)
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the config {path} failed: {_reason(error, path)}") from error
    lines = dict(_lines(ast.parse(text)))
    for name in _WHOLE:
        if isinstance(whole := names.get(name), Mapping):
            return dict(whole), {key[1:]: n for key, n in lines.items() if key[0] == name}
    return _with_user(names), {
        ("user", *key) if _is_own(key[0]) else key: n for key, n in lines.items()
    }


def _run(path: Path) -> dict[str, Any]:
    """Run the file, which may import modules of its own folder; return its public names."""
    folder = str(path.absolute().parent)
    _forget_neighbours_of_others(folder)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        names = runpy.run_path(str(path), run_name="config")
    finally:
        sys.path.remove(folder)
        imported = {name for name in set(sys.modules) - before if _is_in(name, folder)}
        _NEIGHBOURS.update(dict.fromkeys(imported, folder))
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_")
        and (isinstance(value, Mapping) or not (callable(value) or isinstance(value, ModuleType)))
    }


def _forget_neighbours_of_others(folder: str) -> None:
    """Remove modules that configs of other folders have imported, where this folder has its own."""
    names = {name for name, of in _NEIGHBOURS.items() if of != folder and _is_in(name, folder)}
    for module in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[module]


def _is_in(name: str, folder: str) -> bool:
    return any(Path(folder, file).exists() for file in (f"{name}.py", f"{name}/__init__.py"))


def _reason(error: BaseException, path: Path) -> str:
    """Return the error with the line of the file in which it was raised."""
    # The text of a SyntaxError has the line.
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    where = f" (line {own[-1].lineno}: {own[-1].line})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_own(name: str) -> bool:
    return name.isupper() and name not in _COLOSSAL


def _with_user(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names as keys; those in upper case in the section `user`."""
    config = {name: value for name, value in names.items() if not _is_own(name)}
    own = {name: value for name, value in names.items() if _is_own(name)}
    user = config.get("user", {})
    if own and isinstance(user, Mapping):
        config["user"] = {**own, **user}
    return config


def _lines(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], list[int]]]:
    """Yield the keys that the file assigns, with their lines."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield (target.id,), [target.lineno]
                yield from _lines_below(value, (target.id,))


def _lines_below(
    value: ast.expr, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[int]]]:
    """Yield the keys of a dict, written {...} or dict(...)."""
    pairs: list[tuple[str, int, ast.expr]] = []
    if isinstance(value, ast.Dict):
        for key, below in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                pairs.append((key.value, key.lineno, below))
    elif isinstance(value, ast.Call):
        pairs = [(word.arg, word.lineno, word.value) for word in value.keywords if word.arg]
    for name, line, below in pairs:
        yield (*path, name), [line]
        yield from _lines_below(below, (*path, name))


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
        lines: line numbers of each key; empty for a key that an override set.
        errors: errors that were found while reading.
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
    """Return one error with a line for each problem; `name` is the name of the config's file."""
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

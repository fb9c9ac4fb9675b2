"""Read a config from a Python file: its values, and the lines of its keys.

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
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

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

"""The modules of DeepSpeed, such as `deepspeed.runtime.pipe.topology`, made from `names.json`.

All of them are in `sys.modules` below `pipemega.compat.deepspeed`; after `install_as_deepspeed`
also below `deepspeed`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pipemega.config.name_suggestions import did_you_mean
from pipemega.errors import ConfigError

_HERE = __name__.rpartition(".")[0]
_TABLE = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))

MODULES: Mapping[str, Mapping[str, str]] = _TABLE["modules"]
"""Module of DeepSpeed -> name -> "module" or "module:name"; ".module" is in this package.

Modules below another one are its attributes.
"""
DELEGATES: Mapping[str, str] = _TABLE["delegates"]
"""Module of DeepSpeed -> the module that has its other names."""
REFUSED: Mapping[str, str] = _TABLE["refused"]
"""Path in DeepSpeed -> why it cannot be used. Scripts that do not use it import it, too."""
ADVICE: Mapping[str, str] = _TABLE["advice"]
"""Path in DeepSpeed -> what to use instead; "a.b.*": of each other name in a.b."""
ENGINE_ADVICE: Mapping[str, dict[str, str]] = _TABLE["engine_advice"]
"""Class of an engine -> name that it does not have -> what to use instead."""

_THEIRS = "deepspeed"
_RESERVED = ("__path__", "__file__", "__all__", "__wrapped__")


class _VirtualModule(ModuleType):
    """A module of DeepSpeed: its names are looked up in the table."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{_HERE}.{path}", f"DeepSpeed's module {path}, over pipemega.")
        self.__package__ = self.__name__
        self.__path__: list[str] = []
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return attribute(self._path, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_in(self._path)})


class _MissingModules(MetaPathFinder):
    """Comes last: says what to use instead of a module of DeepSpeed that does not exist here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for root in (_HERE, _THEIRS):
            ours = sys.modules.get(root) is sys.modules.get(_HERE)
            if ours and fullname.startswith(f"{root}."):
                # Not ModuleNotFoundError: `from package import name` would replace its text.
                raise ImportError(_missing(fullname.removeprefix(f"{root}.")), name=fullname)
        return None


def create_modules() -> None:
    """Put the modules of the table into `sys.modules`, below the name of this package."""
    for path in MODULES:
        if path:
            sys.modules[f"{_HERE}.{path}"] = _VirtualModule(path)
    sys.meta_path.append(_MissingModules())


def install_as_deepspeed() -> None:
    """Let imports of `deepspeed` and of its modules find the modules of this package."""
    sys.modules[_THEIRS] = sys.modules[_HERE]
    for path in MODULES:
        if path:
            sys.modules[f"{_THEIRS}.{path}"] = sys.modules[f"{_HERE}.{path}"]


def names_in(path: str) -> list[str]:
    """Return the names of a module of DeepSpeed that exist here."""
    below = [
        module.removeprefix(f"{path}.") if path else module
        for module in MODULES
        if module and (not path or module.startswith(f"{path}."))
    ]
    return sorted({*MODULES[path], *(name for name in below if "." not in name)})


def attribute(path: str, name: str) -> Any:
    """Return `name` of DeepSpeed's module `path`.

    Raises:
        AttributeError: it does not exist here; says what to use instead.
    """
    target = MODULES[path].get(name)
    if target is not None:
        module, _, attribute_name = target.partition(":")
        found = import_module(module, _HERE)
        return getattr(found, attribute_name) if attribute_name else found
    below = f"{path}.{name}" if path else name
    if below in MODULES:
        return sys.modules[f"{_HERE}.{below}"]
    if below in REFUSED:
        return _refused(below)
    if name in _RESERVED:
        raise AttributeError(name)
    if path in DELEGATES:
        delegate = import_module(DELEGATES[path])
        if hasattr(delegate, name):
            return getattr(delegate, name)
    raise AttributeError(_missing(below))


@cache
def _refused(path: str) -> type:
    """Return a class for a name that can be imported, but neither built nor called.

    Raises:
        ConfigError: the class is called; the text says why that is refused.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"deepspeed.{path}: {REFUSED[path]}", on_every_rank=True)

    return type(path.rpartition(".")[2], (), {"__init__": refuse})


def _missing(path: str) -> str:
    """Return what to use instead of a name or module of DeepSpeed."""
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        known = ".".join(parts[:depth])
        if known in ADVICE:
            return f"pipemega.compat.deepspeed has no {path!r}: {ADVICE[known]}"
        if (below := f"{known.rpartition('.')[0]}.*".lstrip(".")) in ADVICE:
            return f"pipemega.compat.deepspeed has no {path!r}: {ADVICE[below]}"
    module, _, name = path.rpartition(".")
    hint = did_you_mean(name, names_in(module)) if module in MODULES else ""
    return (
        f"pipemega.compat.deepspeed has no {path!r}{hint}; docs/coming_from.md lists the names "
        "that exist, and what replaces others"
    )

"""Imports of modules when they are first used, so that a run starts without what it does not use.

    if TYPE_CHECKING:
        from pipemega.checkpoint import dcp_storage
    else:
        dcp_storage = deferred("pipemega.checkpoint.dcp_storage")

A type checker and the tests of the import layers see an ordinary import. Annotations with a name
of such a module are written as strings.

The version is here too: setup.py runs this module without importing the package.
"""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    """Has the attributes of a module, and imports it when one of them is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def deferred(name: str) -> Any:
    """Return a stand-in for the module `name`, which imports it when an attribute is read."""
    return _Deferred(name)


def load_name(path: str) -> Any:
    """Return the object `module:name`, importing its module.

    For a table of what not every run uses: the core names a leaf there, and does not import it.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_first(name: str) -> ModuleType:
    """Import a module without collections of garbage meanwhile, and torch with it if it needs it.

    The modules of torch are 400,000 objects, none of them garbage, which each full collection
    reads: a tenth of the time of the imports. Later collections do not read what exists after this
    import either, unless torch was imported before: there may be tensors, and the collector has to
    free those as always.
    """
    enabled, had_torch = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        return import_module(name)
    finally:
        if not had_torch:
            gc.freeze()
        if enabled:
            gc.enable()


__version__ = "0.1.0"

"""Functions that `pipemega.run` calls when a script has ended without an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_Hooks = list[Callable[[], None]]

# None outside of `collect_exit_hooks`, as in a script without `pipemega.run`.
_hooks: ContextVar[_Hooks | None] = ContextVar("exit hooks", default=None)


@contextmanager
def collect_exit_hooks() -> Iterator[_Hooks]:
    """Yield the list to which `register_exit_hook` adds within the block."""
    hooks: _Hooks = []
    token = _hooks.set(hooks)
    try:
        yield hooks
    finally:
        _hooks.reset(token)


def exit_hooks_enabled() -> bool:
    """Return whether `pipemega.run` will call the hooks."""
    return _hooks.get() is not None


def register_exit_hook(hook: Callable[[], None]) -> None:
    """Make `pipemega.run` call `hook`, after the hooks registered before; else do nothing.

    All ranks must register the same hooks in the same order: they may be collective.
    """
    hooks = _hooks.get()
    if hooks is not None:
        hooks.append(hook)

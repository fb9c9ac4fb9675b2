"""What has to be done before a script ends in order: `pipemega.run` does it, whoever asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_Actions = list[Callable[[], None]]

# None outside of `collecting`: a script without `pipemega.run` ends by itself.
_actions: ContextVar[_Actions | None] = ContextVar("actions before the end", default=None)


@contextmanager
def collecting() -> Iterator[_Actions]:
    """Within, `before_the_end` adds to the list that this gives."""
    actions: _Actions = []
    token = _actions.set(actions)
    try:
        yield actions
    finally:
        _actions.reset(token)


def are_collected() -> bool:
    """Whether `pipemega.run` will do what `before_the_end` is given."""
    return _actions.get() is not None


def before_the_end(action: Callable[[], None]) -> None:
    """Lets `pipemega.run` call `action` when the script has ended without an error.

    On all ranks in the order in which they asked; does nothing outside of `pipemega.run`.
    """
    actions = _actions.get()
    if actions is not None:
        actions.append(action)

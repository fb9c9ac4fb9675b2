"""Run a generator in a thread, ahead of its consumer or on demand, with a timeout."""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pipemega.errors import DataError

T = TypeVar("T")


def data_timeout(seconds: float, current: str) -> DataError:
    """Return the error of a data wait that timed out; `current` says what was being read."""
    return DataError(
        f"no data came within {seconds:g} s: {current}; if the data is only slow, raise "
        "mesh.timeout_seconds"
    )


@dataclass(frozen=True)
class _End:
    """End marker: the generator ended, or failed with `error`."""

    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """Take items from a generator in a thread, up to `depth` in advance.

    Args:
        items: the generator; runs and is closed in the thread.
        depth: maximum number of buffered items; 2 is a double buffer; 0: the generator runs only
            while the consumer waits.
        current: returns what is being read, for the message of a timeout.
        timeout_seconds: maximum wait of the consumer for one item.
    """

    def __init__(
        self,
        items: Generator[T, None, None],
        depth: int,
        current: Callable[[], str],
        timeout_seconds: float,
    ) -> None:
        self._items = items
        self._depth = depth
        self._current = current
        self._timeout = timeout_seconds
        self._ready: deque[T | _End] = deque()
        self._changed = threading.Condition()
        self._wanted = False
        self._closed = False
        self._stuck = False
        _running.add(self)
        # A daemon: a dataset that blocks must not prevent the interpreter's exit.
        self._thread = threading.Thread(target=self._work, name="data-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> T:
        """Return the next item.

        Raises:
            StopIteration: no item is left; raised again on every later call.
            DataError: the wait timed out.
            Exception: the error of the generator; raised again on every later call.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            while not self._ready and not self._closed:
                if not self._changed.wait(deadline - time.monotonic()):
                    self._stuck = True
                    raise data_timeout(self._timeout, self._current())
            if self._closed:
                raise DataError("the loader was closed")
            item = self._ready[0]
            if not isinstance(item, _End):
                self._ready.popleft()
                self._changed.notify_all()
                return item
        if item.error is None:
            raise StopIteration
        raise item.error

    def close(self, wait_seconds: float = 5.0) -> None:
        """Stop the thread and drop the buffered items.

        A thread that is blocked in a dataset is abandoned after `wait_seconds`, or at once if a
        wait for it timed out before: the other ranks wait for this rank's error.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(0.0 if self._stuck else wait_seconds)

    def _work(self) -> None:
        try:
            while self._wait_for_room():
                item = next(self._items, _End())
                self._put(item)
                if isinstance(item, _End):
                    return
        except BaseException as error:
            self._put(_End(error))
        finally:
            self._items.close()

    def _wait_for_room(self) -> bool:
        """Wait until an item may be read; False if the consumer has closed the buffer."""
        with self._changed:
            while len(self._ready) >= max(self._depth, self._wanted) and not self._closed:
                self._changed.wait()
            return not self._closed

    def _put(self, item: T | _End) -> None:
        with self._changed:
            self._wanted = False
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()


_running: "weakref.WeakSet[Prefetcher[Any]]" = weakref.WeakSet()


@atexit.register
def close_prefetchers() -> None:
    """Stop all threads before the teardown of the interpreter.

    A daemon thread that returns from a call of torch during the teardown aborts the process
    ("terminate called without an active exception", exit code -6).
    """
    for prefetcher in list(_running):
        prefetcher.close()

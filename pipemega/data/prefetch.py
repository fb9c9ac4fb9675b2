"""An iterator that works ahead in a thread: a bounded buffer between maker and taker."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipemega.errors import DataError

T = TypeVar("T")


def no_data_within(seconds: float, doing: str) -> DataError:
    """The error of a wait for data that took too long."""
    return DataError(f"no data came within {seconds:g} s: {doing}")


@dataclass(frozen=True)
class _End:
    """The iterator is through, or failed."""

    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """Takes up to `depth` items from a generator before they are asked for.

    Args:
        items: run in the thread, and closed there.
        depth: items that may wait; 2 is a double buffer.
        what: says what is being waited for, for the message of a wait that ends badly.
        timeout_seconds: how long the taker waits for one item.
    """

    def __init__(
        self,
        items: Generator[T, None, None],
        depth: int,
        what: Callable[[], str],
        timeout_seconds: float,
    ) -> None:
        self._items = items
        self._depth = depth
        self._what = what
        self._timeout = timeout_seconds
        self._ready: deque[T | _End] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._stuck = False
        # A dataset may block for ever, and must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._work, name="data-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> T:
        """The next item.

        Raises:
            StopIteration: there is none left; raised again on every later call.
            DataError: the wait took too long.
            Exception: what the generator raised; raised again on every later call.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while not self._ready and not self._closed:
                if not self._changed.wait(deadline - time.monotonic()):
                    self._stuck = True
                    raise no_data_within(self._timeout, self._what())
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
        """Stop the thread, drop what waits; a thread that is stuck in a dataset is left behind.

        At once if that is known: the other ranks are waiting to hear of it.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(0.0 if self._stuck else wait_seconds)

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(_End())
        except BaseException as error:
            self._put(_End(error))
        finally:
            self._items.close()

    def _put(self, item: T | _End) -> bool:
        """False when nobody will take it any more."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify_all()
            return True

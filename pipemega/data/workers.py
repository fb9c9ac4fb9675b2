"""Daemon threads that read samples in parallel."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

# Shorter than the wait in `Prefetcher.close`, whose thread closes the workers.
_CLOSE_SECONDS = 4.0


class Workers(Generic[T]):
    """A pool of daemon threads that run submitted calls in order.

    The interpreter joins threads of `concurrent.futures` at exit: a thread that is blocked in a
    dataset would keep the process, and its GPU, after the error was reported.

    Args:
        number: number of threads.
    """

    def __init__(self, number: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[T], Callable[[], T]] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"data-worker-{at}", daemon=True)
            for at in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call`; its result or error comes from `Future.result()`."""
        future: Future[T] = Future()
        self._tasks.put((future, call))
        return future

    def close(self) -> None:
        """Drop queued calls, and wait for the running ones, unless one is blocked in a dataset."""
        try:
            while True:
                self._tasks.get_nowait()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

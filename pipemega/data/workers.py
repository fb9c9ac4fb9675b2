"""Daemon threads that read samples in parallel."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Workers(Generic[T]):
    """A pool of daemon threads that run submitted calls in order.

    The interpreter joins threads of `concurrent.futures` at exit: a thread that is blocked in a
    dataset would keep the process, and its GPU, after the error was reported.

    Args:
        number: number of threads.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._tasks: queue.SimpleQueue[tuple[Future[T], Callable[[], T]] | None]
        self._tasks = queue.SimpleQueue()
        for at in range(number):
            name = f"data-worker-{at}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call`; its result or error comes from `Future.result()`."""
        future: Future[T] = Future()
        self._tasks.put((future, call))
        return future

    def close(self) -> None:
        """Drop queued calls; each thread ends after the call that it is running."""
        try:
            while True:
                self._tasks.get_nowait()
        except queue.Empty:
            pass
        for _ in range(self._number):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

"""Threads that read samples side by side, and never keep a process from ending."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Workers(Generic[T]):
    """Some daemon threads that call what they are given, in order.

    Those of `concurrent.futures` are waited for when the interpreter ends: one that is stuck in a
    dataset would hold a process, and with it a GPU, that has long said what is wrong.

    Args:
        number: of threads.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._tasks: queue.SimpleQueue[tuple[Future[T], Callable[[], T]] | None]
        self._tasks = queue.SimpleQueue()
        for at in range(number):
            name = f"data-worker-{at}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What `call` will have given; an error of it is raised by `result()`."""
        future: Future[T] = Future()
        self._tasks.put((future, call))
        return future

    def close(self) -> None:
        """Drops what has not begun, and lets the threads end when they come out of what has."""
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

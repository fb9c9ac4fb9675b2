"""Queues of operations: each runs its operations one after another, in the order of issue."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tests.ranks.nccl_like import SILENT

_ABORTED = "the process group was aborted"
_NOT_GIVEN = timedelta(0)


class Group(Protocol):
    """What a queue needs of its process group."""

    backend: str
    world: Any

    @property
    def timeout(self) -> timedelta: ...


class Operation(dist.Work):
    """One entry of a queue.

    Args:
        queue: its queue.
        name: for messages, as in "send (3,) float32 to rank 1".
        run: does the operation; blocks until it is complete.
    """

    def __init__(self, queue: "Queue", name: str, run: Callable[[], None]) -> None:
        super().__init__()
        self.name, self.run = name, run
        self._queue = queue
        self.deliver: Callable[[], object] | None = None
        """Called in the first `wait`, when the operation is complete."""
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def wait(self, timeout: timedelta = _NOT_GIVEN) -> bool:
        """Block the host until the operation is complete.

        Raises:
            RuntimeError: it timed out or failed, or its group was aborted.
        """
        limit = timeout if timeout > _NOT_GIVEN else self._queue.group.timeout
        if not self._done.wait(limit.total_seconds() / 2):
            # Now, so that it is there when a peer times out.
            self._queue.group.world.publish_heads()
            if not self._done.wait(limit.total_seconds() / 2):
                raise RuntimeError(
                    f"Timed out waiting {limit // timedelta(milliseconds=1)}ms for "
                    f"{self.name.split()[0]} operation to complete: {self.name}; first in this "
                    f"queue of {self._queue.group}: {self._queue.describe_heads()}"
                )
        if self._error is not None:
            raise RuntimeError(f"{self.name}: {self._error}") from self._error
        deliver, self.deliver = self.deliver, None
        if deliver is not None:
            deliver()
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error


class Queue:
    """Operations of one communicator, run one after another by a thread.

    Args:
        group: the process group.
        key: names the communicator; equal on all of its ranks.
        ranks: the global ranks of the communicator.
    """

    def __init__(self, group: Group, key: str, ranks: Sequence[int]) -> None:
        self.group, self.key, self.ranks = group, key, tuple(ranks)
        self._operations: deque[Operation] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._issued, self._aborted = 0, False

    def add(self, name: str, run: Callable[[], None]) -> Operation:
        with self._lock:
            self._issued += 1
            operation = Operation(self, f"{name} (operation {self._issued})", run)
            if self._aborted:
                operation.finish(RuntimeError(_ABORTED))
                return operation
            self._operations.append(operation)
            if len(self._operations) == 1:
                # A thread for as long as there are operations: most queues are idle.
                self._thread = threading.Thread(
                    target=self._run_all, args=(operation,), daemon=True
                )
                self._thread.start()
        return operation

    def _run_all(self, operation: Operation) -> None:
        """Run `operation`, which is the first, and all after it until none is left."""
        while True:
            error: Exception | None = None
            try:
                # Like the main thread within a collective; the mode belongs to a thread.
                with torch.no_grad():
                    operation.run()
            except Exception as raised:
                if not _is_lost(raised):
                    error = raised
                elif self.group.backend == SILENT:
                    return
                else:
                    error = RuntimeError("remote process exited or there was a network error")
            with self._lock:
                operation.finish(error)
                if self._aborted:
                    return
                self._operations.popleft()
                if not self._operations:
                    return
                operation = self._operations[0]

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def abort(self) -> None:
        """Fail all operations that are not complete."""
        with self._lock:
            self._aborted = True
            for operation in self._operations:
                operation.finish(RuntimeError(_ABORTED))
            self._operations.clear()

    def head(self) -> str | None:
        """Return the name of the first operation; None for an empty queue."""
        with self._lock:
            return self._operations[0].name if self._operations else None

    def describe_heads(self) -> str:
        """Return the first operation on each rank, as far as the ranks have published it."""
        heads = {rank: self.group.world.heads_of(rank) for rank in self.ranks}
        heads[self.group.world.rank] = {self.key: self.head()}
        texts = []
        for rank, published in heads.items():
            head = None if published is None else published.get(self.key)
            texts.append(f"rank {rank}: {head or 'nothing'}")
        return ", ".join(texts)


def _is_lost(error: Exception) -> bool:
    """Return whether gloo has lost the connection to a peer."""
    return any(part in str(error).lower() for part in ("connection", "pair closure"))

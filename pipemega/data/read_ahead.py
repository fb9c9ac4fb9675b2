"""Run a generator in threads, ahead of its consumer or on demand, with a timeout.

Worker processes that read micro-batches, run by torch's DataLoader.

They are started by multiprocessing's fork server, which has no threads, sockets or devices: a
process with these must not be forked, and a forked child would keep the sockets of a killed rank
open. The script is imported in each worker, so its statements must be guarded by
`if __name__ == "__main__":`.
"""

import atexit
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from pipemega.data.sample_reader import MicroBatch, SampleKey, SampleReader
from pipemega.distributed.process_groups import device_thread
from pipemega.errors import DataError

T = TypeVar("T")


@dataclass
class _Slot(Generic[T]):
    """The place of an item in the order of the generator: read, or being read.

    Attributes:
        item: the item, if it was read.
        error: why there is none; StopIteration: the generator ended.
    """

    is_read: bool = False
    item: T | None = None
    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """Take items from a generator in threads, up to `depth` in advance, and keep their order.

    The threads are daemons: the interpreter joins threads of `concurrent.futures` at exit, and one
    that is blocked in a dataset would keep the process, and its GPU, after the error was reported.

    Args:
        items: the generator; runs in one thread at a time, and is closed in a thread.
        finish: what the items still need; runs in all threads at the same time.
        depth: maximum number of items in advance; 2 is a double buffer; 0: the threads read only
            while the consumer waits.
        current: returns what is being read, for the message of a timeout.
        timeout_seconds: maximum wait of the consumer for one item.
        num_threads: number of threads.
    """

    def __init__(
        self,
        items: Generator[Any, None, None],
        finish: Callable[[Any], T],
        depth: int,
        current: Callable[[], str],
        timeout_seconds: float,
        num_threads: int = 1,
    ) -> None:
        self._items = items
        self._finish = finish
        self._depth = depth
        self._current = current
        self._timeout = timeout_seconds
        self._slots: deque[_Slot[T]] = deque()
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._wanted = False
        self._ended = False
        self._closed = False
        self._stuck = False
        _running.add(self)
        self._threads = [device_thread(self._work, "data-prefetch") for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def get(self) -> T:
        """Return the next item.

        Raises:
            StopIteration: no item is left; raised again on every later call.
            DataError: the wait timed out.
            Exception: the error of the generator or of `finish`; raised again on every later call.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            while not self._closed and not (self._slots and self._slots[0].is_read):
                if not self._changed.wait(deadline - time.monotonic()):
                    self._stuck = True
                    raise DataError(
                        f"no data came within {self._timeout:g} s: {self._current()}; if the data "
                        "is only slow, raise mesh.timeout_seconds"
                    )
            if self._closed:
                raise DataError("the loader was closed")
            slot = self._slots[0]
            if slot.error is not None:
                raise slot.error
            self._wanted = False
            self._slots.popleft()
            self._changed.notify_all()
        return cast(T, slot.item)

    def close(self, wait_seconds: float = 5.0) -> None:
        """Stop the threads and drop the items in advance.

        Threads that are blocked in a dataset are abandoned after `wait_seconds`, or at once if a
        wait for them timed out before: the other ranks wait for this rank's error.
        """
        with self._changed:
            self._closed = True
            self._slots.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + (0.0 if self._stuck else wait_seconds)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (slot := self._read()) is not None:
            with self._changed:
                slot.is_read = True
                self._changed.notify_all()
        with self._turn:
            self._items.close()

    def _read(self) -> _Slot[T] | None:
        """Read the next item; None if none is left, or the consumer has closed the buffer."""
        slot: _Slot[T] = _Slot()
        try:
            with self._turn:
                if not self._wait_for_room():
                    return None
                self._slots.append(slot)
                self._ended = True  # if the generator raises: no thread calls it again
                item = next(self._items)
                self._ended = False
            slot.item = self._finish(item)
        except BaseException as error:
            slot.error = error
        return slot

    def _wait_for_room(self) -> bool:
        """Wait until an item may be read; False if no item will be."""
        with self._changed:
            while not self._closed and not self._ended:
                if len(self._slots) < max(self._depth, self._wanted):
                    return True
                self._changed.wait()
            return False


_running: "weakref.WeakSet[Prefetcher[Any]]" = weakref.WeakSet()


@atexit.register
def close_prefetchers() -> None:
    """Stop all threads before the teardown of the interpreter.

    A daemon thread that returns from a call of torch during the teardown aborts the process
    ("terminate called without an active exception", exit code -6).
    """
    for prefetcher in list(_running):
        prefetcher.close()


# torchrun and job schedulers send these to all processes of a rank. The rank then finishes its
# step, for which it needs its workers.
_SIGNALS_OF_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_GUARD = (
    "a worker process imports the script: are its statements below `if __name__ == '__main__':`?"
)


class WorkerProcesses:
    """Processes that read the micro-batches of a map-style dataset.

    They end when this object is closed or deleted, and when the process that started them ends in
    any way.

    Args:
        reader: reader of the dataset; copied to each process.
        num_workers: number of processes.
        prefetch: micro-batches to read ahead; each process reads at least one.
    """

    def __init__(self, reader: SampleReader, num_workers: int, prefetch: int) -> None:
        self._reader, self._number, self._prefetch = reader, num_workers, prefetch
        self._running: deque[tuple[list[SampleKey], Any]] = deque()
        # DataLoader's iterators.
        self._started: list[Any] = []
        # Also called when the interpreter exits, before it waits for its child processes.
        self.kill = Finalize(self, _kill, (self._started,), exitpriority=10)

    @property
    def current(self) -> str:
        """Text that names the micro-batch that is needed next."""
        needed = self._next_samples()
        return f"{needed} are being read by {self._number} worker processes; {_GUARD}"

    def read(self, plans: Iterator[tuple[list[SampleKey], T]]) -> Iterator[tuple[MicroBatch, T]]:
        """Yield the micro-batch of each plan, in order, and what else the plan has.

        Raises:
            DataError: the dataset cannot be sent to a process, a sample cannot be read, or a
                process ended.
        """

        def sampler() -> Iterator[list[SampleKey]]:
            for plan in plans:
                self._running.append(plan)
                yield plan[0]

        outcomes = self._start(sampler())
        while True:
            try:
                outcome = next(outcomes)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:
                raise self._died(error) from error
            _, place = self._running.popleft()
            if isinstance(outcome, _Failure):
                raise DataError(f"{outcome.message}\n{outcome.trace}".rstrip())
            yield outcome, place

    def _start(self, sampler: Iterator[list[SampleKey]]) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            _Samples(self._reader),
            batch_size=None,
            sampler=sampler,
            collate_fn=_unchanged,
            num_workers=self._number,
            prefetch_factor=max(1, -(-self._prefetch // self._number)),
            multiprocessing_context="forkserver",
            worker_init_fn=_prepare_worker,
            # A generator of its own: the default one belongs to the model.
            generator=torch.Generator(),
        )
        try:
            with _block_signals(), warnings.catch_warnings():
                # torch advises to use `fork`, before it raises the error.
                warnings.filterwarnings("ignore", "Got pickle error")
                outcomes = iter(loader)
        except (EOFError, OSError) as error:
            raise DataError(
                f"data.num_workers is {self._number}, and no worker process could be started "
                f"({type(error).__name__}: {error}): see the output above; {_GUARD}"
            ) from error
        except Exception as error:  # pickle raises PicklingError, AttributeError or TypeError
            raise DataError(
                f"data.num_workers is {self._number}, but {self._reader.name} or its collate_fn "
                f"cannot be sent to a worker process: {error}; define their classes and functions "
                "at the top of a module, and open files on first use, or set data.num_workers to 0"
            ) from error
        self._started.append(outcomes)
        return outcomes

    def _died(self, error: Exception) -> DataError:
        return DataError(
            f"a worker process ended while {self._next_samples()} were read: {error}; see its "
            f"output above. It may have run out of memory (lower data.num_workers); or {_GUARD}"
        )

    def _next_samples(self) -> str:
        running = [*self._running]
        if not running:  # the processes are starting
            return f"the first samples of {self._reader.name}"
        indices = ", ".join(str(key.sample) for key in running[0][0])
        return f"samples {indices} of {self._reader.name}"


class _Failure(NamedTuple):
    """An error of a worker process."""

    message: str
    trace: str


class _Samples(Dataset[Any]):
    """The micro-batches of a reader, as a dataset for torch's DataLoader."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def __getitem__(self, keys: list[SampleKey]) -> MicroBatch | _Failure:
        try:
            return self._reader.micro_batch(keys)
        except DataError as error:
            return _Failure(str(error), _trace_of(error.__cause__))


def _trace_of(error: BaseException | None) -> str:
    """Return the traceback of an error of the user's code, without the frames of the reader."""
    if error is None:
        return ""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals["__name__"] == SampleReader.__module__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _unchanged(batch: Any) -> Any:
    return batch


def _prepare_worker(number: int) -> None:
    """End this process with the one that started it, however that ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_RANK)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block the signals that the fork server, started within the block, must not receive."""
    # Starting the resource tracker unblocks them.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(started: list[Any]) -> None:
    """Kill the processes; torch would wait for those that hang, and has no public name for them."""
    for outcomes in started:
        # A process that is killed while it reads this event keeps its lock, and the iterator would
        # wait for the lock when it is deleted.
        outcomes._workers_done_event = threading.Event()
        for process in outcomes._workers:
            process.kill()

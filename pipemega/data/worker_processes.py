"""Worker processes that read micro-batches, run by torch's DataLoader.

They are started by multiprocessing's fork server, which has no threads, sockets or devices: a
process with these must not be forked, and a forked child would keep the sockets of a killed rank
open. The script is imported in each worker, so its statements must be guarded by
`if __name__ == "__main__":`.
"""

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from pipemega.data.collate import MicroBatch
from pipemega.data.sample_order import SampleKey
from pipemega.data.sample_reader import SampleReader
from pipemega.errors import DataError

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
        reader: of the dataset; copied to each process.
        num_workers: number of processes.
        prefetch: micro-batches to read ahead; each process reads at least one.
    """

    def __init__(self, reader: SampleReader, num_workers: int, prefetch: int) -> None:
        self._reader, self._number, self._prefetch = reader, num_workers, prefetch
        self._running: deque[list[SampleKey]] = deque()
        # DataLoader's iterators.
        self._started: list[Any] = []
        # Also called when the interpreter exits, before it waits for its child processes.
        self.kill = Finalize(self, _kill, (self._started,), exitpriority=10)

    @property
    def current(self) -> str:
        """Text that names the micro-batch that is needed next."""
        needed = self._next_samples()
        return f"{needed} are being read by {self._number} worker processes; {_GUARD}"

    def read(self, keys: Iterator[list[SampleKey]]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of `keys`, in order.

        Raises:
            DataError: the dataset cannot be sent to a process, a sample cannot be read, or a
                process ended.
        """

        def sampler() -> Iterator[list[SampleKey]]:
            for which in keys:
                self._running.append(which)
                yield which

        outcomes = self._start(sampler())
        while True:
            try:
                outcome = next(outcomes)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:
                raise self._died(error) from error
            self._running.popleft()
            if isinstance(outcome, _Failure):
                raise DataError(f"{outcome.message}\n{outcome.trace}".rstrip())
            yield outcome

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
        indices = ", ".join(str(key.sample) for key in running[0])
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
    """Return the traceback of an error of the user's code, without the frame of the reader."""
    if error is None or error.__traceback__ is None:
        return ""
    frames = error.__traceback__.tb_next
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

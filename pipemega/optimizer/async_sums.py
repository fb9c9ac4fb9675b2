"""Sums over all ranks that run beside the work of the device and of the main thread.

    device        .. forwards | copy | backwards ..
    thread                      wait for the copy | all-reduce over gloo |
    main thread   starts all of these ..                     wait() before the sums are used

gloo needs the numbers on the host.  A thread waits for their copy, because the main thread must
continue to start work on the device.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.comm_recorder import recorded
from pipemega.distributed.host_memory import HostCopy, HostMemory
from pipemega.optimizer.step_outcome import GlobalStats

_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class AsyncSums:
    """One sum, which may still be on its way.

    Args:
        name: what is summed, for error messages.
        finish: returns the sums on the host as soon as they are there.
    """

    def __init__(self, name: str, finish: Callable[[], Tensor]) -> None:
        self._name, self._finish = name, finish
        self._sums: list[float] | None = None
        self._stats: GlobalStats | None = None

    def wait(self) -> GlobalStats:
        """Return the sums of a step's numbers over all ranks, as `sums`."""
        if self._stats is None:
            self._stats = GlobalStats.of(self.sums())
        return self._stats

    def sums(self) -> list[float]:
        """Return the sums over all ranks; block until every rank has contributed.

        Raises:
            PipelineError: the all-reduce failed or timed out.
        """
        if self._sums is None:
            with named_collective(f"{self._name}: the all-reduce over all ranks"):
                self._sums = self._finish().tolist()
        return self._sums


class HostSums:
    """Starts sums over all ranks; every rank starts the same ones in the same order.

    Args:
        memory: of the device of the numbers.
        group: all ranks, with the backend gloo; None with one rank.
    """

    def __init__(self, memory: HostMemory, group: dist.ProcessGroup | None) -> None:
        self._memory, self._group = memory, group
        self._jobs: _Jobs | None = None

    def start(self, name: str, local: Tensor) -> AsyncSums:
        """Start one sum.

        Args:
            name: what is summed, for error messages.
            local: this rank's contribution; only read.
        """
        copy = HostCopy(self._memory, local)
        group = self._group
        if group is None:
            return AsyncSums(name, copy.wait)
        # In order: after a sum that waits in the thread, no other may start before it.
        if self._jobs is None and copy.is_complete:
            sums = copy.wait()
            start = partial(dist.all_reduce, sums, group=group, async_op=True)
            work = recorded("all_reduce", sums.nbytes, group, start, on_host=True)
            return AsyncSums(name, lambda: _completed(work, sums))
        result: Future[Tensor] = Future()
        self._queue().put(lambda: _all_reduce_into(result, copy, group))
        return AsyncSums(name, result.result)

    def _queue(self) -> _Jobs:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: a rank that is gone must not keep this process from ending.
            threading.Thread(target=_run, args=(self._jobs,), name="sums", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        return self._jobs


def _completed(work: dist.Work | None, sums: Tensor) -> Tensor:
    assert work is not None
    work.wait()
    return sums


def _all_reduce_into(result: Future[Tensor], copy: HostCopy, group: dist.ProcessGroup) -> None:
    try:
        sums = copy.wait()
        run = partial(dist.all_reduce, sums, group=group)
        recorded("all_reduce", sums.nbytes, group, run, on_host=True)
        result.set_result(sums)
    # AsyncSums.wait raises it in the main thread.
    except BaseException as error:
        result.set_exception(error)


def _run(jobs: _Jobs) -> None:
    """Run jobs in their order until None."""
    while (job := jobs.get()) is not None:
        job()

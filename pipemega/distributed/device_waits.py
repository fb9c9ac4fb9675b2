"""Waits of the host for a CUDA device: with a deadline, and an error that names the communication.

With gloo, `work.wait()` blocks the host, and raises an error after the timeout. With NCCL it only
makes the current stream wait. If a peer is silent, the host notices nothing until it reads a value
from the device, and that read blocks until NCCL aborts the process. So `mark` records an event in
the stream after each wait of the stream, and `synchronize` polls before each read of the host:

    stream   compute | wait for message 1 | compute | wait for an all-reduce | compute
    marks                               m1                                 m2
    host     issues all of this, then `synchronize()`: polls until the stream has completed

The first mark that has not occurred tells what the device waits for. If that takes longer than
`mesh.timeout_seconds`, the host raises the error that a gloo wait at this place would raise.

The host may also be blocked in a kernel launch, because the queue of the device is full. A thread
then aborts the communicators a little later: the kernels end, and the host gets to the next mark.

On a CPU nothing is marked, and `synchronize` returns at once.

A clock of the current CUDA stream.

CUDA events in the current stream.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipemega.distributed.comm_errors import TIMED_OUT, comm_error, named_collective, with_ranks
from pipemega.distributed.process_groups import abort_communicators, device_thread
from pipemega.errors import Stopped


class Event(Protocol):
    """A point in a stream; occurs when all work before it is complete."""

    def query(self) -> bool:
        """Return whether it has occurred."""

    def synchronize(self) -> None:
        """Make the host wait until it occurs."""


def record_event(*, timing: bool = False) -> Any:
    """Record an event in the current stream, and return it.

    Args:
        timing: whether `elapsed_time` of two such events is wanted.
    """
    event = torch.get_device_module().Event(enable_timing=timing)
    event.record()
    return event


Describe = Callable[[RuntimeError], Exception]
"""Makes the error of a communication from its cause."""
Locate = Callable[[Exception], Exception]
"""Adds to an error where in the program it happened."""

# Between two polls: 1 / 64 of the time waited so far, within these limits. So a read is late by
# less than 2 %, and a long wait does not occupy a core.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3

# The thread checks this often, and acts this long after the deadline of the host.
_CHECK_SECONDS, _GRACE_SECONDS = 0.5, 5.0

# NCCL's own timeout, which aborts the process, is longer than mesh.timeout_seconds by this factor
# and these seconds. It counts from the issue of an operation, ours from the wait of the stream.
_NCCL_FACTOR, _NCCL_SECONDS = 1.25, 30.0


def nccl_timeout(timeout: timedelta) -> timedelta:
    """Return the timeout of NCCL's process groups for the timeout of the mesh."""
    return _NCCL_FACTOR * timeout + timedelta(seconds=_NCCL_SECONDS)


@dataclass(frozen=True)
class _Mark:
    """A wait of the stream.

    Args:
        event: occurs when the wait is over.
        since: when the host issued the wait.
        describe, locate: make the error.
    """

    event: Event
    since: float
    describe: Describe
    locate: Locate

    def error(self, text: str) -> Exception:
        cause = RuntimeError(text)
        described = self.describe(cause)
        described.__cause__ = cause
        return self.locate(described)


class DeviceWaits:
    """The waits of one stream that have not been seen to end.

    Args:
        timeout: longest time from the issue of a wait to its end.
        record: records an event in the current stream.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        timeout: timedelta,
        record: Callable[[], Event] = record_event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout = timeout
        self._record, self._clock = record, clock
        self._marks: deque[_Mark] = deque()
        self._failed: tuple[_Mark | None, str] | None = None

    def mark(self, describe: Describe, locate: Locate) -> None:
        """Record that the current stream waits for a communication.

        Raises:
            Exception: the first wait that has not ended has failed; `describe` and `locate` make
                the error.
        """
        # Two per mark: the queue shrinks while the device keeps up.
        for _ in range(2):
            if self._marks and self._marks[0].event.query():
                self._marks.popleft()
        self._marks.append(_Mark(self._record(), self._clock(), describe, locate))
        self._raise_failure()

    def synchronize(self, event: Event | None = None) -> None:
        """Wait until `event` occurs; by default, until the current stream has completed its work.

        Raises:
            Exception: the first wait that has not ended has timed out, or another rank has failed;
                `describe` and `locate` make the error.
            Stopped: the process got SIGTERM; the context of the exception is such an error.
        """
        awaited = self._record() if event is None else event
        try:
            self._poll(awaited)
        except Stopped as stopped:
            # SIGTERM, perhaps because the awaited rank was lost: the report names the wait.
            if (waiting := self._first()) is not None:
                stopped.__context__ = waiting.error("interrupted")
            raise
        # After an abort all events occur.
        self._raise_failure()
        # Another thread may wait for an `event`: only the thread of the stream removes marks.
        while event is None and self._marks and self._marks[0].event.query():
            self._marks.popleft()

    def _poll(self, event: Event) -> None:
        started = self._clock()
        while not event.query():
            self._raise_failure()
            if (late := self._late(0.0)) is not None:
                raise late.error(self._timed_out)
            waited = self._clock() - started
            time.sleep(min(max(waited / 64, _SHORTEST_PAUSE), _LONGEST_PAUSE))

    def fail(self, text: str) -> None:
        """Make the main thread raise an error at its next mark or wait; from any thread."""
        if self._failed is None:
            self._failed = self._first(), text

    def abort_if_late(self) -> bool:
        """Abort the communicators if the host has not noticed that a wait is too long."""
        late = self._late(_GRACE_SECONDS)
        if late is None:
            return False
        self._failed = self._failed or (late, self._timed_out)
        abort_communicators()
        return True

    @property
    def _timed_out(self) -> str:
        return f"{TIMED_OUT} ({self.timeout.total_seconds():g} s)"

    def _first(self) -> _Mark | None:
        """Return the first mark that has not occurred."""
        return next((mark for mark in list(self._marks) if not mark.event.query()), None)

    def _late(self, grace: float) -> _Mark | None:
        limit = self.timeout.total_seconds() + grace
        try:
            oldest = self._marks[0]
        except IndexError:  # not `if self._marks`: the thread of the stream may remove the last one
            return None
        if self._clock() - oldest.since < limit:
            return None
        first = self._first()
        return first if first is not None and self._clock() - first.since >= limit else None

    def _raise_failure(self) -> None:
        if self._failed is None:
            return
        mark, text = self._failed
        mark = mark or self._first()
        if mark is None:
            cause = RuntimeError(text)
            raise comm_error("a wait for the device", cause) from cause
        raise mark.error(text)


def _unlocated(error: Exception) -> Exception:
    return error


# Of this process: its engines use one device and its current stream. None on a CPU.
_waits: DeviceWaits | None = None
_locator: Callable[[], Locate] | None = None
_thread: threading.Thread | None = None


def watch_device(timeout: timedelta) -> None:
    """Mark the waits of the current stream of the current CUDA device from now on."""
    global _waits, _thread
    _waits = DeviceWaits(timeout)
    # It ends when it has aborted; the caller may start again with new process groups.
    if _thread is None or not _thread.is_alive():
        _thread = device_thread(_abort_when_late, "device-waits")
        _thread.start()


def _abort_when_late() -> None:
    while _waits is None or not _waits.abort_if_late():
        time.sleep(_CHECK_SECONDS)


def mark(describe: Describe) -> None:
    """Record that the current stream waits for a communication; do nothing on a CPU.

    Raises:
        Exception: an earlier wait has timed out, or another rank has failed.
    """
    if _waits is not None:
        _waits.mark(describe, _unlocated if _locator is None else _locator())


def synchronize(event: Event | None = None) -> None:
    """Wait for `event`, or until the current stream has completed its work.

    Call it before every read of the host from the device. Without `watch_device`, as on a CPU and
    in a run of one process, it waits for `event` only, without a deadline.

    Raises:
        Exception: the first communication that the device waits for has timed out, or another rank
            has failed.
    """
    if _waits is not None:
        _waits.synchronize(event)
    elif event is not None:
        event.synchronize()


def fail(text: str) -> None:
    """Make the main thread raise an error that ends with `text` where it waits for the device."""
    if _waits is not None:
        _waits.fail(text)


@contextmanager
def located_by(locator: Callable[[], Locate]) -> Iterator[None]:
    """Add the place to the errors of waits that are issued in the block.

    Args:
        locator: called at each wait; returns the function that adds the place to its error.
    """
    global _locator
    outer, _locator = _locator, locator
    try:
        yield
    finally:
        _locator = outer


def wait(work: dist.Work, what: str, ranks: Sequence[int] = ()) -> None:
    """Wait for a collective that was started earlier: the host with gloo, the stream with NCCL.

    Args:
        what, ranks: the arguments of `named_collective`.

    Raises:
        PipelineError: it failed or timed out.
    """
    with named_collective(what, ranks):
        work.wait()
    mark(lambda cause: comm_error(with_ranks(what, ranks), cause))


class StreamClock:
    """A `monitor.StepClock`: its instants are events in the current stream.

        host     now()  forward()  now()  ..                        durations([(a, b)])
        stream     a ------ kernels ------ b

    To read the host clock at an event would make the host wait in the middle of a step. The wait
    would include receives that are posted early, whose sender may wait for this rank.

    Args:
        clock: a monotonic clock of the host, in nanoseconds.
        record: records an event in the current stream, as `record_event`.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        record: Callable[..., Any] = record_event,
    ) -> None:
        self._clock, self.now = clock, partial(record, timing=True)

    def passed(self, instant: Any) -> bool:
        return bool(instant.query())

    def durations(self, intervals: Sequence[tuple[Any, Any]]) -> list[int]:
        if not intervals:
            return []
        synchronize(intervals[-1][1])
        return [_nanoseconds(start, end) for start, end in intervals]

    def times(self, instants: Sequence[Any]) -> list[int]:
        # An event that occurs while the host waits for it relates the two clocks.
        last = self.now()
        synchronize(last)
        at = self._clock()
        return [at - _nanoseconds(instant, last) for instant in instants]


def _nanoseconds(start: Any, end: Any) -> int:
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)

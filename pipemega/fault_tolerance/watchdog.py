"""Watchdog thread: reports what this rank is doing when other ranks wait for it.

A rank that hangs outside of a collective (a sample that is never read, an endless loop) waits for
no other rank, so no timeout ends it and no exception can be raised in it. The other ranks time out
and report that to the store. The watchdog polls the store and then publishes the location of its
rank: the instruction, and the Python stacks of the rank and of its data threads. If the rank still
runs when all others have ended, the watchdog ends the process.
"""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pipemega.distributed.device_waits import fail
from pipemega.distributed.mesh import launched_rank
from pipemega.distributed.process_groups import abort_communicators, runs_gloo
from pipemega.fault_tolerance.failure_store import FailureStore, call_with_deadline
from pipemega.fault_tolerance.final_report import report_from_thread

# Seconds between two polls. With many ranks the interval grows, so that the store answers at most
# this many polls per second. It must be well below the time in which ranks collect reports.
_POLL_SECONDS = 0.5
_POLLS_PER_SECOND = 4000.0

# How long a rank that others wait for may take to report its own error before it is ended.
_GRACE_SECONDS = 9.0

# How long it may take to notice that another rank has failed, before its communicators are aborted.
_NOTICE_SECONDS = 2.0

# Lines that are shown of a stack.
_STACK_LINES = 6

_DATA_THREAD = "data-prefetch"
_EXECUTOR = "pipemega.pipeline.executor"


@contextmanager
def watchdog() -> Iterator[None]:
    """Watch the calling thread while the block runs.

    Also enables faulthandler: a crash in C shows the Python line that led to it.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        with suppress(ValueError, OSError):
            faulthandler.enable(sys.__stderr__)
    thread = _Watchdog(threading.get_ident())
    try:
        yield
    finally:
        thread.close()


class _Watchdog:
    def __init__(self, watched: int) -> None:
        self._watched = watched
        self._finished = threading.Event()
        self._interval = _POLL_SECONDS
        self._store: FailureStore | None = None
        self._thread = threading.Thread(target=self._poll, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._finished.set()
        # A thread that is in a call of the store while the interpreter ends aborts the process.
        self._thread.join(_GRACE_SECONDS)

    def _poll(self) -> None:
        try:
            while not self._finished.wait(self._interval):
                if self._store is None:
                    self._connect()
                # The store may not answer: the dump must not fire while this thread waits for it.
                faulthandler.cancel_dump_traceback_later()
                if self._store is not None and _failure_known(self._store):
                    self._report(self._store)
                    return
                _schedule_stack_dump()
        except RuntimeError:
            if self._store is not None and not self._finished.wait(_GRACE_SECONDS):
                location = describe_thread(self._watched)
                _exit("the store of the process group is gone or does not respond", location)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _connect(self) -> None:
        """Connect to the store once the process group exists."""
        # The group may be destroyed at the same moment. If the connection fails, try again later.
        with suppress(ValueError, RuntimeError):
            self._store = FailureStore.connect()
            if self._store is not None:
                self._interval = max(_POLL_SECONDS, self._store.world_size / _POLLS_PER_SECOND)

    def _report(self, store: FailureStore) -> None:
        location = describe_thread(self._watched)
        store.publish_location(location)
        fail("connection closed: another rank has failed")
        if not self._finished.wait(_NOTICE_SECONDS) and not store.has_reported():
            # The main thread may wait for the device in a call that knows no deadline.
            abort_communicators()
        if self._finished.wait(_GRACE_SECONDS - _NOTICE_SECONDS) or store.has_reported():
            return
        cause = store.cause()
        if cause is None:
            _exit("another rank got no response from this rank", location)
        else:
            name = "" if cause.rank is None else f"rank {cause.rank}: "
            _exit(f"{name}{cause.message}", location)


def _exit(cause: str, location: str) -> None:
    """End the process; report the cause, and where its main thread was."""
    where = "" if location in cause else f"\n  (rank {launched_rank()} was {location})"
    report_from_thread(f"{cause}{where}")
    os._exit(1)


def _failure_known(store: FailureStore) -> bool:
    """Return whether a rank has reported a failure.

    Raises:
        RuntimeError: the store is gone, or has not answered for mesh.timeout_seconds: the process
            that holds it may be suspended, and a call of it knows no deadline.
    """
    seconds = (_timeout() or default_pg_timeout.total_seconds()) + _GRACE_SECONDS
    known: bool | None = call_with_deadline(store.failure_known, seconds, None)
    if known is None:
        raise RuntimeError("no answer")
    return known


def _timeout() -> float | None:
    """Return mesh.timeout_seconds; None without a process group of gloo."""
    group = dist.group.WORLD
    with suppress(RuntimeError, ValueError):
        if group is not None and runs_gloo(group):
            options = group._get_backend(torch.device("cpu")).options
            return float(options._timeout.total_seconds())
    return None


def _schedule_stack_dump() -> None:
    """Make faulthandler print all stacks if this thread cannot run for mesh.timeout_seconds.

    That happens while a call holds the GIL, which no Python thread can report.
    """
    timeout = _timeout()
    if timeout is None or sys.__stderr__ is None:
        return
    with suppress(RuntimeError, ValueError, OSError):
        timeout = max(timeout, 10 * _POLL_SECONDS)
        faulthandler.dump_traceback_later(timeout, file=sys.__stderr__)


def describe_thread(thread: int) -> str:
    """Return where a thread is: its instruction, and the Python stacks of it and the data threads.

    at F2@1, in read_block
          reader.py, line 12 in read_block: time.sleep(3600)
          ...
    """
    frames = sys._current_frames()
    if thread not in frames:
        return "finished: its thread has ended"
    instruction = _instruction(frames[thread])
    lines = _stack(frames[thread])
    for other in threading.enumerate():
        if other.name == _DATA_THREAD and other.ident in frames:
            lines += [f"thread {other.name}:", *_stack(frames[other.ident])]
    within = f"in {frames[thread].f_code.co_name}"
    first = within if instruction is None else f"at {instruction}, {within}"
    return "\n".join([first, *(f"      {line}" for line in lines)])


def _stack(frame: FrameType) -> list[str]:
    """Return the innermost lines of the stack, the innermost first."""
    stack = traceback.extract_stack(frame)[-_STACK_LINES:]
    return [
        f"{os.path.basename(line.filename)}, line {line.lineno} in {line.name}: {line.line}"
        for line in reversed(stack)
    ]


def _instruction(frame: FrameType | None) -> str | None:
    """Return the instruction that the executor on this stack is running; None if there is none."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _EXECUTOR and "step" in frame.f_locals:
            return str(frame.f_locals["step"])
        frame = frame.f_back
    return None

"""Failure reports in the store of the default process group.

    identity/RANK   process id and host of the rank
    cause           the first failure of the run; the first writer wins
    lost            how many ranks have reported a lost connection
    lost/N          the N-th of these reports
    reported/RANK   set when the rank has reported a failure or a lost connection
    location/RANK   the Python stack of a hanging rank, published by its watchdog thread
    printer         the rank that prints the error message; the first writer wins
    exits           how many ranks have reached the exit barrier

Every method that reads or writes the store raises RuntimeError if the store is gone, unless its
docstring says otherwise.

SIGTERM: from torchrun when another rank has failed, from a scheduler when the job must end.
"""

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipemega.errors import Stopped

T = TypeVar("T")

_PREFIX = "pipemega/failure"
_CAUSE, _LOST, _EXITS = f"{_PREFIX}/cause", f"{_PREFIX}/lost", f"{_PREFIX}/exits"
_PRINTER = f"{_PREFIX}/printer"

POLL_SECONDS = 0.02
_LAST_SECONDS = 0.5


@dataclass(frozen=True)
class FailureReport:
    """One failure.

    Args:
        rank: the rank that failed; None if the report is about ranks that cannot report.
        message: the error message.
        at: index of the instruction that the rank was executing; None outside of a step.
        missing: the ranks that did not report.
        summary: what happened to them, in one line; empty if no rank is missing.
    """

    rank: int | None
    message: str
    at: int | None = None
    missing: tuple[int, ...] = ()
    summary: str = ""

    @classmethod
    def of_json(cls, text: str | bytes) -> "FailureReport":
        values = json.loads(text)
        return cls(**{**values, "missing": tuple(values["missing"])})


class FailureStore:
    """Reads and writes the failure reports of a run.

    Args:
        store: a torch.distributed.Store that all ranks use.
        rank: the rank of this process.
        world_size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size

    @classmethod
    def connect(cls) -> "FailureStore | None":
        """Open a second connection to the store; None if torch.distributed runs no other rank.

        A store connection serves one thread: a call in it blocks all later calls.
        """
        store = default_store()
        if store is None:
            return None
        return cls(store.clone(), dist.get_rank(), dist.get_world_size())

    @classmethod
    def before_mesh(cls, message: str, seconds: float) -> "FailureStore":
        """Connect, before the process group exists, the ranks that fail with the same `message`.

        Raises:
            RuntimeError: there is no store, or not all ranks of a launcher without one have failed.
        """
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        digest = hashlib.sha256(message.encode()).hexdigest()
        prefixed = dist.PrefixStore(f"{_PREFIX}/{digest}", store)  # type: ignore[attr-defined]
        return cls(prefixed, rank, world_size)

    def publish_identity(self) -> None:
        """Store the process id and the host of this rank; do nothing if the store is gone."""
        with suppress(RuntimeError):
            self._store.set(f"{_PREFIX}/identity/{self.rank}", own_identity())

    def identity(self, rank: int) -> str:
        """Return "pid 4711 on node3"; "" if the rank has not started, or the store is gone."""
        return self._text(f"{_PREFIX}/identity/{rank}") or ""

    def claim_printing(self) -> bool:
        """Return whether this rank has to print the error message: the first that calls this."""
        return bool(
            self._store.compare_set(_PRINTER, "", str(self.rank)) == str(self.rank).encode()
        )

    def is_printed(self) -> bool:
        """Return whether a rank has claimed to print the error message."""
        return bool(self._store.check([_PRINTER]))

    def failure_known(self) -> bool:
        """Return whether a rank has reported a failure or a lost connection."""
        return any(self._store.check([key]) for key in (_CAUSE, f"{_LOST}/1"))

    def has_reported(self) -> bool:
        """Return whether this rank has reported a failure or a lost connection."""
        return bool(self._store.check([f"{_PREFIX}/reported/{self.rank}"]))

    def publish_cause(self, report: FailureReport) -> FailureReport:
        """Make `report` the cause unless one exists; return the cause.

        If the store is gone, return `report`.
        """
        try:
            self._mark_reported()
            stored = self._store.compare_set(_CAUSE, "", json.dumps(asdict(report)))
            return FailureReport.of_json(stored)
        except RuntimeError:
            return report

    def cause(self) -> FailureReport | None:
        """Return the cause; None if there is none, or the store is gone."""
        return self._read(_CAUSE)

    def report_lost_connection(self, report: FailureReport) -> None:
        self._mark_reported()
        number = self._store.add(_LOST, 1)
        self._store.set(f"{_LOST}/{number}", json.dumps(asdict(report)))

    def lost_connections(self) -> list[FailureReport]:
        """Return the reports of lost connections, the earliest first; [] if the store is gone."""
        with suppress(RuntimeError):
            count = self._store.add(_LOST, 0)
            reports = [self._read(f"{_LOST}/{number}") for number in range(1, count + 1)]
            return [report for report in reports if report is not None]
        return []

    def publish_location(self, location: str) -> None:
        """Store where this rank is in its program; do nothing if the store is gone."""
        with suppress(RuntimeError):
            self._store.set(f"{_PREFIX}/location/{self.rank}", location)

    def location(self, rank: int) -> str | None:
        """Return what `rank` published; None if it did not, or the store is gone."""
        return self._text(f"{_PREFIX}/location/{rank}")

    def exit_barrier(self, seconds: float, missing: int = 0) -> None:
        """Wait until all ranks have called this, for at most `seconds`, or the store is gone.

        Args:
            missing: how many ranks will not call it.
        """
        deadline, count = time.monotonic() + seconds, self.world_size - missing
        with suppress(RuntimeError):
            self._store.add(_EXITS, 1)
            while self._store.add(_EXITS, 0) < count and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        if self.rank == 0:
            # It may hold the store: in calls of the others torch would print its own stacks.
            time.sleep(_LAST_SECONDS)

    def _mark_reported(self) -> None:
        self._store.set(f"{_PREFIX}/reported/{self.rank}", "")

    def _text(self, key: str) -> str | None:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None

    def _read(self, key: str) -> FailureReport | None:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return FailureReport.of_json(self._store.get(key))
        return None


def default_store() -> Any:
    """Return the store of the default process group; None if it has fewer than two ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def own_identity() -> str:
    """Return the process id and the host of this rank, as in "pid 4711 on node3"."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def call_with_deadline(call: Callable[[], T], seconds: float, otherwise: T) -> T:
    """Return the result of `call`; `otherwise` if it takes longer, or raises an error.

    For calls of the store or of a disk, which may never return if a network link is cut.
    """
    results = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, name="failure-report", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


# How long a rank may run after SIGTERM before a thread ends it; and after it has begun to report
# why it ends, which takes several seconds.
_GRACE_SECONDS, _REPORT_SECONDS = 6.0, 15.0

# How often that thread checks whether another rank failed while this rank finishes its step.
_POLL_SECONDS = 0.5


def ignore_sigterm() -> None:
    """Do nothing at SIGTERM: the run is already ending, and must report why.

    Without `pipemega.run`, which reports it, SIGTERM still ends the process.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        # Not SIG_IGN: `SigtermWatch` has to see the signal.
        signal.signal(signal.SIGTERM, lambda *_: None)


@contextmanager
def raise_on_sigterm(
    may_continue: Callable[[], bool], report: Callable[[str], None]
) -> Iterator["SigtermWatch"]:
    """Turn SIGTERM into a `Stopped` exception, so that the rank can report why it ends.

    Python runs a signal handler between two bytecode instructions. A rank blocked in C++ never runs
    it; a thread force-exits such a rank after a grace period.

    Args:
        may_continue: returns whether the rank finishes its step after SIGTERM, unless another one
            failed.
        report: called with the reason before the process is ended.
    """
    watch = SigtermWatch(may_continue, report)
    if threading.current_thread() is not threading.main_thread():
        yield watch
        return

    def stop(number: int, frame: FrameType | None) -> None:
        ignore_sigterm()
        raise Stopped("stopped by SIGTERM")

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    old_handler = signal.signal(signal.SIGTERM, stop)
    old_wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch.run, args=(receiver,), daemon=True, name="sigterm").start()
    try:
        yield watch
    finally:
        watch.finished.set()
        signal.set_wakeup_fd(old_wakeup)
        # After a report the process ends with its own exit code, also if SIGTERM comes late.
        if not watch.reports:
            signal.signal(signal.SIGTERM, old_handler)
        sender.close()


class SigtermWatch:
    """Notices SIGTERM in a thread, whatever the main thread does.

    Args:
        may_continue, report: the arguments of `raise_on_sigterm`.

    Attributes:
        received: SIGTERM came.
        reports: this rank reports why the run ends.
        finished: an event that is set when the script has ended.
    """

    def __init__(self, may_continue: Callable[[], bool], report: Callable[[str], None]) -> None:
        self.received = self.reports = False
        self.finished = threading.Event()
        self._may_continue, self._report = may_continue, report
        self._grace_seconds = _GRACE_SECONDS

    def begin_report(self) -> None:
        """Ignore SIGTERM from now on: this rank reports why the run ends."""
        self._grace_seconds, self.reports = _REPORT_SECONDS, True
        ignore_sigterm()

    def wait(self, seconds: float) -> bool:
        """Return whether SIGTERM came, also if it comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.received and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.received

    def run(self, signals: socket.socket) -> None:
        """End the process if it still runs a grace period after SIGTERM.

        Args:
            signals: receives the number of each signal.
        """
        with signals:
            while (number := signals.recv(1)) != bytes([signal.SIGTERM]):
                if not number:
                    return
        self.received = True
        # A StopRequest may finish and save the step, which may take longer, unless a rank has
        # failed. The main thread may be waiting in its store connection: open a second one.
        store: FailureStore | None = None
        try:
            while self._may_continue():
                store = store or FailureStore.connect()
                if store is not None and store.failure_known():
                    break
                if self.finished.wait(_POLL_SECONDS):
                    return
        except RuntimeError:
            # The store is gone, so a rank has ended. Close our connection before the grace period.
            store = None
        started = time.monotonic()
        while time.monotonic() - started < self._grace_seconds:
            if self.finished.wait(_POLL_SECONDS):
                return
        self._report("stopped by SIGTERM in a call that did not return")
        os._exit(1)

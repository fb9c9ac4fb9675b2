"""SIGTERM: from torchrun when another rank has failed, from a scheduler when the job must end."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pipemega.errors import Stopped
from pipemega.fault_tolerance.failure_store import POLL_SECONDS, FailureStore

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
        may_continue: whether the rank finishes its step after SIGTERM, unless another one failed.
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
        may_continue, report: as in `raise_on_sigterm`.

    Attributes:
        received: SIGTERM came.
        reports: this rank reports why the run ends.
        finished: set when the script has ended.
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

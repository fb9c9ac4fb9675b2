"""Preemption: a signal, a time limit or a file ends the run after the current step.

    first SIGTERM, SIGUSR1 or SIGINT    the run ends after the step that is in progress
    second signal                       the process exits at once, with 128 + the signal's number
                                        (the same signal within two seconds counts as the first)

A signal may reach one rank only, or the ranks in different steps. So no rank stops alone: each step
sums the ranks' stop requests, and all ranks act on the sum.

torchrun sends SIGTERM for two reasons: it received one, or another rank failed. In the second
case there is no request: the failing rank has written its error to the store, or has broken its
connections, which ends the current step with an error.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from pipemega.distributed.mesh import Axis, from_first, gather_objects
from pipemega.errors import Stopped
from pipemega.fault_tolerance.error_propagation import failure_reporter

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# A scheduler signals all processes of a job, a terminal all of its foreground group, and torchrun
# forwards signals: the same signal twice within this many seconds is one request.
_SAME_REQUEST_SECONDS = 2.0

# The import of this module is close to the start of the process.
_STARTED = time.monotonic()


class StopRequest:
    """Records signals within a `with` block, and knows the time limit and the kill-switch file.

    Args:
        world: the axis of all ranks.
        minutes: time limit of the process, by the clock of rank 0; None for no limit.
        kill_switch: a file that ends the run as soon as rank 0 finds it; None for no file.
        clock: a monotonic clock, in seconds.
        started: start of the process on that clock.
    """

    def __init__(
        self,
        world: Axis,
        minutes: float | None = None,
        kill_switch: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        started: float = _STARTED,
    ) -> None:
        self._world, self._minutes, self._clock, self._started = world, minutes, clock, started
        self._kill_switch = kill_switch
        self._asked: str | None = None  # by the program
        self._received: str | None = None  # the name of a signal
        self._received_at = -math.inf
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Python allows signal handlers in the main thread only.
        if not self._old_handlers and threading.current_thread() is threading.main_thread():
            self._old_handlers = {n: signal.signal(n, self._on_signal) for n in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._asked = None
        # After a signal the handlers stay: the process is about to end, and a signal during that
        # time is the second one.
        if self._received is None:
            self.restore_handlers()

    def restore_handlers(self) -> None:
        """Restore the signal handlers from before the block."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}

    def request(self, reason: str) -> None:
        """Request the end of the run on this rank."""
        self._asked = self._asked or reason

    def requested(self) -> bool:
        """Return whether this rank requests the end of the run. Not collective."""
        self._asked = self._asked or self._kill_switch_reason() or None
        return self._received is not None or self._asked is not None or self._time_is_over()

    def reasons(self) -> str:
        """Return why the run ends, from all ranks; collective, only when the run ends."""
        own = self._received or self._asked or ""
        if not own and self._time_is_over():
            own = f"training.exit_after_minutes is {self._minutes:g}"
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, reason in enumerate(gather_objects(own, self._world)):
            if reason:
                ranks_by_reason.setdefault(reason, []).append(rank)
        return ", ".join(self._with_ranks(*item) for item in ranks_by_reason.items())

    def reason_at_start(self) -> str:
        """Return why the run ends before its first step, else ""; collective."""
        if self._kill_switch is None:
            return ""
        return from_first(self._world, self._kill_switch_reason)

    def _kill_switch_reason(self) -> str:
        """Return why the run ends if rank 0 finds the kill-switch file, else ""."""
        path = self._kill_switch
        if path is None or self._world.rank > 0 or not os.path.exists(path):
            return ""
        return f"training.kill_switch_path: found {path}"

    def _with_ranks(self, reason: str, ranks: list[int]) -> str:
        if self._world.size == 1 or " " in reason:
            return reason
        if len(ranks) == self._world.size:
            return f"{reason} on all ranks"
        return f"{reason} on rank {', '.join(map(str, ranks))}"

    def _time_is_over(self) -> bool:
        if self._minutes is None or self._world.rank > 0:
            return False
        return self._clock() - self._started >= 60.0 * self._minutes

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and failure_reporter().failure_known():
            # The run is already ending: ignore further signals.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Stopped("stopped by SIGTERM")
        name = signal.Signals(number).name
        now = time.monotonic()
        if name == self._received and now - self._received_at < _SAME_REQUEST_SECONDS:
            return
        if self._received is not None:
            _print(f"rank {self._world.rank}: {name} after {self._received}: exiting at once")
            os._exit(128 + number)
        self._received, self._received_at = name, now
        if self._world.rank == 0:
            _print(f"{name}: the run ends after this step; another signal ends it at once")


def handles_sigterm() -> bool:
    """Return whether a StopRequest currently handles SIGTERM."""
    return isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest)


def _print(text: str) -> None:
    # Not print() or a logger: the signal may have interrupted one of them.
    os.write(2, f"[pipemega] {text}\n".encode())

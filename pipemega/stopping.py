"""Who may ask a run to end before its time: signals, and a limit of minutes.

    first SIGTERM, SIGUSR1 or SIGINT    the run ends in order, after the step that is under way
    the next one                        the process ends at once, with 128 + the signal's number
                                        (the same again within two seconds is the first one)

A signal may reach one rank alone, or each rank at another step. So nobody acts on one by itself:
each rank gives its wish into a sum that all of them make in every step, and all see the same.

torchrun sends SIGTERM for two reasons: it was told to end, or another rank has failed. The second
is nobody's wish. Who failed has written why where all can read it, or has broken connections, which
ends the step under way with an error.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from pipemega.failure import FailureBoard, Stopped
from pipemega.mesh import Axis

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# A scheduler signals all processes of a job, a terminal all of its foreground, and torchrun hands
# on what it got: the same signal twice within so many seconds is one wish.
_ONE_WISH = 2.0

# When this file was first read: as near to the start of the process as we can see.
_STARTED = time.monotonic()


class StopRequest:
    """Takes note of signals within a `with`, and of the time.

    Args:
        world: all ranks.
        minutes: that the process may last, by the clock of rank 0; None: for ever.
        clock: seconds, never going back.
        started: when it began, by that clock.
    """

    def __init__(
        self,
        world: Axis,
        minutes: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        started: float = _STARTED,
    ) -> None:
        self._world, self._minutes, self._clock, self._started = world, minutes, clock, started
        self._received: str | None = None
        self._heard = -math.inf
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Only the main thread may; a loop in another has nobody to interrupt it.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take_note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        # After a signal the process is about to end: what comes now is the second one.
        if self._received is None:
            self.let_go()

    def let_go(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def wanted(self) -> bool:
        """Whether this rank wants the run to end; others may not know yet."""
        return self._received is not None or self._is_late()

    def reasons(self) -> str:
        """Why the run ends, in words, from all ranks; collective, and only once it does."""
        mine = self._received or self._lateness()
        all_of_them: list[Any] = [mine]
        if self._world.size > 1:
            all_of_them = [None] * self._world.size
            dist.all_gather_object(all_of_them, mine, group=self._world.group)
        by_reason: dict[str, list[int]] = {}
        for rank, reason in enumerate(all_of_them):
            if reason:
                by_reason.setdefault(reason, []).append(rank)
        return ", ".join(self._by_whom(reason, ranks) for reason, ranks in by_reason.items())

    def _by_whom(self, reason: str, ranks: list[int]) -> str:
        if self._world.size == 1 or " " in reason:
            return reason
        if len(ranks) == self._world.size:
            return f"{reason} on all ranks"
        return f"{reason} on rank {', '.join(map(str, ranks))}"

    def _is_late(self) -> bool:
        if self._minutes is None or self._world.rank > 0:
            return False
        return self._clock() - self._started >= 60.0 * self._minutes

    def _lateness(self) -> str:
        return f"training.exit_after_minutes is {self._minutes:g}" if self._is_late() else ""

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and FailureBoard(self._world).is_told():
            # Once: what follows is the end already.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Stopped("stopped by SIGTERM")
        name = signal.Signals(number).name
        now = time.monotonic()
        if name == self._received and now - self._heard < _ONE_WISH:
            return
        if self._received is not None:
            _say(f"rank {self._world.rank}: {name} after {self._received}: ended at once")
            os._exit(128 + number)
        self._received, self._heard = name, now
        if self._world.rank == 0:
            _say(f"{name}: the run ends after this step; another signal ends it at once")


def is_heeded() -> bool:
    """Whether somebody has taken SIGTERM upon himself, and ends the run in his own time."""
    return isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest)


def _say(text: str) -> None:
    # Not through print or a logger: what the signal came into may be just that.
    os.write(2, f"[pipemega] {text}\n".encode())

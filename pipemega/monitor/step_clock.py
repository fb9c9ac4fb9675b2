"""Clocks for the work of a step, on a CPU and on a device."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Interval = tuple[Any, Any]
"""Two instants of one clock: start and end."""


class StepClock(Protocol):
    """Instants in the work of a device, which the host reads after the step.

    `now` never waits for the device.
    """

    def now(self) -> Any:
        """Return the instant at which the work that was issued so far is complete."""

    def passed(self, instant: Any) -> bool:
        """Return whether `instant` has passed."""

    def durations(self, intervals: Sequence[Interval]) -> list[int]:
        """Return nanoseconds; wait until all intervals have passed."""

    def times(self, instants: Sequence[Any]) -> list[int]:
        """Return nanoseconds of the host clock; wait until all work issued so far is complete."""


class HostClock:
    """The clock of the host, for devices whose work is done when the call returns.

    Args:
        clock: monotonic, in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = clock

    def passed(self, instant: int) -> bool:
        return True

    def durations(self, intervals: Sequence[Interval]) -> list[int]:
        return [end - start for start, end in intervals]

    def times(self, instants: Sequence[int]) -> list[int]:
        return list(instants)

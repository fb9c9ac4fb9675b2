"""Named timers, and the wall-clock breakdown of a step.

Phases of a step outside of its pipeline instructions: their times add up to the step.

    start | data |  other  | pipeline ... | gradient reduction | gradient norm | optimizer | .. stop

Each moment of a step belongs to exactly one phase; what no phase claims is "other".

Clocks for the work of a step, on a CPU and on a device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

from pipemega.errors import PipemegaError

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


# The parts of a step in the order of the breakdown; other timers follow by name.
PARTS = ("data", "forward", "backward", "communication", "optimizer")

# Number of intervals that a timer keeps.
HISTORY = 1000

_NO_INTERVAL: AbstractContextManager[None] = nullcontext()


class Timer:
    """Measures intervals; any number of them between two laps.

    The intervals are read when a result is asked for: on a device, only then does the host wait.

    Args:
        name: name for error messages.
        clock: the clock of the work that is measured; by default the clock of the host.
    """

    def __init__(self, name: str, *, clock: StepClock | None = None) -> None:
        self.name = name
        self._clock: StepClock = HostClock() if clock is None else clock
        self._started: Any = None
        self._unread: deque[Interval] = deque()
        self._lap = self._total = 0.0
        self._history: deque[float] = deque(maxlen=HISTORY)

    @property
    def total(self) -> float:
        """Seconds of all intervals."""
        self._read()
        return self._total

    @property
    def mean(self) -> float:
        """Mean of the latest `HISTORY` intervals in seconds; 0 before the first."""
        self._read()
        return sum(self._history) / len(self._history) if self._history else 0.0

    def start(self) -> None:
        """Start an interval. Raises PipemegaError if the timer is running."""
        if self._started is not None:
            raise PipemegaError(
                f"timer '{self.name}' is already running: stop it first, or time the inner "
                f"interval under another name"
            )
        self._started = self._clock.now()

    def stop(self) -> None:
        """End the interval. Raises PipemegaError if the timer is stopped."""
        if self._started is None:
            raise PipemegaError(f"timer '{self.name}' is not running: start it before stopping it")
        self._unread.append((self._started, self._clock.now()))
        self._started = None
        # If nobody asks for a result: keep few of them, without waiting.
        if len(self._unread) > HISTORY and self._clock.passed(self._unread[0][1]):
            self._add([self._unread.popleft()])

    def lap(self) -> float:
        """Return the total seconds of the intervals since the last lap."""
        self._read()
        seconds, self._lap = self._lap, 0.0
        return seconds

    def _read(self) -> None:
        self._add(list(self._unread))
        self._unread.clear()

    def _add(self, intervals: Sequence[Interval]) -> None:
        for nanoseconds in self._clock.durations(intervals):
            seconds = nanoseconds * 1e-9
            self._lap += seconds
            self._total += seconds
            self._history.append(seconds)


class MultiTimer:
    """Timers by name, created at first use.

        timers = MultiTimer()
        with timers("forward"):
            ...
        timers.lap()                     # {"forward": seconds since the last lap}
        timers["forward"].mean           # over the latest intervals

    Args:
        clock: the clock of all timers; by default the clock of the host.
        enabled: if False, no interval is measured and every lap is empty.
    """

    def __init__(
        self,
        *,
        clock: StepClock | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self._clock: StepClock = HostClock() if clock is None else clock
        self._timers: dict[str, Timer] = {}

    def __getitem__(self, name: str) -> Timer:
        if name not in self._timers:
            self._timers[name] = Timer(name, clock=self._clock)
        return self._timers[name]

    def start(self, name: str) -> None:
        """Start an interval of timer `name`, unless the timers are disabled."""
        if self.enabled:
            self[name].start()

    def stop(self, name: str) -> None:
        """End the interval of timer `name`, unless the timers are disabled."""
        if self.enabled:
            self[name].stop()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures its block, also if the block raises."""
        return self._interval(name) if self.enabled else _NO_INTERVAL

    @contextmanager
    def _interval(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap by name, and reset all timers."""
        return {name: timer.lap() for name, timer in self._timers.items()}

    def totals(self) -> dict[str, float]:
        """Return the seconds of all intervals by name; `lap` does not change them."""
        return {name: timer.total for name, timer in self._timers.items()}


def breakdown_line(step: int, seconds: Mapping[str, float]) -> str:
    """Return a line of milliseconds by part, in the form of the console's lines.

    breakdown_line(3, {"backward": 0.02, "forward": 0.01})
    -> "wall clock step 3 | forward ms 10.00 | backward ms 20.00"
    """
    names = [part for part in PARTS if part in seconds]
    names += sorted(set(seconds) - set(PARTS))
    parts = [f"{name} ms {seconds[name] * 1e3:.2f}" for name in names]
    return " | ".join([f"wall clock step {step}", *parts])


def breakdown_scalars(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the breakdown as extras of a StepRecord: {"perf/forward_ms": 10.0}."""
    return {f"perf/{name}_ms": value * 1e3 for name, value in seconds.items()}


# The phase that contains the pipeline instructions.
PIPELINE: Final = "pipeline"
OTHER: Final = "other"
# The phases outside of the pipeline, in the order of a step.
PHASES: Final = (
    "data", "tracing", "gradient reduction", "gradient norm", "optimizer", "parameter gather",
    OTHER,
)  # fmt: skip


class Phase(NamedTuple):
    """An interval of a step, in nanoseconds of the clock or in seconds."""

    name: str
    start: float
    end: float


PhasesByRank = Sequence[Sequence[Phase]]


class StepPhases:
    """Records the phases of one step after another; costs a few clock readings per step.

    Args:
        clock: the clock of the host.
        exact_clock: the clock of the device, for steps that are measured exactly: pending device
            work then counts in the phase that started it. By default `clock`.
    """

    def __init__(
        self, clock: StepClock | None = None, exact_clock: StepClock | None = None
    ) -> None:
        self._host_clock: StepClock = HostClock() if clock is None else clock
        self._exact_clock = self._host_clock if exact_clock is None else exact_clock
        self._clock = self._host_clock
        self._names: list[str] = []
        self._instants: list[Any] = []
        self._name = OTHER

    def start(self, *, exact: bool = False) -> None:
        """Start a step, and discard the phases of the previous one.

        Args:
            exact: the phases of this step are wanted: `stop` waits for the device.
        """
        self._clock = self._exact_clock if exact else self._host_clock
        self._names, self._instants, self._name = [], [self._clock.now()], OTHER

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block as phase `name`; the phase around it continues after it."""
        around = self._name
        self._change(name)
        try:
            yield
        finally:
            self._change(around)

    def stop(self) -> tuple[Phase, ...]:
        """End the step and return its phases, without gaps, from its start to its end."""
        self._change(OTHER)
        times = self._clock.times(self._instants)
        return tuple(
            Phase(name, start, end)
            for name, (start, end) in zip(self._names, pairwise(times), strict=True)
            if end > start
        )

    def _change(self, name: str) -> None:
        if self._instants:
            self._names.append(self._name)
            self._instants.append(self._clock.now())
        self._name = name

"""Named timers, and the wall-clock breakdown of a step."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from pipemega.errors import PipemegaError

# The parts of a step in the order of the breakdown; other timers follow by name.
PARTS = ("data", "forward", "backward", "communication", "optimizer")

# Number of intervals that a timer keeps.
HISTORY = 1000

_NO_INTERVAL: AbstractContextManager[None] = nullcontext()


class Timer:
    """Measures intervals; any number of them between two laps.

    Args:
        name: for error messages.
        synchronize: called before the clock is read, so that pending device work counts in the
            interval that started it (torch.cuda.synchronize).
        clock: monotonic, in seconds.

    Attributes:
        total: seconds of all intervals.
    """

    def __init__(
        self,
        name: str,
        *,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._synchronize = synchronize
        self._clock = clock
        self._started: float | None = None
        self._lap = 0.0
        self.total = 0.0
        self._history: deque[float] = deque(maxlen=HISTORY)

    @property
    def mean(self) -> float:
        """Mean of the latest `HISTORY` intervals in seconds; 0 before the first."""
        return sum(self._history) / len(self._history) if self._history else 0.0

    def start(self) -> None:
        """Start an interval. Raises PipemegaError if the timer is running."""
        if self._started is not None:
            raise PipemegaError(
                f"timer '{self.name}' is already running: stop it first, or time the inner "
                f"interval under another name"
            )
        self._started = self._now()

    def stop(self) -> float:
        """End the interval, return its seconds. Raises PipemegaError if the timer is stopped."""
        if self._started is None:
            raise PipemegaError(f"timer '{self.name}' is not running: start it before stopping it")
        seconds = self._now() - self._started
        self._started = None
        self._lap += seconds
        self.total += seconds
        self._history.append(seconds)
        return seconds

    def lap(self) -> float:
        """Return the total seconds of the intervals since the last lap."""
        seconds, self._lap = self._lap, 0.0
        return seconds

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


class MultiTimer:
    """Timers by name, created at first use.

        timers = MultiTimer(synchronize=torch.cuda.synchronize)
        with timers("forward"):
            ...
        timers.lap()                     # {"forward": seconds since the last lap}
        timers["forward"].mean           # over the latest intervals

    Args:
        synchronize, clock: as for `Timer`.
        enabled: if False, no interval is measured and every lap is empty.
    """

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self._synchronize = synchronize
        self._clock = clock
        self._timers: dict[str, Timer] = {}

    def __getitem__(self, name: str) -> Timer:
        if name not in self._timers:
            self._timers[name] = Timer(name, synchronize=self._synchronize, clock=self._clock)
        return self._timers[name]

    def start(self, name: str) -> None:
        """Start an interval of timer `name`, unless the timers are disabled."""
        if self.enabled:
            self[name].start()

    def stop(self, name: str) -> float:
        """Return the seconds of the interval; 0 if the timers are disabled."""
        return self[name].stop() if self.enabled else 0.0

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

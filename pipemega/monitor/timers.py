"""Named stop-watches, and the wall-clock breakdown of a step that is made from them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from pipemega.errors import PipemegaError

# The parts of a step in the order in which the breakdown shows them; others follow by name.
PARTS = ("data", "forward", "backward", "communication", "optimizer")

# Intervals that a timer remembers: enough for a mean, and bounded in a run of months.
HISTORY = 1000

_NO_INTERVAL: AbstractContextManager[None] = nullcontext()


class Timer:
    """One stop-watch, started and stopped any number of times between two laps.

    Args:
        name: for messages.
        synchronize: called before each look at the clock, so that work which the device has yet
            to do falls into the interval that asked for it (torch.cuda.synchronize).
        clock: seconds, never going back.
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
        self._history: deque[float] = deque(maxlen=HISTORY)

    @property
    def running(self) -> bool:
        return self._started is not None

    @property
    def elapsed(self) -> float:
        """Seconds in all finished intervals since the last lap."""
        return self._lap

    @property
    def history(self) -> tuple[float, ...]:
        """The latest intervals in seconds, oldest first; `HISTORY` of them at most."""
        return tuple(self._history)

    @property
    def mean(self) -> float:
        """Mean of the history in seconds; 0 before the first interval."""
        return sum(self._history) / len(self._history) if self._history else 0.0

    def start(self) -> None:
        """Begin an interval.  Raises: PipemegaError when one is already open."""
        if self._started is not None:
            raise PipemegaError(
                f"timer '{self.name}' is already running: stop it first, or time the inner part "
                f"under another name"
            )
        self._started = self._now()

    def stop(self) -> float:
        """End the interval; its seconds.  Raises: PipemegaError when none is open."""
        if self._started is None:
            raise PipemegaError(f"timer '{self.name}' is not running: start it before stopping it")
        seconds = self._now() - self._started
        self._started = None
        self._lap += seconds
        self._history.append(seconds)
        return seconds

    def lap(self) -> float:
        """Seconds since the last lap, and start counting from zero."""
        seconds, self._lap = self._lap, 0.0
        return seconds

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


class MultiTimer:
    """Timers by name, made when first used.

        timers = MultiTimer(synchronize=torch.cuda.synchronize)
        with timers("forward"):
            ...
        timers.lap()                     # {"forward": seconds since the last lap}
        timers["forward"].mean           # over the latest intervals

    Args:
        synchronize, clock: as for `Timer`.
        enabled: False makes every call free of cost and every lap empty, so that the code that
            is timed needs no `if`.
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

    def __iter__(self) -> Iterator[str]:
        return iter(self._timers)

    def start(self, name: str) -> None:
        if self.enabled:
            self[name].start()

    def stop(self, name: str) -> float:
        """Seconds of the interval; 0 when the timers are off."""
        return self[name].stop() if self.enabled else 0.0

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time a block, also when it raises."""
        return self._interval(name) if self.enabled else _NO_INTERVAL

    @contextmanager
    def _interval(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def lap(self) -> dict[str, float]:
        """Seconds by name since the last lap; every timer counts from zero again."""
        return {name: timer.lap() for name, timer in self._timers.items()}


def breakdown_line(step: int, seconds: Mapping[str, float]) -> str:
    """One line of milliseconds by part, of the same form as the console's.

    breakdown_line(3, {"backward": 0.02, "forward": 0.01})
    -> "wall clock step 3 | forward ms 10.00 | backward ms 20.00"
    """
    names = [part for part in PARTS if part in seconds]
    names += sorted(set(seconds) - set(PARTS))
    parts = [f"{name} ms {seconds[name] * 1e3:.2f}" for name in names]
    return " | ".join([f"wall clock step {step}", *parts])


def breakdown_scalars(seconds: Mapping[str, float]) -> dict[str, float]:
    """The same as extras of a StepRecord, by the names that DeepSpeed's users plot.

    DeepSpeed calls the optimizer's part "step" and the gradients' communication
    "backward_allreduce".
    """
    theirs = {"optimizer": "step", "communication": "backward_allreduce"}
    return {
        f"elapsed_time_ms_{theirs.get(name, name)}": value * 1e3 for name, value in seconds.items()
    }

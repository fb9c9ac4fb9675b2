"""Phases of a step outside of its pipeline instructions: their times add up to the step.

    start | data |  other  | pipeline ... | gradient reduction | gradient norm | optimizer | .. stop

Each moment of a step belongs to exactly one phase; what no phase claims is "other".
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pipemega.monitor.step_clock import HostClock, StepClock

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
        clock: of the host.
        exact_clock: of the device, for steps that are measured exactly: pending device work then
            counts in the phase that started it. By default `clock`.
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

"""Phases of a step outside of its pipeline instructions: their times add up to the step.

    start | data |  other  | pipeline ... | gradient reduction | gradient norm | optimizer | .. stop

Each moment of a step belongs to exactly one phase; what no phase claims is "other".
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

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
        synchronize: called before the clock is read in steps that are measured exactly, so that
            pending device work counts in the phase that started it (torch.cuda.synchronize).
        clock: monotonic, in nanoseconds.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._exact = False
        self._synchronize, self._clock = synchronize, clock
        self._phases: list[Phase] = []
        self._name, self._since = OTHER, 0

    def start(self, *, exact: bool = False) -> None:
        """Start a step, and discard the phases of the previous one.

        Args:
            exact: the phases of this step are wanted: call `synchronize`.
        """
        self._exact = exact
        self._phases, self._name, self._since = [], OTHER, self._now()

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
        return tuple(self._phases)

    def _change(self, name: str) -> None:
        now = self._now()
        if now > self._since:
            self._phases.append(Phase(self._name, self._since, now))
        self._name, self._since = name, now

    def _now(self) -> int:
        if self._exact and self._synchronize is not None:
            self._synchronize()
        return self._clock()

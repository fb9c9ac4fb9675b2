"""Description of a schedule: its function, its sizes, and formulas for time and memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, Final, Literal, NamedTuple

from pipemega.pipeline.plan.instructions import Plan


class Sizes(NamedTuple):
    """The sizes that a schedule is built for."""

    pp_size: int
    num_microbatches: int
    chunks: int = 1


class RankCosts(NamedTuple):
    """Times for one micro-batch in all stages of one rank together, and the time of one message."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0

    @property
    def work(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


UNIT_COSTS: Final = RankCosts()


class Formula(str):
    """A Python expression that prints as it is written and can be evaluated.

    Variables: p ranks, m micro-batches, v stages per rank, r the rank; F, I and W the times of all
    stages of one rank for one micro-batch, c the time of a message. Functions: min, max, ceil.

        Formula("min(m, p - r)")(Sizes(4, 8), rank=1) == 3
    """

    __slots__ = ()

    def __call__(self, sizes: Sizes, costs: RankCosts = UNIT_COSTS, rank: int = 0) -> float:
        """Return the value of the expression; True or False for a condition."""
        variables = dict(zip("pmvFIWcr", (*sizes, *costs, rank), strict=True))
        value: float = eval(_compiled(self), _FUNCTIONS, variables)
        return value


_FUNCTIONS: Final[dict[str, Any]] = {
    "__builtins__": {}, "min": min, "max": max, "ceil": math.ceil,
}  # fmt: skip


ALWAYS: Final = Formula("True")


@cache
def _compiled(formula: Formula) -> CodeType:
    return compile(formula, "<formula>", "eval")


@dataclass(frozen=True)
class ScheduleFamily:
    """One schedule: the function that builds it, and formulas for stages of equal cost.

    A test compares the formulas with the simulation.

    Args:
        name: as `pipeline.schedule` names it.
        build: returns the plan for (pp_size, num_microbatches), and chunks if `chunks` is None.
        makespan: time from the first step to the last, where `exact` is true.
        peak: the most micro-batches whose activations rank r holds at one time, as a fraction of
            the activations of all its stages. An upper bound on every rank, exact on the rank that
            holds most.
        source: where it was published.
        aliases: other names of the schedule.
        placement: which rank holds which stage.
        chunks: stages on each rank; None: any number, 2 by default.
        exact: condition on sizes and costs under which `makespan` is exact; otherwise only the
            simulation gives the makespan.
    """

    name: str
    build: Callable[..., Plan]
    makespan: Formula
    peak: Formula
    source: str
    aliases: tuple[str, ...] = ()
    placement: Literal["loop", "v"] = "loop"
    chunks: int | None = 1
    exact: Formula = ALWAYS

    @property
    def default_chunks(self) -> int:
        """Stages on each rank if the caller does not say how many."""
        return self.chunks or 2

    def plan(self, sizes: Sizes) -> Plan:
        """Return the plan for `sizes`, whose chunks the schedule accepts."""
        return self.build(*sizes) if self.chunks is None else self.build(*sizes[:2])

    def chunks_error(self, chunks: int) -> str | None:
        """Return why the schedule does not accept `chunks` and what to do; None if it does."""
        if self.chunks in (None, chunks):
            return None
        stages = "one stage" if self.chunks == 1 else f"{self.chunks} stages"
        in_a_v = ", placed in a v" if self.placement == "v" else ""
        others = ", or use pipeline.schedule 'interleaved'" if self.chunks == 1 else ""
        return (
            f"pipeline.chunks is {chunks}, and schedule {self.name!r} runs {stages} per rank"
            f"{in_a_v}: set it to {self.chunks}{others}"
        )

    def bubble(self, sizes: Sizes, costs: RankCosts = UNIT_COSTS) -> float:
        """Return the fraction of the makespan in which a rank is idle, by formula, 0 to 1."""
        makespan = self.makespan(sizes, costs)
        busy = sizes.num_microbatches * costs.work
        # Rounding can make the busy time larger than the makespan.
        return max(0.0, 1.0 - busy / makespan) if makespan else 0.0

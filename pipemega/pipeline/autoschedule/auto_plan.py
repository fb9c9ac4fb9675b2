"""Finds the best plan for given costs and a memory limit."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule.bounds import least_makespan, least_span
from pipemega.pipeline.autoschedule.placements import Placement
from pipemega.pipeline.autoschedule.problem import ROUNDING, Problem
from pipemega.pipeline.autoschedule.replay import makespan, span
from pipemega.pipeline.autoschedule.search import Search
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import Timeline, simulate
from pipemega.pipeline.schedules import AUTO

Objective = Literal["makespan", "span"]
_MEASURES = {"makespan": (makespan, least_makespan), "span": (span, least_span)}


@dataclass(frozen=True)
class AutoPlan:
    """A plan that was found, with its timeline and its origin.

    Args:
        placement: of the stages, with their costs.
        timeline: simulated with the costs of the placement.
        source: how it was found: the name of a schedule or "greedy", and whether it was annealed.
        bound: lower bound for any plan on any of the placements with this memory limit.
    """

    placement: Placement
    timeline: Timeline
    source: str
    bound: float

    @property
    def plan(self) -> Plan:
        return self.timeline.plan


def find_plan(
    placements: Sequence[Placement],
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    *,
    objective: Objective = "makespan",
    effort: float = 1.0,
    seconds: float | None = 60.0,
) -> AutoPlan:
    """Return the best plan found on any of `placements` that keeps the memory limit.

    It is never worse than a named schedule that keeps the limit. The same input gives the same plan
    on every machine, unless `seconds` stops the search early; 60 seconds are enough for 16 ranks
    and 64 micro-batches.

    Args:
        placements: at least one, all for the same number of ranks.
        memory_limit: of each rank, or one for all, in the units of the costs; None: no limit.
        objective: what is minimised; "makespan" if an optimizer step waits for all ranks, "span" if
            each rank starts its next step on its own.
        effort: 1 takes some seconds for 8 ranks and 32 micro-batches; the time grows less than
            linearly with the size. A higher effort finds better plans, slowly.
        seconds: time limit; the best plan so far is returned. None: no limit.

    Raises:
        ScheduleError: no plan on any placement keeps the limit, or an argument is invalid.
    """
    if objective not in _MEASURES:
        raise ScheduleError(f"objective {objective!r}: use 'makespan' or 'span'")
    limits = _limits(placements, num_microbatches, memory_limit)
    problems = [
        Problem.of(placement, num_microbatches, placement.limits_within(limits))
        for placement in placements
        if _fits(placement, limits)
    ]
    if not problems:
        raise ScheduleError(_limit_too_low(placements, limits))
    measure, bound = _MEASURES[objective]
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    search = Search(problems, measure, bound, lambda: time.monotonic() > deadline, effort)
    pool = search.run()
    best, placement = pool.candidates[0], pool.problem.placement
    timeline = simulate(pool.problem.plan_of(AUTO, best.run.orders), placement.costs)
    return AutoPlan(placement, timeline, best.source, search.bound)


def _limits(
    placements: Sequence[Placement],
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None,
) -> list[float]:
    """Return the limit of each rank; infinite without a limit."""
    ranks = {placement.num_ranks for placement in placements}
    if len(ranks) != 1:
        raise ScheduleError(
            f"placements for {sorted(ranks)} pipeline ranks: give at least one, all for the same "
            f"number of ranks"
        )
    if num_microbatches < 1:
        raise ScheduleError(f"a schedule for {num_microbatches} micro-batches: give at least 1")
    num = ranks.pop()
    if memory_limit is None:
        return [math.inf] * num
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * num
    if len(limits) != num:
        raise ScheduleError(
            f"{len(limits)} memory limits for {num} pipeline ranks: give one for all, or one per "
            f"rank"
        )
    for limit in limits:
        if not limit > 0:
            raise ScheduleError(f"the memory limit is {limit}: it must be above 0")
    return [float(limit) for limit in limits]


def _fits(placement: Placement, limits: Sequence[float]) -> bool:
    return all(
        least <= limit + ROUNDING * least
        for least, limit in zip(
            placement.least_memory, placement.limits_within(limits), strict=True
        )
    )


def _limit_too_low(placements: Sequence[Placement], limits: Sequence[float]) -> str:
    """Return the error message: which rank has too little, and the lowest limit that is enough."""
    lowest = min(placements, key=lambda placement: max(placement.least_memory))
    least, limits = lowest.least_memory, lowest.limits_within(limits)
    short = (r for r, limit in enumerate(limits) if least[r] > limit)
    # Another placement may need less on this rank, and more on others.
    rank = next(short, max(range(len(least)), key=lambda r: least[r] / limits[r]))
    return (
        f"a memory limit of {limits[rank]:g} is too low for rank {rank}: every plan holds at least "
        f"one micro-batch at all of its stages, {least[rank]:g}; the lowest limit that is enough "
        f"for all ranks is {max(least):g}"
    )

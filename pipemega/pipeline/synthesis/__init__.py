"""Schedule `auto`: the best plan that can be found for given costs and a memory limit.

    layouts_of_shares, layouts_of_stages  ->  synthesize  ->  Synthesis (plan, timeline, source)

`layouts.py` says where stages may lie, `problem.py` what the searches work on, `clock.py` plays it,
`bounds.py` says what cannot be beaten; `dates.py` and `greedy.py` construct plans, `anneal.py`
improves them, `search.py` says how much of what is done.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.simulate import Timeline, simulate
from pipemega.pipeline.synthesis.bounds import least_makespan, least_span
from pipemega.pipeline.synthesis.clock import makespan, span
from pipemega.pipeline.synthesis.exact import solve
from pipemega.pipeline.synthesis.layouts import Layout, layouts_of_shares, layouts_of_stages
from pipemega.pipeline.synthesis.problem import ROUNDING, Problem
from pipemega.pipeline.synthesis.search import Search

__all__ = ["Layout", "Synthesis", "layouts_of_shares", "layouts_of_stages", "prove", "synthesize"]

Objective = Literal["makespan", "span"]
_MEASURES = {"makespan": (makespan, least_makespan), "span": (span, least_span)}


@dataclass(frozen=True)
class Synthesis:
    """A plan, and how it came about.

    Args:
        layout: the one it is for.
        timeline: of the plan, by the costs of the layout.
        source: what it was made from: the name of a schedule, or "greedy", and if it was annealed.
        bound: what no plan on any of the layouts can stay below, by these costs and this limit.
    """

    layout: Layout
    timeline: Timeline
    source: str
    bound: float

    @property
    def plan(self) -> Plan:
        return self.timeline.plan


def synthesize(
    layouts: Sequence[Layout],
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    *,
    objective: Objective = "makespan",
    effort: float = 1.0,
    seconds: float | None = 60.0,
) -> Synthesis:
    """The best plan found on any of `layouts` whose ranks hold no more than `memory_limit`.

    It is never worse than a named schedule that fits. The same input gives the same plan on every
    machine, unless `seconds` cut the search short, which they should not for up to 16 ranks and 64
    micro-batches.

    Args:
        layouts: at least one, all for the same number of ranks.
        memory_limit: of each rank, or one for all, in the units of the costs; None: no limit.
        objective: what is to be short; makespan is what an optimizer step that waits for all
            ranks sees.
        effort: 1 takes some seconds for 8 ranks and 32 micro-batches, and rather more in proportion
            for less; more finds better plans, slowly.
        seconds: after which the best that has been found will do; None: never.

    Raises:
        ScheduleError: no plan on any layout can keep the limit, or a size or limit is none.
    """
    if objective not in _MEASURES:
        raise ScheduleError(f"objective {objective!r}: it is 'makespan' or 'span'")
    limits = _limits(layouts, num_microbatches, memory_limit)
    problems = [
        Problem.of(layout, num_microbatches, limits) for layout in layouts if _keeps(layout, limits)
    ]
    if not problems:
        raise ScheduleError(_too_little(layouts, limits))
    measure, bound = _MEASURES[objective]
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    search = Search(problems, measure, bound, lambda: time.monotonic() > deadline, effort)
    pool = search.run()
    best = pool.found[0]
    plan = pool.problem.plan_of("auto", best.run.orders)
    timeline = simulate(plan, pool.problem.layout.costs)
    return Synthesis(pool.problem.layout, timeline, best.source, search.bound)


def prove(
    found: Synthesis,
    memory_limit: float | Sequence[float] | None = None,
    *,
    seconds: float = 60.0,
) -> Synthesis:
    """`found`, or a plan with a shorter makespan on its layout, by an exact search.

    `source` says how far that came: the plan is the best on its layout, or how much a better one
    could still save. For some hundred steps; the number of possible orders grows with each.

    Args:
        memory_limit: as `synthesize` had it.
        seconds: after which the best so far will do.

    Raises:
        ScheduleError: OR-tools is not installed, or the costs are none that the solver can count.
    """
    layout, count = found.layout, found.plan.num_microbatches
    limits = _limits([layout], count, memory_limit)
    shortest = found.timeline.makespan
    proof = solve(layout, count, limits, seconds=seconds, longest=shortest)
    timeline, source = found.timeline, found.source
    if proof.orders is not None and proof.makespan < shortest * (1 - ROUNDING):
        plan = Problem.of(layout, count, limits).plan_of("auto", proof.orders)
        timeline, source = simulate(plan, layout.costs), "CP-SAT"
    left = 1 - proof.bound / timeline.makespan
    how = f"no plan on its layout saves more than {left:.1%}" if left > ROUNDING else "proven"
    return replace(found, timeline=timeline, source=f"{source}, {how}")


def _limits(
    layouts: Sequence[Layout], num_microbatches: int, memory_limit: float | Sequence[float] | None
) -> list[float]:
    """The limit of each rank; infinite where there is none."""
    ranks = {layout.num_ranks for layout in layouts}
    if len(ranks) != 1:
        raise ScheduleError(
            f"layouts for {sorted(ranks)} pipeline ranks: give one or more, for one number of ranks"
        )
    if num_microbatches < 1:
        raise ScheduleError(f"a schedule for {num_microbatches} micro-batches: give at least 1")
    num = ranks.pop()
    if memory_limit is None:
        return [math.inf] * num
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * num
    if len(limits) != num:
        raise ScheduleError(
            f"{len(limits)} memory limits for {num} pipeline ranks: give one for all, or each its "
            f"own"
        )
    for limit in limits:
        if not limit > 0:
            raise ScheduleError(f"the memory limit is {limit}: it is a number above 0")
    return [float(limit) for limit in limits]


def _keeps(layout: Layout, limits: Sequence[float]) -> bool:
    return all(
        least <= limit + ROUNDING * least
        for least, limit in zip(layout.least_memory, limits, strict=True)
    )


def _too_little(layouts: Sequence[Layout], limits: Sequence[float]) -> str:
    """Which rank has too little, and what would do."""
    least = min((layout.least_memory for layout in layouts), key=max)
    short = (r for r, limit in enumerate(limits) if least[r] > limit)
    # Another layout may need less there, and more elsewhere.
    rank = next(short, max(range(len(least)), key=lambda r: least[r] / limits[r]))
    return (
        f"a memory limit of {limits[rank]:g} is too little for rank {rank}: whatever the plan, it "
        f"holds one micro-batch at all of its stages, {least[rank]:g}; the least limit that would "
        f"do for all ranks is {max(least):g}"
    )

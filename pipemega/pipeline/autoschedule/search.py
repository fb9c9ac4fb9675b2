"""Searches the best plan over all placements, within a given effort.

1. Named schedules that keep the limit, as they are and with split backward.
2. Greedy constructions with random priority rules for every placement; the rules of the better
   placements are varied further, in rounds with fewer and fewer placements.
3. Local search from the best plans of both.

The effort is counted in steps constructed or replayed, not in seconds, and the random numbers are
seeded: the same input gives the same plan on every machine.

Finds the best plan for given costs and a memory limit.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule.anneal import anneal
from pipemega.pipeline.autoschedule.greedy import (
    NEVER,
    Measure,
    PriorityRule,
    Run,
    construct,
    makespan,
    replay_all,
    span,
)
from pipemega.pipeline.autoschedule.problem import (
    INPUT,
    ROUNDING,
    WEIGHT,
    WHOLE,
    Orders,
    Placement,
    Problem,
    least_makespan,
    least_span,
)
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import Timeline, simulate
from pipemega.pipeline.schedules import AUTO, named_plans

# For a pipeline with this many steps: the number of steps of all constructions and of all replays
# together, which take some seconds on one core; smaller pipelines get a larger share.
_STEPS = 1536
_CONSTRUCTED = 1_200_000
_REPLAYED = 16_000_000
# Rounds of construction: fraction of the effort, and the number of placements that take part.
_ROUNDS = ((0.35, 99), (0.35, 3), (0.3, 1))
# Number of candidates of a placement that are kept and varied further.
_KEPT = 8
# Fraction of rules that are random instead of a variation of a kept one.
_FRESH = 0.25
# Annealing, first phase: number of starts, and the fraction of the effort for each.
_STARTS, _FIRST_SHARE = 8, 0.06
# Second phase: index of the placement, fraction of the effort, temperature.
_THEN = ((0, 0.18, 0.15), (1, 0.17, 0.15), (0, 0.17, 0.05))


@dataclass
class Candidate:
    """A run and its origin.

    Args:
        value: the time that the search minimises.
        source: how it was found, as printed.
        rule: the priority rule of a construction; None for other origins.
    """

    value: float
    run: Run
    source: str
    rule: PriorityRule | None = None


@dataclass
class CandidatePool:
    """The best candidates of one placement, best first, and a lower bound; in problem units."""

    problem: Problem
    bound: float
    candidates: list[Candidate] = field(default_factory=list)

    def add(self, new: Candidate) -> None:
        """Keep `new` if it is among the best.

        It replaces a construction of the same length, so that the pool does not fill with equals.
        """
        self.candidates = [
            old
            for old in self.candidates
            if new.rule is None or old.rule is None or abs(old.value - new.value) > ROUNDING
        ]
        self.candidates.append(new)
        self.candidates.sort(key=lambda candidate: candidate.value)
        del self.candidates[_KEPT:]

    @property
    def time(self) -> float:
        """The shortest time found, in units of the costs."""
        if not self.candidates:
            return NEVER
        return self.candidates[0].value * self.problem.time_unit


class Search:
    """A search over all placements of one pipeline.

    Args:
        problems: one problem for each placement.
        measure, bound: what is minimised, and its lower bound for a problem.
        time_is_up: stops the search.
        effort: factor on the effort.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        measure: Measure,
        bound: Callable[[Problem], float],
        time_is_up: Callable[[], bool],
        effort: float = 1.0,
    ) -> None:
        self.pools = [CandidatePool(problem, bound(problem)) for problem in problems]
        self.measure, self.time_is_up = measure, time_is_up
        self.rng = random.Random(0)
        relative_size = 3 * 2 * problems[0].num_ranks * problems[0].num_microbatches / _STEPS
        self.effort = effort * max(relative_size, relative_size**0.5)

    @property
    def best(self) -> CandidatePool:
        """The pool with the shortest candidate; the first of equals."""
        least = min(pool.time for pool in self.pools)
        return next(pool for pool in self.pools if pool.time <= least * (1 + ROUNDING))

    @property
    def bound(self) -> float:
        """Lower bound for all placements, in units of the costs."""
        return min(pool.bound * pool.problem.time_unit for pool in self.pools)

    def run(self) -> CandidatePool:
        """Run all phases; return the best pool."""
        for pool in self.pools:
            self._add_named(pool)
        for share, most in _ROUNDS:
            self._construct(share, most)
        self._anneal()
        return self.best

    def _open(self) -> list[CandidatePool]:
        """Return the pools that can still improve on the best plan, shortest first."""
        reached = self.best.time * (1 - ROUNDING)
        better = [pool for pool in self.pools if pool.bound * pool.problem.time_unit < reached]
        return [] if self.time_is_up() else sorted(better, key=lambda pool: pool.time)

    def _add_named(self, pool: CandidatePool) -> None:
        problem = pool.problem
        place, ranks = problem.rank_of_stage, problem.num_ranks
        for plan in named_plans(place, ranks, problem.num_microbatches):
            orders = problem.orders_of(plan)
            self._add(pool, orders, plan.name)
            if not problem.whole_backward_helps:
                split = _split_backward(problem, orders)
                self._add(pool, split, f"{plan.name} with split backward")
        if not pool.candidates:
            # One micro-batch after the other always keeps the limit.
            rule = PriorityRule(whole=True)
            orders_by_rule = construct(problem, rule)
            assert orders_by_rule is not None, "a construction without a time limit always ends"
            self._add(pool, orders_by_rule, "greedy", rule)

    def _add(
        self, pool: CandidatePool, orders: Orders, source: str, rule: PriorityRule | None = None
    ) -> None:
        if pool.problem.fits(orders) and (run := replay_all(pool.problem, orders)) is not None:
            pool.add(Candidate(self.measure(run), run, source, rule))

    def _construct(self, share: float, most: int) -> None:
        pools = self._open()[:most]
        steps = share * _CONSTRUCTED * self.effort
        tries = round(steps / max(1, sum(pool.problem.size for pool in pools)))
        for pool in pools:
            known_good = PriorityRule.known_good(pool.problem) if most > len(self.pools) else []
            for trial in range(tries):
                rule = known_good[trial] if trial < len(known_good) else self._next_rule(pool)
                full = len(pool.candidates) == _KEPT and self.measure is makespan
                until = pool.candidates[-1].value + ROUNDING if full else NEVER
                orders = construct(pool.problem, rule, until)
                if orders is not None:
                    self._add(pool, orders, "greedy", rule)
                if self.time_is_up() or pool.candidates[0].value < pool.bound + ROUNDING:
                    break

    def _next_rule(self, pool: CandidatePool) -> PriorityRule:
        """Return a random rule, or a variation of a kept one."""
        parents = [one.rule for one in pool.candidates if one.rule is not None]
        if not parents or self.rng.random() < _FRESH:
            return PriorityRule.sample(pool.problem, self.rng)
        return self.rng.choice(parents).mutated(pool.problem, self.rng)

    def _anneal(self) -> None:
        pools = self._open()
        starts = [(pool, one) for pool in pools for one in _best_of_each_origin(pool.candidates)]
        starts.sort(key=lambda start: start[1].value * start[0].problem.time_unit)
        for pool, candidate in starts[:_STARTS]:
            self._anneal_from(pool, candidate, _FIRST_SHARE, _THEN[0][-1])
        for place, share, temperature in _THEN:
            if pools := self._open()[: place + 1]:
                self._anneal_from(pools[-1], pools[-1].candidates[0], share, temperature)

    def _anneal_from(
        self, pool: CandidatePool, old: Candidate, share: float, temperature: float
    ) -> None:
        if pool not in self._open():
            return
        replays = round(share * _REPLAYED * self.effort / pool.problem.size)
        seed = self.rng.randrange(2**31)
        run = anneal(old.run, replays, temperature, self.measure, seed, pool.bound, self.time_is_up)
        value = self.measure(run)
        if value < old.value - ROUNDING:
            ends = ", annealed"
            pool.add(Candidate(value, run, old.source.removesuffix(ends) + ends))


def _best_of_each_origin(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the best constructed and the best other candidate."""
    kinds: dict[bool, Candidate] = {}
    for one in found:
        kinds.setdefault(one.rule is None, one)
    return list(kinds.values())


def _split_backward(problem: Problem, orders: Orders) -> Orders:
    """Return `orders` with each B replaced by I and W."""
    num = problem.num_stages
    halves = {WHOLE * num + s: (INPUT * num + s, WEIGHT * num + s) for s in range(num)}
    return [[half for code in order for half in halves.get(code, (code,))] for order in orders]


Objective = Literal["makespan", "span"]
_MEASURES = {"makespan": (makespan, least_makespan), "span": (span, least_span)}


@dataclass(frozen=True)
class AutoPlan:
    """A plan that was found, with its timeline and its origin.

    Args:
        placement: the placement of the stages, with their costs.
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
        placements: at least one placement; all for the same number of ranks.
        memory_limit: the limit of each rank, or one for all ranks, in the units of the costs; None:
            no limit.
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

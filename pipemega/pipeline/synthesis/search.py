"""From candidates to the best plan that the effort allows.

1. Named schedules that fit, as they are and with their whole backwards cut in halves.
2. Policies drawn at random, for every layout; those of the better layouts are varied further, in
   rounds that leave fewer and fewer layouts.
3. Local search from the best of both.

Efforts are counted in steps constructed or played, not in seconds, and all dice are seeded: the
same input gives the same plan on every machine.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.schedules import SCHEDULES, Sizes
from pipemega.pipeline.schedules.placement import loop, v
from pipemega.pipeline.synthesis.anneal import anneal
from pipemega.pipeline.synthesis.clock import NEVER, Measure, Run, makespan, play
from pipemega.pipeline.synthesis.dates import Policy
from pipemega.pipeline.synthesis.greedy import construct
from pipemega.pipeline.synthesis.problem import INPUT, ROUNDING, WEIGHT, WHOLE, Orders, Problem

# For a pipeline of this many steps: how many steps all constructions and all replays may take
# together, which is some seconds of one core; smaller ones get more of it than their share.
_USUAL = 1536
_CONSTRUCTED = 1_200_000
_REPLAYED = 16_000_000
# Rounds of construction: their share, and how many layouts still take part.
_ROUNDS = ((0.35, 99), (0.35, 3), (0.3, 1))
# How many of the best policies of a layout are varied further.
_KEPT = 8
# How many policies are drawn, instead of varied from the best.
_FRESH = 0.25
# Annealing: how many starts there are, their share each, and how warm the first trials are.
_STARTS, _FIRST_SHARE = 8, 0.06
# Then: the place of the layout among the open ones, the share, the warmth.
_THEN = ((0, 0.18, 0.15), (1, 0.17, 0.15), (0, 0.17, 0.05))


@dataclass
class Found:
    """One run, and where it came from.

    Args:
        least: what the search makes short, of this run.
        source: how it was found, in words.
        policy: that it was constructed by, if it was.
    """

    least: float
    run: Run
    source: str
    policy: Policy | None = None


@dataclass
class Pool:
    """What has been found for one layout, best first, and what none can beat; in its own units."""

    problem: Problem
    bound: float
    found: list[Found] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Keeps `found` if it is among the best, instead of a construction that is as short: a
        pool of equals would only breed their like."""
        self.found = [
            one
            for one in self.found
            if found.policy is None or one.policy is None or abs(one.least - found.least) > ROUNDING
        ]
        self.found.append(found)
        self.found.sort(key=lambda one: one.least)
        del self.found[_KEPT:]

    @property
    def time(self) -> float:
        """The shortest time found, in the units of the costs."""
        return self.found[0].least * self.problem.time_unit if self.found else NEVER


class Search:
    """A search over all layouts of one pipeline.

    Args:
        problems: one per layout.
        measure, bound: what is to be short, and what it cannot stay below.
        over: whether time is up.
        effort: what all shares are multiplied with.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        measure: Measure,
        bound: Callable[[Problem], float],
        over: Callable[[], bool],
        effort: float = 1.0,
    ) -> None:
        self.pools = [Pool(problem, bound(problem)) for problem in problems]
        self.measure, self.over = measure, over
        self.rng = random.Random(0)
        usual = 3 * 2 * problems[0].num_ranks * problems[0].num_microbatches / _USUAL
        self.effort = effort * max(usual, usual**0.5)

    @property
    def best(self) -> Pool:
        """The pool of the shortest; the first of those that are as short."""
        least = min(pool.time for pool in self.pools)
        return next(pool for pool in self.pools if pool.time <= least * (1 + ROUNDING))

    @property
    def bound(self) -> float:
        """What no plan on any of the layouts can stay below, in the units of the costs."""
        return min(pool.bound * pool.problem.time_unit for pool in self.pools)

    def run(self) -> Pool:
        """The best pool, its best first."""
        for pool in self.pools:
            self._named(pool)
        for share, most in _ROUNDS:
            self._construct(share, most)
        self._anneal()
        return self.best

    def _open(self) -> list[Pool]:
        """The layouts that can still give something better, most promising first."""
        reached = self.best.time * (1 - ROUNDING)
        better = [pool for pool in self.pools if pool.bound * pool.problem.time_unit < reached]
        return [] if self.over() else sorted(better, key=lambda pool: pool.time)

    def _named(self, pool: Pool) -> None:
        problem = pool.problem
        for plan in named_plans(problem):
            orders = problem.orders_of(plan)
            self._offer(pool, orders, plan.name)
            if not problem.whole_backward_helps:
                self._offer(pool, _in_halves(problem, orders), f"{plan.name} in halves")

    def _offer(self, pool: Pool, orders: Orders, source: str, policy: Policy | None = None) -> None:
        if pool.problem.fits(orders) and (run := play(pool.problem, orders)) is not None:
            pool.add(Found(self.measure(run), run, source, policy))

    def _construct(self, share: float, most: int) -> None:
        pools = self._open()[:most]
        steps = share * _CONSTRUCTED * self.effort
        tries = round(steps / max(1, sum(pool.problem.size for pool in pools)))
        for pool in pools:
            proven = Policy.proven(pool.problem) if most > len(self.pools) else []
            for trial in range(tries):
                policy = proven[trial] if trial < len(proven) else self._policy(pool)
                full = len(pool.found) == _KEPT and self.measure is makespan
                until = pool.found[-1].least + ROUNDING if full else NEVER
                orders = construct(pool.problem, policy, until)
                if orders is not None:
                    self._offer(pool, orders, "greedy", policy)
                if self.over() or pool.found[0].least < pool.bound + ROUNDING:
                    break

    def _policy(self, pool: Pool) -> Policy:
        """Any policy, or a variant of one of the best."""
        parents = [one.policy for one in pool.found if one.policy is not None]
        if not parents or self.rng.random() < _FRESH:
            return Policy.drawn(pool.problem, self.rng)
        return self.rng.choice(parents).varied(pool.problem, self.rng)

    def _anneal(self) -> None:
        starts = sorted(
            ((pool, found) for pool in self._open() for found in _distinct(pool.found)),
            key=lambda start: start[1].least * start[0].problem.time_unit,
        )
        for pool, found in starts[:_STARTS]:
            self._anneal_from(pool, found, _FIRST_SHARE, _THEN[0][-1])
        for place, share, warmth in _THEN:
            if pools := self._open()[: place + 1]:
                self._anneal_from(pools[-1], pools[-1].found[0], share, warmth)

    def _anneal_from(self, pool: Pool, found: Found, share: float, warmth: float) -> None:
        if pool not in self._open():
            return
        replays = round(share * _REPLAYED * self.effort / pool.problem.size)
        seed = self.rng.randrange(2**31)
        run = anneal(found.run, replays, warmth, self.measure, seed, pool.bound, self.over)
        least = self.measure(run)
        if least < found.least - ROUNDING:
            ends = ", annealed"
            pool.add(Found(least, run, found.source.removesuffix(ends) + ends))


def _distinct(found: Sequence[Found]) -> list[Found]:
    """The best constructed and the best named one."""
    kinds: dict[bool, Found] = {}
    for one in found:
        kinds.setdefault(one.policy is None, one)
    return list(kinds.values())


def named_plans(problem: Problem) -> list[Plan]:
    """The named schedules that lie on the ranks as the problem does, whatever they hold."""
    ranks, home = problem.num_ranks, problem.home
    chunks, rest = divmod(problem.num_stages, ranks)
    sizes = Sizes(ranks, problem.num_microbatches, chunks)
    families = [f for f in SCHEDULES.values() if not rest and f.refuses(sizes) is None]
    places = {"loop": loop(ranks, chunks), "v": v(ranks, chunks)}
    return [f.build(sizes) for f in families if places[f.placement] == home]


def _in_halves(problem: Problem, orders: Orders) -> Orders:
    """`orders` with each B as an I and its W right behind it."""
    num = problem.num_stages
    halves = {
        WHOLE * num + stage: (INPUT * num + stage, WEIGHT * num + stage) for stage in range(num)
    }
    return [[half for code in order for half in halves.get(code, (code,))] for order in orders]

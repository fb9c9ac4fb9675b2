"""Local search: steps move within the order of their rank, mostly where the critical path runs.

Source of the neighbourhood: van Laarhoven, Aarts, Lenstra 1992 (simulated annealing for the job
shop): only a change on a critical path can shorten a schedule. Acceptance is by threshold instead
of by exponential, so that the result is the same on every machine.
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

from pipemega.pipeline.synthesis.clock import NEVER, Measure, Run, makespan, replay, settle
from pipemega.pipeline.synthesis.problem import (
    FORWARD,
    INPUT,
    ROUNDING,
    WEIGHT,
    WHOLE,
    Problem,
)

# How far a step moves, in places.
_FAR = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 7, 10)


def anneal(
    run: Run,
    replays: int,
    warmth: float,
    measure: Measure,
    seed: int,
    target: float = 0.0,
    over: Callable[[], bool] = lambda: False,
) -> Run:
    """The best run that is found by `replays` trials that start from `run`.

    Args:
        warmth: how much longer a run may become by one change at first, in units of the problem.
        measure: what is to be short.
        target: a run as short as this is good enough.
        over: whether time is up.
    """
    rng = random.Random(seed)
    search = _Search(run.problem, run, rng)
    best, least = run, measure(run)
    current = _smooth(run, measure)
    for trial in range(replays):
        if trial % 64 == 0 and over():
            break
        change = search.change()
        if change is None:
            continue
        rank, order, first = change
        u = rng.random()
        bar = current + warmth * (1 - trial / replays) ** 2 * u * u * u + ROUNDING
        changed = replay(search.run, rank, order, first, bar if measure is makespan else NEVER)
        if changed is None:
            continue
        reached = _smooth(changed, measure)
        if reached > bar:
            continue
        settle(changed, rank)
        search.accept(changed, rank)
        current = reached
        if measure(changed) < least - ROUNDING:
            best, least = changed, measure(changed)
            if least <= target + ROUNDING:
                break
    return best


def _smooth(run: Run, measure: Measure) -> float:
    # Among runs that are equally long, those whose ranks are done sooner lead on.
    return measure(run) + 0.02 * sum(run.clock) / len(run.clock)


class _Search:
    """Where a search stands, and what it may try next."""

    def __init__(self, problem: Problem, run: Run, rng: random.Random) -> None:
        self.problem, self.run, self.rng = problem, run, rng
        self.held = [list(accumulate(problem.takes[c] for c in order)) for order in run.orders]
        self.path: list[tuple[int, int]] = []
        self.fuses = problem.whole_backward_helps

    def accept(self, run: Run, rank: int) -> None:
        self.run = run
        self.held[rank] = list(accumulate([self.problem.takes[c] for c in run.orders[rank]]))
        self.path = []

    def change(self) -> tuple[int, list[int], int] | None:
        """Another order for one rank, and from where on it differs; None if this try is void."""
        rng, orders = self.rng, self.run.orders
        if self.fuses and rng.random() < 0.1:
            return self._fused_or_split()
        far = rng.choice(_FAR)
        if not self.path:
            self.path = critical_path(self.run, rng)
        if self.path and rng.random() < 0.7:
            rank, at = rng.choice(self.path)
            back = rng.random() < 0.5
            if not back:
                at -= 1  # the step before makes way
        else:
            rank = rng.randrange(len(orders))
            at = rng.randrange(len(orders[rank]))
            back = rng.random() < 0.5
        if rng.random() < 0.08:
            return self._repeated(rank, at, -far if back else far)
        return self._moved(rank, at, -far if back else far)

    def _moved(self, rank: int, at: int, far: int) -> tuple[int, list[int], int] | None:
        order, held = self.run.orders[rank], self.held[rank]
        code = order[at]
        takes, limit = self.problem.takes[code], self.problem.limit[rank] + ROUNDING
        if far < 0:
            to = max(at + far, self._earliest(code, at))
            if to >= at:
                return None
            if takes > 0 and max(held[max(0, to - 1) : at]) + takes > limit:
                return None
            return rank, [*order[:to], code, *order[to:at], *order[at + 1 :]], to
        to = min(at + far, self._latest(code, at, len(order)))
        if to <= at or (takes < 0 and max(held[at : to + 1]) - takes > limit):
            return None
        return rank, [*order[:at], *order[at + 1 : to + 1], code, *order[to + 1 :]], at

    def _earliest(self, code: int, at: int) -> int:
        """The first place that the step at `at` may move to: behind what it must follow."""
        kind, stage = divmod(code, self.problem.num_stages)
        places, num = self.run.places, self.problem.num_stages
        own = places[(INPUT if kind == WHOLE else kind) * num + stage]
        n = bisect_left(own, at)
        bound = own[n - 1] if n else -1
        if kind in (INPUT, WHOLE):
            bound = max(bound, places[FORWARD * num + stage][n])
        elif kind == WEIGHT:
            bound = max(bound, places[INPUT * num + stage][n])
        if kind == WHOLE and n:
            bound = max(bound, places[WEIGHT * num + stage][n - 1])
        return bound + 1

    def _latest(self, code: int, at: int, length: int) -> int:
        """The last place that the step at `at` may move to: before what must follow it."""
        kind, stage = divmod(code, self.problem.num_stages)
        places, num = self.run.places, self.problem.num_stages
        own = places[(INPUT if kind == WHOLE else kind) * num + stage]
        n = bisect_left(own, at)
        bound = own[n + 1] if n + 1 < len(own) else length
        if kind in (FORWARD, INPUT):
            bound = min(bound, places[(kind + 1) * num + stage][n])
        return bound - 1

    def _repeated(self, rank: int, at: int, far: int) -> tuple[int, list[int], int] | None:
        """The same move for the same step of a run of micro-batches, every one or every other."""
        rng, order = self.rng, self.run.orders[rank]
        code, num = order[at], self.problem.num_stages
        kind, stage = divmod(code, num)
        own = self.run.places[(INPUT if kind == WHOLE else kind) * num + stage]
        n, stride = bisect_left(own, at), rng.choice((1, 1, 2))
        count = stride * rng.choice((2, 3, 4, len(own)))
        chosen = set(own[n : n + count : stride])
        shift = far + 0.5 if far > 0 else far - 0.5
        moved = sorted(range(len(order)), key=lambda i: i + shift if i in chosen else i)
        return self._checked(rank, [order[i] for i in moved])

    def _fused_or_split(self) -> tuple[int, list[int], int] | None:
        """One I and its W as a B, or the other way round."""
        rng, num = self.rng, self.problem.num_stages
        stage, n = rng.randrange(num), rng.randrange(self.problem.num_microbatches)
        rank = self.problem.home[stage]
        order = self.run.orders[rank].copy()
        first = self.run.places[INPUT * num + stage][n]
        second = self.run.places[WEIGHT * num + stage][n]
        if first == second:
            order[first : first + 1] = [INPUT * num + stage, WEIGHT * num + stage]
        else:
            del order[second]
            order[first] = WHOLE * num + stage
        return self._checked(rank, order)

    def _checked(self, rank: int, order: list[int]) -> tuple[int, list[int], int] | None:
        if not is_order(self.problem, rank, order):
            return None
        old = self.run.orders[rank]
        first = next((i for i, (a, b) in enumerate(zip(old, order, strict=False)) if a != b), None)
        return None if first is None else (rank, order, first)


def is_order(problem: Problem, rank: int, order: list[int]) -> bool:
    """Whether `order` keeps the rules of a rank by itself, and its limit."""
    num, takes, limit = problem.num_stages, problem.takes, problem.limit[rank] + ROUNDING
    seen = [0] * (3 * num)
    held = 0.0
    for code in order:
        kind, stage = divmod(code, num)
        held += takes[code]
        if held > limit:
            return False
        if kind == WHOLE:
            if seen[2 * num + stage] != seen[num + stage] or seen[stage] <= seen[num + stage]:
                return False
            seen[num + stage] += 1
            seen[2 * num + stage] += 1
        else:
            if kind and seen[code - num] <= seen[code]:
                return False
            seen[code] += 1
    return True


def critical_path(run: Run, rng: random.Random) -> list[tuple[int, int]]:
    """Steps that wait for the one before them on their rank, along one way through what
    determines when the last rank is done: (rank, place) from the end to the start."""
    problem, start, places = run.problem, run.start, run.places
    num, time = problem.num_stages, problem.time
    last = max(run.clock) - ROUNDING
    rank = rng.choice([r for r, end in enumerate(run.clock) if end >= last])
    at = len(run.orders[rank]) - 1
    path = []
    while (began := start[rank][at]) > ROUNDING:
        order = run.orders[rank]
        code = order[at]
        need = problem.needs[code]
        busy = at > 0 and start[rank][at - 1] + time[order[at - 1]] > began - ROUNDING
        if need >= 0:
            n = bisect_left(places[problem.gives[code]], at)
            there = run.ends[need][n] + problem.travels[code] > began - ROUNDING
            if there and (not busy or rng.random() < 0.5):
                rank, at = problem.home[need % num], places[need][n]
                continue
        path.append((rank, at))
        at -= 1
    return path

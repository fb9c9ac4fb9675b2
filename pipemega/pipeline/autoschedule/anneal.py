"""Local search: moves steps within the order of their rank, mostly along the critical path.

Source of the neighbourhood: van Laarhoven, Aarts, Lenstra 1992 (simulated annealing for the job
shop): only a change on a critical path can shorten a schedule. A threshold instead of an
exponential decides whether a change is accepted, so that the result is the same on every machine.
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

from pipemega.pipeline.autoschedule.greedy import (
    NEVER,
    Measure,
    Run,
    makespan,
    replay_change,
    update_places,
)
from pipemega.pipeline.autoschedule.problem import FORWARD, INPUT, ROUNDING, WEIGHT, WHOLE, Problem

# Distance by which a step moves, in positions.
_DISTANCES = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 7, 10)


def anneal(
    run: Run,
    replays: int,
    temperature: float,
    measure: Measure,
    seed: int,
    target: float = 0.0,
    time_is_up: Callable[[], bool] = lambda: False,
) -> Run:
    """Return the best run found by `replays` trials that start from `run`.

    Args:
        temperature: how much longer a run may become by one change at the beginning, in units of
            the problem.
        measure: what is minimised.
        target: stop when a run is as short as this.
        time_is_up: returns whether the time is up.
    """
    rng = random.Random(seed)
    neighbourhood = _Neighbourhood(run.problem, run, rng)
    best, least = run, measure(run)
    current = _smooth(run, measure)
    for trial in range(replays):
        if trial % 64 == 0 and time_is_up():
            break
        change = neighbourhood.change()
        if change is None:
            continue
        rank, order, first = change
        u = rng.random()
        threshold = current + temperature * (1 - trial / replays) ** 2 * u * u * u + ROUNDING
        changed = replay_change(
            neighbourhood.run, rank, order, first, threshold if measure is makespan else NEVER
        )
        if changed is None:
            continue
        reached = _smooth(changed, measure)
        if reached > threshold:
            continue
        update_places(changed, rank)
        neighbourhood.accept(changed, rank)
        current = reached
        if measure(changed) < least - ROUNDING:
            best, least = changed, measure(changed)
            if least <= target + ROUNDING:
                break
    return best


def _smooth(run: Run, measure: Measure) -> float:
    # Of runs with the same length, prefer the run whose ranks finish earlier.
    return measure(run) + 0.02 * sum(run.finish) / len(run.finish)


# A rank, its new order, and the first position that differs.
Change = tuple[int, list[int], int]


class _Neighbourhood:
    """The current run of a search; proposes changes to it."""

    def __init__(self, problem: Problem, run: Run, rng: random.Random) -> None:
        self.problem, self.run, self.rng = problem, run, rng
        self.held = [list(accumulate(problem.memory[c] for c in order)) for order in run.orders]
        self.path: list[tuple[int, int]] = []
        self.may_fuse = problem.whole_backward_helps

    def accept(self, run: Run, rank: int) -> None:
        self.run = run
        self.held[rank] = list(accumulate([self.problem.memory[c] for c in run.orders[rank]]))
        self.path = []

    def change(self) -> Change | None:
        """Return a random change; None if the chosen step cannot move."""
        rng, orders = self.rng, self.run.orders
        if self.may_fuse and rng.random() < 0.1:
            return self._fuse_or_split()
        distance = rng.choice(_DISTANCES)
        if not self.path:
            self.path = critical_path(self.run, rng)
        if self.path and rng.random() < 0.7:
            rank, at = rng.choice(self.path)
            back = rng.random() < 0.5
            if not back:
                at -= 1  # move the previous step back instead
        else:
            rank = rng.randrange(len(orders))
            at = rng.randrange(len(orders[rank]))
            back = rng.random() < 0.5
        if rng.random() < 0.08:
            return self._move_repeated(rank, at, -distance if back else distance)
        return self._move(rank, at, -distance if back else distance)

    def _move(self, rank: int, at: int, distance: int) -> Change | None:
        order, held = self.run.orders[rank], self.held[rank]
        code = order[at]
        memory, limit = self.problem.memory[code], self.problem.limit[rank] + ROUNDING
        if distance < 0:
            to = max(at + distance, self._earliest(code, at))
            if to >= at:
                return None
            if memory > 0 and max(held[max(0, to - 1) : at]) + memory > limit:
                return None
            return rank, [*order[:to], code, *order[to:at], *order[at + 1 :]], to
        to = min(at + distance, self._latest(code, at, len(order)))
        if to <= at or (memory < 0 and max(held[at : to + 1]) - memory > limit):
            return None
        return rank, [*order[:at], *order[at + 1 : to + 1], code, *order[to + 1 :]], at

    def _earliest(self, code: int, at: int) -> int:
        """Return the first position to which the step at `at` may move: after its predecessors."""
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
        """Return the last position to which the step at `at` may move: before its successors."""
        kind, stage = divmod(code, self.problem.num_stages)
        places, num = self.run.places, self.problem.num_stages
        own = places[(INPUT if kind == WHOLE else kind) * num + stage]
        n = bisect_left(own, at)
        bound = own[n + 1] if n + 1 < len(own) else length
        if kind in (FORWARD, INPUT):
            bound = min(bound, places[(kind + 1) * num + stage][n])
        return bound - 1

    def _move_repeated(self, rank: int, at: int, distance: int) -> Change | None:
        """Make the same move for several micro-batches, every one or every other."""
        rng, order = self.rng, self.run.orders[rank]
        code, num = order[at], self.problem.num_stages
        kind, stage = divmod(code, num)
        own = self.run.places[(INPUT if kind == WHOLE else kind) * num + stage]
        n, stride = bisect_left(own, at), rng.choice((1, 1, 2))
        count = stride * rng.choice((2, 3, 4, len(own)))
        chosen = set(own[n : n + count : stride])
        shift = distance + 0.5 if distance > 0 else distance - 0.5
        moved = sorted(range(len(order)), key=lambda i: i + shift if i in chosen else i)
        return self._checked(rank, [order[i] for i in moved])

    def _fuse_or_split(self) -> Change | None:
        """Replace one I and its W by a B, or a B by I and W."""
        rng, num = self.rng, self.problem.num_stages
        stage, n = rng.randrange(num), rng.randrange(self.problem.num_microbatches)
        rank = self.problem.rank_of_stage[stage]
        order = self.run.orders[rank].copy()
        first = self.run.places[INPUT * num + stage][n]
        second = self.run.places[WEIGHT * num + stage][n]
        if first == second:
            order[first : first + 1] = [INPUT * num + stage, WEIGHT * num + stage]
        else:
            del order[second]
            order[first] = WHOLE * num + stage
        return self._checked(rank, order)

    def _checked(self, rank: int, order: list[int]) -> Change | None:
        if not is_valid_order(self.problem, rank, order):
            return None
        old = self.run.orders[rank]
        first = next((i for i, (a, b) in enumerate(zip(old, order, strict=False)) if a != b), None)
        return None if first is None else (rank, order, first)


def is_valid_order(problem: Problem, rank: int, order: list[int]) -> bool:
    """Return whether `order` keeps the rules within one rank, and its memory limit."""
    num, memory, limit = problem.num_stages, problem.memory, problem.limit[rank] + ROUNDING
    seen = [0] * (3 * num)
    held = 0.0
    for code in order:
        kind, stage = divmod(code, num)
        held += memory[code]
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
    """Return the steps on one critical path that wait for the previous step of their rank.

    The path goes from the end of the last rank back to time 0, as (rank, position).
    """
    problem, start, places = run.problem, run.start, run.places
    num, time = problem.num_stages, problem.time
    last = max(run.finish) - ROUNDING
    rank = rng.choice([r for r, end in enumerate(run.finish) if end >= last])
    at = len(run.orders[rank]) - 1
    path = []
    while (began := start[rank][at]) > ROUNDING:
        order = run.orders[rank]
        code = order[at]
        need = problem.needs[code]
        busy = at > 0 and start[rank][at - 1] + time[order[at - 1]] > began - ROUNDING
        if need >= 0:
            n = bisect_left(places[problem.result_of[code]], at)
            waited = run.ends[need][n] + problem.latency[code] > began - ROUNDING
            if waited and (not busy or rng.random() < 0.5):
                rank, at = problem.rank_of_stage[need % num], places[need][n]
                continue
        path.append((rank, at))
        at -= 1
    return path

"""Orders played against the clock: what `simulate` says of a plan, many times as fast.

A search that changes the order of one rank from some place on plays again only from that point in
time (`replay`): what started before cannot have depended on it.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from pipemega.pipeline.synthesis.problem import WHOLE, Orders, Problem

NEVER = float("inf")


@dataclass(slots=True)
class Run:
    """Orders, and when their steps run.

    Args:
        orders: of each rank.
        start: start[r][i] is when rank r begins step i of its order.
        clock: when each rank is done.
        ends: ends[x][n] is when result x of micro-batch n is there, on the rank that made it.
        places: places[x][n] is where in its rank's order the step stands that gives result x of
            micro-batch n; places[2 * num_stages + s] are the W and B of stage s.
    """

    problem: Problem
    orders: Orders
    start: list[list[float]]
    clock: list[float]
    ends: list[list[float]]
    places: list[list[int]]


# What a search makes short.
Measure = Callable[[Run], float]


def makespan(run: Run) -> float:
    """From the first step of any rank, at 0, to the last."""
    return max(run.clock)


def span(run: Run) -> float:
    """The longest that any one rank takes from its own first step to its own last."""
    return max(end - row[0] for end, row in zip(run.clock, run.start, strict=True))


def play(problem: Problem, orders: Orders) -> Run | None:
    """Plays `orders`; None if they stand still."""
    num, ranks = problem.num_stages, problem.num_ranks
    run = Run(
        problem,
        orders,
        [[] for _ in range(ranks)],
        [0.0] * ranks,
        [[] for _ in range(2 * num)],
        [[] for _ in range(3 * num)],
    )
    for order in orders:
        _note_places(run, order)
    return run if _finish(run, [0] * ranks, NEVER) else None


def replay(run: Run, rank: int, order: list[int], first: int, until: float = NEVER) -> Run | None:
    """`run` with another order on `rank`, which is the same before place `first`.

    None if it stands still, or if some rank cannot be done by `until`. The places are those of
    `run`; whoever keeps the new one calls `settle`.
    """
    problem = run.problem
    num, since = problem.num_stages, 0.0
    if first:
        since = run.start[rank][first - 1] + problem.time[run.orders[rank][first - 1]]
    cursor = [bisect_left(row, since) for row in run.start]
    cursor[rank] = first
    orders = run.orders.copy()
    orders[rank] = order
    start = [row[:at] for row, at in zip(run.start, cursor, strict=True)]
    clock = [
        row[-1] + problem.time[order[at - 1]] if at else 0.0
        for row, order, at in zip(start, orders, cursor, strict=True)
    ]
    ends = [
        run.ends[result][: bisect_left(run.places[result], cursor[problem.home[result % num]])]
        for result in range(2 * num)
    ]
    changed = Run(problem, orders, start, clock, ends, run.places)
    return changed if _finish(changed, cursor, until) else None


def settle(run: Run, rank: int) -> None:
    """Notes where the steps of `rank` stand now."""
    num = run.problem.num_stages
    run.places = run.places.copy()
    for stage in run.problem.stages[rank]:
        for kind in range(3):
            run.places[kind * num + stage] = []
    _note_places(run, run.orders[rank])


def _note_places(run: Run, order: list[int]) -> None:
    num, places = run.problem.num_stages, run.places
    whole = WHOLE * num
    for at, code in enumerate(order):
        if code < whole:
            places[code].append(at)
        else:
            places[code - 2 * num].append(at)
            places[code - num].append(at)


def _finish(run: Run, cursor: list[int], until: float) -> bool:
    """Plays each rank from its cursor to the end; whether all get there, in time."""
    problem, ends, clock = run.problem, run.ends, run.clock
    time, travels = problem.time, problem.travels
    # By code: the list that its result goes to, and the one that it waits for.
    out = [ends[x] if x >= 0 else None for x in problem.gives]
    awaited = [ends[x] if x >= 0 else None for x in problem.needs]
    needs, gives = problem.needs, problem.gives
    sleeper = [-1] * len(ends)
    awake = list(range(problem.num_ranks))
    spare = (
        [
            until - now - sum([time[code] for code in order[at:]])
            for now, order, at in zip(clock, run.orders, cursor, strict=True)
        ]
        if until < NEVER
        else [NEVER] * problem.num_ranks
    )
    while awake:
        rank = awake.pop()
        order, at, now, row = run.orders[rank], cursor[rank], clock[rank], run.start[rank]
        for code in order[at:]:
            results = out[code]
            if results is None:
                row.append(now)
                now += time[code]
                at += 1
                continue
            ready = awaited[code]
            if ready is not None:
                n = len(results)
                if n >= len(ready):
                    sleeper[needs[code]] = rank
                    break
                there = ready[n] + travels[code]
                if there > now:
                    spare[rank] -= there - now
                    if spare[rank] < 0.0:
                        return False
                    now = there
            row.append(now)
            now += time[code]
            results.append(now)
            at += 1
            if sleeper[gives[code]] >= 0:
                awake.append(sleeper[gives[code]])
                sleeper[gives[code]] = -1
        cursor[rank], clock[rank] = at, now
    return all(at == len(order) for at, order in zip(cursor, run.orders, strict=True))

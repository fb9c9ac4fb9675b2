"""Times of orders: the same results as `plan.simulate`, many times faster.

If a search changes the order of one rank from some position on, `replay_change` recomputes only the
steps from that point in time: earlier steps do not depend on the change.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from pipemega.pipeline.autoschedule.problem import WHOLE, Orders, Problem

NEVER = float("inf")


@dataclass(slots=True)
class Run:
    """Orders with the times of their steps.

    Args:
        orders: of each rank.
        start: start[r][i] is the start time of step i of rank r.
        finish: the time at which each rank finishes.
        ends: ends[x][n] is when result x of micro-batch n is computed.
        places: places[x][n] is the position, in the order of its rank, of the step that gives
            result x of micro-batch n; places[2 * num_stages + s] are those of W and B of stage s.
    """

    problem: Problem
    orders: Orders
    start: list[list[float]]
    finish: list[float]
    ends: list[list[float]]
    places: list[list[int]]


# What a search minimises.
Measure = Callable[[Run], float]


def makespan(run: Run) -> float:
    """Return the time from the first step of any rank, at 0, to the end of the last."""
    return max(run.finish)


def span(run: Run) -> float:
    """Return the longest time of any rank from its own first step to its own last."""
    return max(end - row[0] for end, row in zip(run.finish, run.start, strict=True))


def replay_all(problem: Problem, orders: Orders) -> Run | None:
    """Compute the times of `orders`; None if they deadlock."""
    num, ranks = problem.num_stages, problem.num_ranks
    start: list[list[float]] = [[] for _ in range(ranks)]
    ends: list[list[float]] = [[] for _ in range(2 * num)]
    run = Run(problem, orders, start, [0.0] * ranks, ends, [[] for _ in range(3 * num)])
    for order in orders:
        _add_places(run, order)
    return run if _run(run, [0] * ranks, NEVER) else None


def replay_change(
    run: Run, rank: int, order: list[int], first: int, until: float = NEVER
) -> Run | None:
    """Return `run` with another order on `rank` that is the same before position `first`.

    Returns None if it deadlocks or a rank cannot finish by `until`. The result shares `places` with
    `run`; call `update_places` to keep it.
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
    finish = [
        row[-1] + problem.time[order[at - 1]] if at else 0.0
        for row, order, at in zip(start, orders, cursor, strict=True)
    ]
    ends = []
    for result in range(2 * num):
        stop = cursor[problem.rank_of_stage[result % num]]
        ends.append(run.ends[result][: bisect_left(run.places[result], stop)])
    changed = Run(problem, orders, start, finish, ends, run.places)
    return changed if _run(changed, cursor, until) else None


def update_places(run: Run, rank: int) -> None:
    """Recompute the places of the steps of `rank`."""
    num = run.problem.num_stages
    run.places = run.places.copy()
    for stage in run.problem.stages[rank]:
        for kind in range(3):
            run.places[kind * num + stage] = []
    _add_places(run, run.orders[rank])


def _add_places(run: Run, order: list[int]) -> None:
    num, places = run.problem.num_stages, run.places
    whole = WHOLE * num
    for at, code in enumerate(order):
        if code < whole:
            places[code].append(at)
        else:
            places[code - 2 * num].append(at)
            places[code - num].append(at)


def _run(run: Run, cursor: list[int], until: float) -> bool:
    """Run each rank from its cursor to its end; return whether all finish by `until`."""
    problem, ends, finish = run.problem, run.ends, run.finish
    time, latency = problem.time, problem.latency
    # By code: the list that takes its result, and the list of the results that it waits for.
    out = [ends[x] if x >= 0 else None for x in problem.result_of]
    awaited = [ends[x] if x >= 0 else None for x in problem.needs]
    needs, result_of = problem.needs, problem.result_of
    waiting_rank = [-1] * len(ends)
    runnable = list(range(problem.num_ranks))
    slack = [NEVER] * problem.num_ranks
    if until < NEVER:
        slack = [
            until - now - sum([time[code] for code in order[at:]])
            for now, order, at in zip(finish, run.orders, cursor, strict=True)
        ]
    while runnable:
        rank = runnable.pop()
        order, at, now, row = run.orders[rank], cursor[rank], finish[rank], run.start[rank]
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
                    waiting_rank[needs[code]] = rank
                    break
                arrival = ready[n] + latency[code]
                if arrival > now:
                    slack[rank] -= arrival - now
                    if slack[rank] < 0.0:
                        return False
                    now = arrival
            row.append(now)
            now += time[code]
            results.append(now)
            at += 1
            if waiting_rank[result_of[code]] >= 0:
                runnable.append(waiting_rank[result_of[code]])
                waiting_rank[result_of[code]] = -1
        cursor[rank], finish[rank] = at, now
    return all(at == len(order) for at, order in zip(cursor, run.orders, strict=True))

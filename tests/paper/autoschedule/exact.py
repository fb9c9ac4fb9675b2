"""An oracle for small problems: the best plan of one placement by OR-tools (pip install ortools).

Each F, I and W is a time interval; the intervals of a rank do not overlap, and the held memory is
limited at every time. CP-SAT finds the shortest makespan, or a bound and the best plan so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule.greedy import replay_all
from pipemega.pipeline.autoschedule.problem import (
    FORWARD,
    INPUT,
    WEIGHT,
    Orders,
    Placement,
    Problem,
)

# The solver uses integers: the time unit is 1 divided by one of these numbers.
_DIVISORS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 25, 30, 40, 50, 60, 80, 100, 200, 400, 1000)
# Memory is rounded to 1 / _MEMORY_STEPS of the least that a rank needs.
_MEMORY_STEPS = 1_000_000


@dataclass(frozen=True)
class Proof:
    """Result of the solver.

    Args:
        orders: the orders of the best plan; None if no plan was found in time.
        makespan: the makespan of this plan, in the units of the costs; infinite if there is none.
        bound: lower bound for any plan of F, I and W on this placement; equal to the makespan if
            the plan is optimal.
    """

    orders: Orders | None
    makespan: float
    bound: float


def solve(
    placement: Placement,
    num_microbatches: int,
    limits: Sequence[float],
    *,
    seconds: float = 60.0,
    upper_bound: float | None = None,
) -> Proof:
    """Return the shortest plan with split backward on `placement` within `limits` per rank.

    Args:
        seconds: time limit; the best plan so far is returned.
        upper_bound: a makespan that is known to be possible, in the units of the costs; speeds up
            the search.

    Raises:
        ScheduleError: a time is 0 or not a multiple of a simple fraction
            of 1; or a whole backward is faster than its halves or holds less memory.
    """
    from ortools.sat.python import cp_model

    problem = Problem.of(placement, num_microbatches, limits)
    if problem.whole_backward_helps:
        raise ScheduleError(
            "the exact search supports only split backward, and with these costs a whole backward "
            "is faster or holds less memory"
        )
    tick = _tick(placement)
    horizon = math.ceil((upper_bound or 4 * sum(problem.least_work) * problem.time_unit) / tick)
    model: Any = cp_model.CpModel()
    start = _starts(model, problem, tick, horizon)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    bound = solver.best_objective_bound * tick
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(None, math.inf, bound)
    orders: Orders = []
    for stages in problem.stages:
        codes = [k * problem.num_stages + s for k in (FORWARD, INPUT, WEIGHT) for s in stages]
        timed = [
            (solver.value(start[code, n]), code // problem.num_stages, n, code)
            for code in codes
            for n in range(num_microbatches)
        ]
        orders.append([code for *_, code in sorted(timed)])
    run = replay_all(problem, orders)
    assert run is not None, "an exact plan deadlocks"
    return Proof(orders, max(run.finish) * problem.time_unit, bound)


def _tick(placement: Placement) -> float:
    """Return a time unit of which all times are multiples."""
    costs = placement.costs
    steps = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    for divisor in _DIVISORS:
        scaled = [time * divisor for time in (*steps, costs.message)]
        if min(steps) > 0 and all(abs(time - round(time)) < 1e-6 for time in scaled):
            return 1 / divisor
    raise ScheduleError(
        "the exact search uses integers: give every instruction a time above 0 that is a "
        f"multiple of 1 / {_DIVISORS[-1]}"
    )


def _starts(model: Any, problem: Problem, tick: float, horizon: int) -> dict[tuple[int, int], Any]:
    """Add a variable for the start of step n of each code, and all constraints, to the model."""
    num, count = problem.num_stages, problem.num_microbatches
    time = [round(each * problem.time_unit / tick) for each in problem.time]
    latency = [round(each * problem.time_unit / tick) for each in problem.latency]
    start = {at: model.new_int_var(0, horizon, "") for at in product(range(3 * num), range(count))}
    producer = {result: code for code, result in enumerate(problem.result_of[: 2 * num])}
    end = model.new_int_var(0, horizon, "")
    for (code, n), variable in start.items():
        need = producer.get(problem.needs[code], code - num if code >= WEIGHT * num else None)
        if need is not None:
            model.add(variable >= start[need, n] + time[need] + latency[code])
        if n:
            model.add(variable >= start[code, n - 1] + time[code])
        model.add(end >= variable + time[code])
    for rank, stages in enumerate(problem.stages):
        steps = [(k * num + s, n) for k in range(3) for s in stages for n in range(count)]
        intervals = [model.new_fixed_size_interval_var(start[at], time[at[0]], "") for at in steps]
        model.add_no_overlap(intervals)
        if math.isfinite(problem.limit[rank]):
            _limit_memory(model, problem, rank, start, time)
    model.minimize(end)
    return start


def _limit_memory(
    model: Any, problem: Problem, rank: int, start: dict[tuple[int, int], Any], time: list[int]
) -> None:
    """Limit the memory of a rank: one amount from F until I starts, another until W ends."""
    num, intervals, sizes = problem.num_stages, [], []
    for stage in problem.stages[rank]:
        forward, first, second = (kind * num + stage for kind in (FORWARD, INPUT, WEIGHT))
        for n in range(problem.num_microbatches):
            for since, until, size in (
                (start[forward, n], start[first, n], problem.memory[forward]),
                (start[first, n], start[second, n] + time[second], -problem.memory[second]),
            ):
                length = model.new_int_var(0, 2**40, "")
                intervals.append(model.new_interval_var(since, length, until, ""))
                sizes.append(round(size * _MEMORY_STEPS))
    model.add_cumulative(intervals, sizes, round(problem.limit[rank] * _MEMORY_STEPS) + len(sizes))

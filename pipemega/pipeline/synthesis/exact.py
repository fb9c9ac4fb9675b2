"""The best plan of one layout, proven: for a few hundred steps, where OR-tools is installed.

Each F, I and W is an interval of time; those of a rank do not overlap, and what they hold is
counted at every moment. CP-SAT finds the shortest makespan, or a bound and the best so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipemega.errors import ScheduleError
from pipemega.pipeline.synthesis.clock import play
from pipemega.pipeline.synthesis.layouts import Layout
from pipemega.pipeline.synthesis.problem import FORWARD, INPUT, WEIGHT, Orders, Problem

# The solver counts in whole numbers: the unit of time is one of these parts of 1.
_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 25, 30, 40, 50, 60, 80, 100, 200, 400, 1000)
# Memory need not be exact beyond this part of the least that a rank needs.
_GRAINS = 1_000_000


@dataclass(frozen=True)
class Proof:
    """What the solver found.

    Args:
        orders: of the best plan, None if it found none in time.
        makespan: of that plan; infinite if there is none.
        bound: what no plan of F, I and W on this layout can stay below; equal to the makespan if
            the plan is the best there is. In the units of the costs, as the makespan.
    """

    orders: Orders | None
    makespan: float
    bound: float


def solve(
    layout: Layout,
    num_microbatches: int,
    limits: Sequence[float],
    *,
    seconds: float = 60.0,
    longest: float | None = None,
) -> Proof:
    """The shortest plan of halves on `layout` that holds no more than `limits`, per rank.

    Args:
        seconds: after which the best so far will do.
        longest: a makespan that is known to be possible, which helps; in the units of the costs.

    Raises:
        ScheduleError: OR-tools is not installed; a time is 0 or no multiple of a simple part of 1;
            or a whole backward is quicker than its halves or holds less, which is not known here.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ScheduleError(
            "the exact search is that of OR-tools, which is not installed here: "
            "pip install 'pipemega[solver]'"
        ) from error
    problem = Problem.of(layout, num_microbatches, limits)
    if problem.whole_backward_helps:
        raise ScheduleError(
            "the exact search knows backwards in halves alone, and by these costs whole ones are "
            "quicker or hold less"
        )
    tick = _tick(layout)
    horizon = math.ceil((longest or 4 * sum(problem.least_work) * problem.time_unit) / tick)
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
    run = play(problem, orders)
    assert run is not None, "an exact plan stands still"
    return Proof(orders, max(run.clock) * problem.time_unit, bound)


def _tick(layout: Layout) -> float:
    """The unit of time that all times are multiples of."""
    costs = layout.costs
    steps = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    for parts in _PARTS:
        scaled = [time * parts for time in (*steps, costs.message)]
        if min(steps) > 0 and all(abs(time - round(time)) < 1e-6 for time in scaled):
            return 1 / parts
    raise ScheduleError(
        "the exact search counts in whole numbers: give every step a time above 0 that is a "
        f"multiple of 1 / {_PARTS[-1]}"
    )


def _starts(model: Any, problem: Problem, tick: float, horizon: int) -> dict[tuple[int, int], Any]:
    """The model: a variable for the start of step n of each code, with all that binds them."""
    num, count = problem.num_stages, problem.num_microbatches
    time = [round(each * problem.time_unit / tick) for each in problem.time]
    travel = [round(each * problem.time_unit / tick) for each in problem.travels]
    start = {
        (code, n): model.new_int_var(0, horizon, "")
        for code in range(3 * num)
        for n in range(count)
    }
    maker = {result: code for code, result in enumerate(problem.gives[: 2 * num])}
    end = model.new_int_var(0, horizon, "")
    for (code, n), variable in start.items():
        need = maker.get(problem.needs[code], code - num if code >= WEIGHT * num else None)
        if need is not None:
            model.add(variable >= start[need, n] + time[need] + travel[code])
        if n:
            model.add(variable >= start[code, n - 1] + time[code])
        model.add(end >= variable + time[code])
    for rank, stages in enumerate(problem.stages):
        steps = [(k * num + s, n) for k in range(3) for s in stages for n in range(count)]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[at], time[at[0]], "") for at in steps]
        )
        if math.isfinite(problem.limit[rank]):
            _bind_memory(model, problem, rank, start, time)
    model.minimize(end)
    return start


def _bind_memory(
    model: Any, problem: Problem, rank: int, start: dict[tuple[int, int], Any], time: list[int]
) -> None:
    """What F takes is held until I starts, what is kept from there until W ends."""
    num, intervals, sizes = problem.num_stages, [], []
    for stage in problem.stages[rank]:
        forward, first, second = (kind * num + stage for kind in (FORWARD, INPUT, WEIGHT))
        for n in range(problem.num_microbatches):
            for since, until, size in (
                (start[forward, n], start[first, n], problem.takes[forward]),
                (start[first, n], start[second, n] + time[second], -problem.takes[second]),
            ):
                length = model.new_int_var(0, 2**40, "")
                intervals.append(model.new_interval_var(since, length, until, ""))
                sizes.append(round(size * _GRAINS))
    model.add_cumulative(intervals, sizes, round(problem.limit[rank] * _GRAINS) + len(sizes))

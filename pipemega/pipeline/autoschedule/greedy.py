"""Constructs a plan in one pass over time: each free rank runs its most urgent step.

The priority of a step comes from `greedy.py`; this module decides which steps are possible.
Two rules prevent deadlocks and delays by the memory limit:

*No deadlock.* F of an early stage runs only if the oldest micro-batch that still needs a later
stage of this rank could run there with the memory that later micro-batches hold. So every
micro-batch that starts can finish, for any priorities.

*Reserved memory.* If F of an early stage is ready while a more urgent F of a later stage has not
arrived yet, the first could take the memory that the second needs, and a micro-batch near its end
would wait for one that has just started. So an F leaves memory for more urgent F of later stages of
its rank, up to a `horizon` after its own priority.

Priorities of steps, computed from a few parameters that a search varies.

The priority of a step is the time at which it would run if each micro-batch went through the
pipeline without waiting for other micro-batches, and micro-batches started at given intervals:

    priority of a step of micro-batch n  =  start time of n  +  offset of the step

Steps with lower values run first. The parameters stretch the offsets of forward and backward, put a
gap between them and delay W; micro-batches start evenly or in groups. With a large gap,
forwards run first and more memory is held; with a large delay, W fills idle time.

Times of orders: the same results as `plan.simulate`, many times faster.

If a search changes the order of one rank from some position on, `replay_change` recomputes only the
steps from that point in time: earlier steps do not depend on the change.
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from pipemega.pipeline.autoschedule.problem import (
    FORWARD,
    INPUT,
    ROUNDING,
    WEIGHT,
    WHOLE,
    Orders,
    Problem,
)

# A delay longer than any plan: such a step runs only if no other can.
_LAST = 1e4
NEVER = float("inf")

# priorities[code][n]: priority of the step of micro-batch n; codes of F, I and W.
Priorities = list[list[float]]


@dataclass(frozen=True)
class PriorityRule:
    """Parameters of the priorities and of the greedy construction.  Times in units of the problem.

    Args:
        forward, backward: factor on the times of forward and backward in the offsets.
        gap: time between the end of forward and the start of backward.
        weight_lag: delay of W.
        group: micro-batches that start as one group.
        spacing: interval between micro-batches of a group.
        pace: interval between groups, per micro-batch.
        horizon: how much later than its own priority an F reserves memory for others (`greedy.py`).
        patience: the fraction of a step by which it may delay a more urgent step whose input has
            not arrived yet.
        patience_of_weights: the same fraction for W.
        whole: whether backwards run whole; otherwise only if memory requires it.
    """

    forward: float = 1.0
    backward: float = 1.0
    gap: float = 0.0
    weight_lag: float = 1.0
    group: int = 1
    spacing: float = 1.0
    pace: float = 1.0
    horizon: float = 0.0
    patience: float = 0.0
    patience_of_weights: float = 0.0
    whole: bool = False

    @classmethod
    def sample(cls, problem: Problem, rng: random.Random) -> "PriorityRule":
        """Return a random rule."""
        pick = rng.choice
        return cls(
            forward=pick((0.5, 1, 1, 1.5, 2, 3)),
            backward=pick((0.5, 1, 1, 1.5, 2, 3)),
            gap=pick((0, 0, 1)),
            weight_lag=pick((0, 1, 1, problem.num_ranks / 2, problem.num_ranks, _LAST)),
            group=(group := pick((1, 1, 1, 2, 3, 4, problem.num_ranks))),
            spacing=pick((0.01, 0.2, 0.4, 0.7, 1)) if group > 1 else 1,
            pace=pick((1, 1, 1, 2)),
            horizon=pick((-_LAST, -1, 0, 0, 1)),
            patience=pick((0, 0, 0, 0.5)),
            patience_of_weights=pick((0, 0, 1)),
            whole=problem.whole_backward_helps and rng.random() < 0.5,
        )

    @classmethod
    def known_good(cls, problem: Problem) -> "list[PriorityRule]":
        """Return rules that gave the best plans for many sizes, costs and limits."""
        p = problem.num_ranks
        rules = [
            cls(weight_lag=1, patience=0.5),
            cls(1.4, 3, 0, _LAST, p, 0.35, 1.8, -0.1, 0.5, 1),
            cls(2.4, 2.4, 1.6, 0.5, 1, 1, 1, -0.2, 0.5, 0),
            cls(2.1, 1.5, 1.1, _LAST, p, 0.4, 1, -0.2, 0.5, 1),
            cls(1.1, 1.2, 1.3, 7, 3, 0.4, 0.8, 0.1, 0.5, 1),
            cls(0.5, 2, 0, _LAST, p, 0.4, 2, 0, 0.5, 1),
            cls(1.5, 1.3, -0.8, 0, 4, 0.5, 2, -2, 0.5, 1),
            cls(3, 1, 0, _LAST, 1, 1, 1, 1, 0.5, 0),
            cls(1, 1.5, 1, 0, 1, 1, 1, 0, 0, 1),
        ]
        if problem.whole_backward_helps:
            rules += [replace(rule, whole=True) for rule in rules]
        return rules

    def mutated(self, problem: Problem, rng: random.Random) -> "PriorityRule":
        """Return this rule with one or two parameters changed."""
        rule = self
        for _ in range(rng.choice((1, 1, 2))):
            rule = rule._with_one_changed(problem, rng)
        return rule

    def _with_one_changed(self, problem: Problem, rng: random.Random) -> "PriorityRule":
        name = rng.choice((*_SCALED, *_SHIFTED, "any"))
        if name == "any":
            other = PriorityRule.sample(problem, rng)
            name = rng.choice(tuple(vars(other)))
            return replace(self, **{name: getattr(other, name)})
        value = getattr(self, name)
        if name in _SCALED or (name == "weight_lag" and rng.random() < 0.5):
            return replace(self, **{name: value * rng.uniform(0.6, 1.6)})
        return replace(self, **{name: value + rng.uniform(-1, 1)})

    def priorities(self, problem: Problem) -> Priorities:
        """Return the priority of each F, I and W of each micro-batch."""
        num, time, latency = problem.num_stages, problem.time, problem.latency
        offset = [0.0] * (3 * num)
        at = 0.0
        for stage in range(num):
            at += self.forward * latency[stage]
            offset[stage] = at
            at += self.forward * time[stage]
        at += self.gap
        for stage in reversed(range(num)):
            at += self.backward * latency[num + stage]
            offset[num + stage] = at
            at += self.backward * time[num + stage]
            offset[2 * num + stage] = at + self.weight_lag
        starts = [
            n // self.group * self.group * self.pace + n % self.group * self.spacing
            for n in range(problem.num_microbatches)
        ]
        return [[delay + start for start in starts] for delay in offset]


_SCALED = ("forward", "backward", "spacing", "pace")
_SHIFTED = ("gap", "weight_lag", "horizon")


def construct(problem: Problem, rule: PriorityRule, until: float = NEVER) -> Orders | None:
    """Return the orders that result from always running the most urgent possible step.

    Returns None if the idle time of a rank shows that it cannot finish by `until`.
    """
    return _Construction(problem, rule.priorities(problem), rule).run(until)


class _Construction:
    """State of a construction.

    `count[c]` is the number of steps of code c that have run, with each B counted as I and W;
    `arrived[c][n]` is when the input of the n-th step of code c, an F or I, arrives.
    """

    def __init__(self, problem: Problem, priorities: Priorities, rule: PriorityRule) -> None:
        num, ranks = problem.num_stages, problem.num_ranks
        self.problem, self.priorities, self.rule = problem, priorities, rule
        self.arrived: list[list[float]] = [[] for _ in range(2 * num)]
        self.arrived[FORWARD] = [0.0] * problem.num_microbatches
        self.count = [0] * (3 * num)
        self.held = [0.0] * ranks
        self.limit = [limit + ROUNDING for limit in problem.limit]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.least_memory = [sum(problem.memory[s] for s in row) for row in problem.stages]

    def run(self, until: float) -> Orders | None:
        """Choose a step for each free rank, in the order of time, until all steps have run."""
        problem = self.problem
        slack = [until - work for work in problem.least_work]
        free = [0.0] * problem.num_ranks
        idle = [True] * problem.num_ranks
        events = [(0.0, rank) for rank in range(problem.num_ranks)]
        while events:
            now, rank = heappop(events)
            if now < free[rank]:
                continue
            code, until = self._choose(rank, now)
            if code < 0:
                # A later result adds an event for an idle rank; add the next arrival that is known.
                idle[rank] = True
                if until < NEVER:
                    heappush(events, (until, rank))
                continue
            if idle[rank]:
                idle[rank] = False
                slack[rank] -= now - free[rank]
                if slack[rank] < 0.0:
                    return None
            free[rank] = now + problem.time[code]
            heappush(events, (free[rank], rank))
            user = self._start(rank, code, free[rank])
            if user >= 0 and idle[neighbour := problem.rank_of_stage[user % problem.num_stages]]:
                heappush(events, (self.arrived[user][-1], neighbour))
        assert set(self.count) == {problem.num_microbatches}, "a construction deadlocks"
        return self.orders

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the most urgent step that `rank` can start now, or -1 and when to try again."""
        problem, priorities = self.problem, self.priorities
        count, arrived = self.count, self.arrived
        num, memory, soon = problem.num_stages, problem.memory, now + ROUNDING
        held, limit = self.held[rank], self.limit[rank]
        best, urgent = -1, NEVER
        next_arrival, next_priority = NEVER, NEVER
        blocked, blocked_code = NEVER, -1  # an I that exceeds the memory limit
        whole = self.rule.whole
        for stage in problem.stages[rank]:
            code = num + stage
            n = count[code]
            if n < len(arrived[code]):
                at, priority = arrived[code][n], priorities[code][n]
                if at > soon:
                    if at < next_arrival:
                        next_arrival, next_priority = at, priority
                elif held + memory[code] > limit and not (whole and count[code + num] == n):
                    if priority < blocked:
                        blocked, blocked_code = priority, code
                elif priority < urgent:
                    best, urgent = code, priority
            if count[code + num] < n:
                priority = priorities[code + num][count[code + num]]
                if priority < urgent:
                    best, urgent = code + num, priority
            n = count[stage]
            if n < len(arrived[stage]) and held + memory[stage] <= limit:
                at, priority = arrived[stage][n], priorities[stage][n]
                if at > soon:
                    if at < next_arrival:
                        next_arrival, next_priority = at, priority
                elif priority < urgent and self._leaves_memory(rank, stage, n):
                    best, urgent = stage, priority
        if blocked < urgent:
            best, urgent = self._release_memory(rank, blocked_code), blocked
        if best < 0:
            return -1, next_arrival
        kind = best // num
        if kind == INPUT and whole and count[best + num] == count[best]:
            best += 2 * num
        if next_priority < urgent:
            patience = self.rule.patience_of_weights if kind == WEIGHT else self.rule.patience
            length = problem.time[best]
            if now + length * (1 - patience) > next_arrival + ROUNDING:
                return -1, next_arrival
        return best, NEVER

    def _leaves_memory(self, rank: int, stage: int, n: int) -> bool:
        """Return whether F of micro-batch `n` leaves enough memory for later stages."""
        row = self.problem.stages[rank]
        if len(row) == 1:
            return True
        memory, count, limit = self.problem.memory, self.count, self.limit[rank]
        due = self.priorities[stage][n] + self.rule.horizon
        held = self.held[rank] + memory[stage]
        # Memory that F at the stages before `other` has allocated: in total, and per micro-batch.
        earlier = earlier_each = 0.0
        later = False
        for other in row:
            if later:
                lead = earlier - earlier_each * count[other]
                if lead + self.least_memory[rank] - earlier_each > limit:
                    return False
                priorities, waiting = self.priorities[other], count[other]
                while waiting < n and priorities[waiting] < due:
                    held += memory[other]
                    waiting += 1
                if held > limit:
                    return False
            earlier += memory[other] * (count[other] + (other == stage))
            earlier_each += memory[other]
            later = later or other == stage
        return True

    def _release_memory(self, rank: int, code: int) -> int:
        """Return the step to run instead of a blocked I: a W that releases memory, or a B."""
        num, count, priorities = self.problem.num_stages, self.count, self.priorities
        waiting = [
            (priorities[weight][count[weight]], weight)
            for stage in self.problem.stages[rank]
            if count[weight := WEIGHT * num + stage] < count[INPUT * num + stage]
        ]
        return min(waiting)[1] if waiting else code + 2 * num

    def _start(self, rank: int, code: int, ends: float) -> int:
        """Record that `code` runs until `ends`; return the code that uses its result, or -1."""
        problem, count = self.problem, self.count
        num, kind = problem.num_stages, code // problem.num_stages
        self.orders[rank].append(code)
        self.held[rank] += problem.memory[code]
        if kind == WHOLE:
            count[code - num] += 1
            count[code - 2 * num] += 1
        else:
            count[code] += 1
        if kind == WEIGHT:
            return -1
        if kind == FORWARD:
            user = code + 1 if code + 1 < num else code + num
        else:
            user = INPUT * num + code % num - 1
            if user < INPUT * num:
                return -1
        away = problem.rank_of_stage[user % num] != rank
        self.arrived[user].append(ends + (problem.latency[user] if away else 0.0))
        return user


@dataclass(slots=True)
class Run:
    """Orders with the times of their steps.

    Args:
        orders: the order of each rank.
        start: start[r][i] is the start time of step i of rank r.
        finish: the time at which each rank finishes.
        ends: ends[x][n] is when result x of micro-batch n is computed.
        places: places[x][n] is the position, in the order of its rank, of the step that gives
            result x of micro-batch n; places[2 * num_stages + s] has the positions of W and B of
            stage s.
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

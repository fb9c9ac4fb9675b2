"""Constructs a plan in one pass over time: each free rank runs its most urgent step.

The priority of a step comes from `priorities.py`; this module decides which steps are possible.
Two rules prevent deadlocks and delays by the memory limit:

*No deadlock.* F of an early stage runs only if the oldest micro-batch that still needs a later
stage of this rank could run there with the memory that later micro-batches hold. So every
micro-batch that starts can finish, for any priorities.

*Reserved memory.* If F of an early stage is ready while a more urgent F of a later stage has not
arrived yet, the first could take the memory that the second needs, and a micro-batch near its end
would wait for one that has just started. So an F leaves memory for more urgent F of later stages of
its rank, up to a `horizon` after its own priority.
"""

from heapq import heappop, heappush

from pipemega.pipeline.autoschedule.priorities import Priorities, PriorityRule
from pipemega.pipeline.autoschedule.problem import (
    FORWARD,
    INPUT,
    ROUNDING,
    WEIGHT,
    WHOLE,
    Orders,
    Problem,
)

_NEVER = float("inf")


def construct(problem: Problem, rule: PriorityRule, until: float = _NEVER) -> Orders | None:
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
                if until < _NEVER:
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
        best, urgent = -1, _NEVER
        next_arrival, next_priority = _NEVER, _NEVER
        blocked, blocked_code = _NEVER, -1  # an I that exceeds the memory limit
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
        return best, _NEVER

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

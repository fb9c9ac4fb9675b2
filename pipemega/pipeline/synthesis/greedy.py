"""A plan made in one pass from left to right: each rank, when it is free, does what is most urgent.

How urgent a step is says its *date* (`dates.py`); this is about what can be done at all. Two rules
keep memory from standing in the way:

*A way out.* F of an early stage is admitted only if the oldest micro-batch that lacks a later stage
of this rank could still get through there, with all that younger ones hold beside it. Nothing is
let in that cannot get out again, so no order of dates ends in a deadlock.

*Memory goes by date, too.* Where F of an early stage is ready and F of a later one, although more
urgent, is still on its way, the first would often take the memory that the second comes for, and a
micro-batch that is nearly done would wait for one that has just set out. So an F leaves room for
the more urgent F of the later stages of its rank, up to a `horizon` beyond its own date.
"""

from heapq import heappop, heappush

from pipemega.pipeline.synthesis.dates import Dates, Policy
from pipemega.pipeline.synthesis.problem import (
    FORWARD,
    INPUT,
    ROUNDING,
    WEIGHT,
    WHOLE,
    Orders,
    Problem,
)

_NEVER = float("inf")


def construct(problem: Problem, policy: Policy, until: float = _NEVER) -> Orders | None:
    """The orders that come of always doing the most urgent step that can be done.

    None if some rank waits so long that it cannot be done by `until`.
    """
    return _Construction(problem, policy.dates(problem), policy).run(until)


class _Construction:
    """Where a construction stands.

    `run` counts the steps of each code that have run, with each B counted as I and as W;
    `arrived[c]` is when the input of the n-th step of code c, an F or I, is there.
    """

    def __init__(self, problem: Problem, dates: Dates, policy: Policy) -> None:
        num, ranks = problem.num_stages, problem.num_ranks
        self.problem, self.dates, self.policy = problem, dates, policy
        self.arrived: list[list[float]] = [[] for _ in range(2 * num)]
        self.arrived[FORWARD] = [0.0] * problem.num_microbatches
        self.count = [0] * (3 * num)
        self.held = [0.0] * ranks
        self.limit = [limit + ROUNDING for limit in problem.limit]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.least = [sum(problem.takes[s] for s in row) for row in problem.stages]

    def run(self, until: float) -> Orders | None:
        """Lets the ranks decide, in the order of time, until all is done."""
        problem = self.problem
        spare = [until - work for work in problem.least_work]
        free = [0.0] * problem.num_ranks
        idle = [True] * problem.num_ranks
        calls = [(0.0, rank) for rank in range(problem.num_ranks)]
        while calls:
            now, rank = heappop(calls)
            if now < free[rank]:
                continue
            code, until = self._choose(rank, now)
            if code < 0:
                # Whatever arrives calls an idle rank; what is known to arrive does so now.
                idle[rank] = True
                if until < _NEVER:
                    heappush(calls, (until, rank))
                continue
            if idle[rank]:
                idle[rank] = False
                spare[rank] -= now - free[rank]
                if spare[rank] < 0.0:
                    return None
            free[rank] = now + problem.time[code]
            heappush(calls, (free[rank], rank))
            there = self._start(rank, code, free[rank])
            if there >= 0 and idle[neighbour := problem.home[there % problem.num_stages]]:
                heappush(calls, (self.arrived[there][-1], neighbour))
        assert set(self.count) == {problem.num_microbatches}, "a construction stands still"
        return self.orders

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """The most urgent step that `rank` can start now, or -1 and until when it may wait."""
        problem, count, arrived, dates = self.problem, self.count, self.arrived, self.dates
        num, takes, soon = problem.num_stages, problem.takes, now + ROUNDING
        held, limit = self.held[rank], self.limit[rank]
        best, urgent = -1, _NEVER
        coming, urgent_coming = _NEVER, _NEVER
        crowded, crowded_code = _NEVER, -1  # an I for which there is no room
        whole = self.policy.whole
        for stage in problem.stages[rank]:
            code = num + stage
            n = count[code]
            if n < len(arrived[code]):
                at, date = arrived[code][n], dates[code][n]
                if at > soon:
                    if at < coming:
                        coming, urgent_coming = at, date
                elif held + takes[code] > limit and not (whole and count[code + num] == n):
                    if date < crowded:
                        crowded, crowded_code = date, code
                elif date < urgent:
                    best, urgent = code, date
            if count[code + num] < n:
                date = dates[code + num][count[code + num]]
                if date < urgent:
                    best, urgent = code + num, date
            n = count[stage]
            if n < len(arrived[stage]) and held + takes[stage] <= limit:
                at, date = arrived[stage][n], dates[stage][n]
                if at > soon:
                    if at < coming:
                        coming, urgent_coming = at, date
                elif date < urgent and self._leaves_room(rank, stage, n):
                    best, urgent = stage, date
        if crowded < urgent:
            best, urgent = self._without_room(rank, crowded_code), crowded
        if best < 0:
            return -1, coming
        kind = best // num
        if kind == INPUT and whole and count[best + num] == count[best]:
            best += 2 * num
        if urgent_coming < urgent:
            patience = self.policy.patience_of_weights if kind == WEIGHT else self.policy.patience
            length = problem.time[best]
            if now + length * (1 - patience) > coming + ROUNDING:
                return -1, coming
        return best, _NEVER

    def _leaves_room(self, rank: int, stage: int, n: int) -> bool:
        """Whether F of micro-batch `n` may have memory now, for all that later stages need."""
        row = self.problem.stages[rank]
        if len(row) == 1:
            return True
        takes, count, limit = self.problem.takes, self.count, self.limit[rank]
        due = self.dates[stage][n] + self.policy.horizon
        held = self.held[rank] + takes[stage]
        # What younger micro-batches hold when the first that lacks a later stage comes there, and
        # what it needs by then.
        earlier = earlier_each = 0.0
        later = False
        for other in row:
            if later:
                lead = earlier - earlier_each * count[other]
                if lead + self.least[rank] - earlier_each > limit:
                    return False
                dates, waiting = self.dates[other], count[other]
                while waiting < n and dates[waiting] < due:
                    held += takes[other]
                    waiting += 1
                if held > limit:
                    return False
            earlier += takes[other] * (count[other] + (other == stage))
            earlier_each += takes[other]
            later = later or other == stage
        return True

    def _without_room(self, rank: int, code: int) -> int:
        """What to do for an I that memory has no room for: a W that gives some back, or a B."""
        num, count, dates = self.problem.num_stages, self.count, self.dates
        waiting = [
            (dates[weight][count[weight]], weight)
            for stage in self.problem.stages[rank]
            if count[weight := WEIGHT * num + stage] < count[INPUT * num + stage]
        ]
        return min(waiting)[1] if waiting else code + 2 * num

    def _start(self, rank: int, code: int, ends: float) -> int:
        """Notes that `code` runs until `ends`; the code that its result goes to, -1 for none."""
        problem, count = self.problem, self.count
        num, kind = problem.num_stages, code // problem.num_stages
        self.orders[rank].append(code)
        self.held[rank] += problem.takes[code]
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
        away = problem.home[user % num] != rank
        self.arrived[user].append(ends + (problem.travels[user] if away else 0.0))
        return user

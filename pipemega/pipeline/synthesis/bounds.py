"""Times that no plan can beat, so that a search knows when it is done.

On each rank:

- Work is work, with the quicker kind of backward.
- It stands still until the first micro-batch comes to it; and until the gradient of that one comes
  back it can do forwards alone, of which memory admits only so many.
- Once its last I has run it can do W alone, again only as many as memory could hold, while the
  gradient travels on to the first stage.
- Each micro-batch takes memory for at least as long as its way to the end of the model and back,
  and no more of that product of memory and time can be used than there is.

Source: the first three generalise (p - 1)(F / v + c), see docs/schedules.md; the last is the
argument of Qi et al. 2024, arXiv:2405.15362, that memory is proportional to lifespan.
"""

import math
from itertools import accumulate

from pipemega.pipeline.synthesis.problem import FORWARD, INPUT, ROUNDING, WEIGHT, WHOLE, Problem


def least_makespan(problem: Problem) -> float:
    """A time that no plan can stay below, from its first step to its last."""
    ways = _Ways(problem)
    return max(
        ways.once_through,
        *(
            bound
            for rank in range(problem.num_ranks)
            for bound in (
                ways.comes(rank) + ways.waits(rank) + problem.least_work[rank] + ways.drains(rank),
                ways.comes(rank) + _least_time_in_memory(problem, ways, rank),
            )
        ),
    )


def least_span(problem: Problem) -> float:
    """A time that no plan can stay below, from the first step of some rank to its last."""
    ways = _Ways(problem)
    return max(
        max(ways.waits(rank) + problem.least_work[rank], _least_time_in_memory(problem, ways, rank))
        for rank in range(problem.num_ranks)
    )


class _Ways:
    """When a micro-batch that is alone would be where.

    `out[s]` is when its F starts at stage s, `back[s]` when its gradient is there for I.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, num, time = problem, problem.num_stages, problem.time
        hops = [time[s] + problem.travels[s + 1] for s in range(num - 1)]
        self.out = list(accumulate(hops, initial=0.0))
        # A whole backward hands on its gradient at its end, an I no later than that.
        self.quick = [min(time[INPUT * num + s], time[WHOLE * num + s]) for s in range(num)]
        self.both = [
            min(time[INPUT * num + s] + time[WEIGHT * num + s], time[WHOLE * num + s])
            for s in range(num)
        ]
        at = self.out[-1] + time[num - 1]
        self.back = [0.0] * num
        for stage in reversed(range(num)):
            at += problem.travels[INPUT * num + stage]
            self.back[stage] = at
            at += self.quick[stage]
        self.once_through = self.back[0] + self.both[0]

    def comes(self, rank: int) -> float:
        """When the first micro-batch comes to `rank`."""
        return self.out[self.problem.stages[rank][0]]

    def waits(self, rank: int) -> float:
        """How long `rank` must at least wait between its first step and its first backward."""
        turn = self.back[self.problem.stages[rank][-1]] - self.comes(rank)
        return max(0.0, turn - _most_work(self.problem, rank, FORWARD))

    def drains(self, rank: int) -> float:
        """How long `rank` must at least wait for the end of the plan after its last I."""
        stage = self.problem.stages[rank][0]
        if stage == 0:
            return 0.0
        tail = self.once_through - self.back[stage] - self.quick[stage]
        return max(0.0, tail - _most_work(self.problem, rank, WEIGHT))


def _most_work(problem: Problem, rank: int, kind: int) -> float:
    """The most time that `rank` can spend on F, or on W, alone, before or after anything else."""
    num, room, done = problem.num_stages, problem.limit[rank] + ROUNDING, 0.0
    steps = [
        (abs(problem.takes[code]), problem.time[code])
        for code in (kind * num + stage for stage in problem.stages[rank])
    ]
    # What gives most time for its memory first. Where all take the same, only whole ones count.
    alike = len({size for size, _ in steps}) == 1
    for size, time in sorted(steps, key=lambda step: -step[1] / max(step[0], ROUNDING)):
        count = min(problem.num_microbatches, room / size if size else math.inf)
        if alike:
            count = math.floor(count)
        done += count * time
        room -= count * size
    return done


def _least_time_in_memory(problem: Problem, ways: _Ways, rank: int) -> float:
    """How long the memory of `rank` is needed for what all micro-batches hold."""
    num, time, takes, area = problem.num_stages, problem.time, problem.takes, 0.0
    for stage in problem.stages[rank]:
        size, kept = takes[stage], -takes[WEIGHT * num + stage]
        away = ways.back[stage] - ways.out[stage]
        halves = time[INPUT * num + stage] + time[WEIGHT * num + stage]
        area += size * away + min(kept * halves, size * time[WHOLE * num + stage])
    return problem.num_microbatches * area / max(problem.limit[rank], ROUNDING)

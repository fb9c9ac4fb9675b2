"""Lower bounds for the time of any plan, so that a search can stop early.

For each rank:

- The compute time, with the faster kind of backward.
- The rank is idle until its first micro-batch arrives. Until the gradient of that micro-batch
  returns, it can only run forwards, and memory limits their number.
- After its last I it can only run W, again limited by memory, while the gradient travels on to the
  first stage.
- Each micro-batch holds memory for at least the time to the end of the model and back. The sum of
  memory times time is limited by the memory limit times the makespan.

Source: the first three generalise (p - 1)(F / v + c), see docs/schedules.md; the last is the
argument of Qi et al. 2024, arXiv:2405.15362, that memory is proportional to lifespan.
"""

import math
from itertools import accumulate

from pipemega.pipeline.autoschedule.problem import FORWARD, INPUT, ROUNDING, WEIGHT, WHOLE, Problem


def least_makespan(problem: Problem) -> float:
    """Return a lower bound for the time from the first step of any plan to its last."""
    single = _SingleMicrobatch(problem)
    return max(
        single.total,
        *(
            bound
            for rank in range(problem.num_ranks)
            for bound in (
                single.arrival(rank)
                + single.warm_up_idle(rank)
                + problem.least_work[rank]
                + single.cool_down_idle(rank),
                single.arrival(rank) + _memory_time(problem, single, rank),
            )
        ),
    )


def least_span(problem: Problem) -> float:
    """Return a lower bound for the longest time of a rank from its first step to its last."""
    single = _SingleMicrobatch(problem)
    return max(
        max(
            single.warm_up_idle(rank) + problem.least_work[rank],
            _memory_time(problem, single, rank),
        )
        for rank in range(problem.num_ranks)
    )


class _SingleMicrobatch:
    """Times of a single micro-batch in an empty pipeline.

    `out[s]` is when its F starts at stage s, `back[s]` when its gradient arrives for I.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, num, time = problem, problem.num_stages, problem.time
        hops = [time[s] + problem.latency[s + 1] for s in range(num - 1)]
        self.out = list(accumulate(hops, initial=0.0))
        # B sends its gradient at its end; I may send it earlier.
        self.fastest_gradient = list(map(min, problem.times_of(INPUT), problem.times_of(WHOLE)))
        at = self.out[-1] + time[num - 1]
        self.back = [0.0] * num
        for stage in reversed(range(num)):
            at += problem.latency[INPUT * num + stage]
            self.back[stage] = at
            at += self.fastest_gradient[stage]
        self.total = self.back[0] + problem.fastest_backward[0]

    def arrival(self, rank: int) -> float:
        """Return when the first micro-batch arrives at `rank`."""
        return self.out[self.problem.stages[rank][0]]

    def warm_up_idle(self, rank: int) -> float:
        """Return the least idle time of `rank` between its first step and its first backward."""
        turn = self.back[self.problem.stages[rank][-1]] - self.arrival(rank)
        return max(0.0, turn - _most_work(self.problem, rank, FORWARD))

    def cool_down_idle(self, rank: int) -> float:
        """Return the least idle time of `rank` between its last I and the end of the plan."""
        stage = self.problem.stages[rank][0]
        if stage == 0:
            return 0.0
        tail = self.total - self.back[stage] - self.fastest_gradient[stage]
        return max(0.0, tail - _most_work(self.problem, rank, WEIGHT))


def _most_work(problem: Problem, rank: int, kind: int) -> float:
    """Return the longest time that `rank` can run only F, or only W, within its memory limit."""
    num, free, done = problem.num_stages, problem.limit[rank] + ROUNDING, 0.0
    steps = [
        (abs(problem.memory[code]), problem.time[code])
        for code in (kind * num + stage for stage in problem.stages[rank])
    ]
    # Longest time per memory first. If all have the same size, only whole steps count.
    same_size = len({size for size, _ in steps}) == 1
    for size, time in sorted(steps, key=lambda step: -step[1] / max(step[0], ROUNDING)):
        count = min(problem.num_microbatches, free / size if size else math.inf)
        if same_size:
            count = math.floor(count)
        done += count * time
        free -= count * size
    return done


def _memory_time(problem: Problem, single: _SingleMicrobatch, rank: int) -> float:
    """Return the time for which all micro-batches together occupy the memory of `rank`."""
    num, time, memory, area = problem.num_stages, problem.time, problem.memory, 0.0
    for stage in problem.stages[rank]:
        size, kept = memory[stage], -memory[WEIGHT * num + stage]
        away = single.back[stage] - single.out[stage]
        halves = time[INPUT * num + stage] + time[WEIGHT * num + stage]
        area += size * away + min(kept * halves, size * time[WHOLE * num + stage])
    return problem.num_microbatches * area / max(problem.limit[rank], ROUNDING)

"""A scheduling problem as flat tuples of numbers, on which the searches work.

A plan is stored as *orders*: for each rank a list of codes, `kind * num_stages + stage`, with the
kinds F, I, W, B numbered from 0. A code has no micro-batch: the steps of one kind at one stage run
in the order of the micro-batches, as in every schedule of this project, so the n-th occurrence of a
code is the step of micro-batch n. A B counts as an I and as a W.

    stage 0 of 2:   [0, 0, 2, 4, 2, 4]   is   F0 F1 I0 W0 I1 W1

An order remains a valid plan after any permutation in which no I comes before its F, no W before
its I, and no B while an earlier W has not run (gradients are summed in the order of the
micro-batches).

Placements of the stages on the ranks, with the costs of each stage.

Lower bounds for the time of any plan, so that a search can stop early.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.simulate import CostModel
from pipemega.pipeline.schedules import RankCosts
from pipemega.pipeline.schedules.building_blocks import loop_and_v


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage, and the costs of the stages.

    Args:
        rank_of_stage: stage s is on rank rank_of_stage[s]; every rank holds at least one stage.
        costs: time and memory of each stage, and time of a message.
        memory_limit: limit of each rank on this placement, in units of the costs; None: only the
            limit of the search.

    Raises:
        ScheduleError: the costs have another number of stages, or a rank has no stage.
    """

    rank_of_stage: tuple[int, ...]
    costs: CostModel
    memory_limit: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.costs.num_stages != len(self.rank_of_stage):
            raise ScheduleError(
                f"the placement has {len(self.rank_of_stage)} stages and the costs have "
                f"{self.costs.num_stages}: give the same number"
            )
        ranks = set(self.rank_of_stage)
        if ranks != set(range(len(ranks))) or not ranks:
            raise ScheduleError(
                f"rank_of_stage is {list(self.rank_of_stage)}: number the ranks from 0 without gaps"
            )

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def chunks(self) -> int:
        """The highest number of stages on a rank."""
        return max(map(self.rank_of_stage.count, range(self.num_ranks)))

    @property
    def least_memory(self) -> tuple[float, ...]:
        """The memory that each rank needs under any plan: one micro-batch at all of its stages.

        Less is not enough, because the last of these forwards runs before the first backward. It is
        always enough: run one micro-batch after the other with whole backwards.
        """
        held = [0.0] * self.num_ranks
        for rank, size in zip(self.rank_of_stage, self.costs.held_after_forward, strict=True):
            held[rank] += size
        return tuple(held)

    def limits_within(self, limits: Sequence[float]) -> tuple[float, ...]:
        """Return the limit of each rank: the lower one of `limits` and of `memory_limit`."""
        return tuple(map(min, limits, self.memory_limit or limits))


# Chunk counts that are tried in any case, and the highest one.
_USUAL_CHUNKS, _MAX_CHUNKS = (1, 2, 4), 8


def chunk_counts(pp_size: int, *layer_counts: int) -> tuple[int, ...]:
    """Return the numbers of stages per rank to try: 1, 2, 4 and numbers that divide the layers.

    Args:
        layer_counts: the number of layers, then other numbers to divide, such as the number of
            blocks.
    """
    if pp_size == 1:
        return (1,)
    divisible = (
        count
        for layers in layer_counts
        for count in range(1, _MAX_CHUNKS + 1)
        if layers and layers % (pp_size * count) == 0
    )
    counts = sorted({*_USUAL_CHUNKS, *divisible})
    return tuple(count for count in counts if count == 1 or pp_size * count <= layer_counts[0])


def limit_of_1f1b(placements: Sequence[Placement], num_microbatches: int) -> float:
    """Return what 1F1B holds on its fullest rank, or what any plan needs if that is more.

    1F1B has one stage per rank: consecutive stages of a placement together.
    """
    held = [_held_by_1f1b(placement, num_microbatches) for placement in placements]
    return max(*held, min(max(placement.least_memory) for placement in placements))


def _held_by_1f1b(placement: Placement, num_microbatches: int) -> float:
    ranks, held = placement.num_ranks, placement.costs.held_after_forward
    chunks = len(held) // ranks
    return max(
        min(num_microbatches, ranks - rank) * sum(held[rank * chunks : (rank + 1) * chunks])
        for rank in range(ranks)
    )


def placements_of_rank_costs(
    pp_size: int, costs: RankCosts, chunks: Iterable[int] = _USUAL_CHUNKS
) -> list[Placement]:
    """Return placements for costs per rank: a model that can be cut into any number of stages.

    The costs of a rank are divided among its `chunks` stages. Placements are a loop for each number
    of chunks, and a v for two or more. A pipeline of one rank gets one chunk, since more would not
    help.

    Raises:
        ScheduleError: fewer than one rank or chunk, or an invalid cost.
    """
    counts = sorted(set(chunks)) if pp_size > 1 else [1]
    for what, size in (("pipeline ranks", pp_size), *(("chunks", count) for count in counts)):
        if size < 1:
            raise ScheduleError(f"placements for {size} {what}: give at least 1")
    places = [place for count in counts for place in loop_and_v(pp_size, count)]
    return [Placement(place, CostModel.from_rank_costs(place, *costs)) for place in places]


def placements_of_stage_costs(pp_size: int, costs: CostModel) -> list[Placement]:
    """Return placements for costs per stage: a loop, and a v if ranks hold several stages.

    Raises:
        ScheduleError: the number of stages is not a multiple of the number of ranks.
    """
    chunks, rest = divmod(costs.num_stages, max(1, pp_size))
    if pp_size < 1 or chunks < 1 or rest:
        raise ScheduleError(
            f"{costs.num_stages} stages cannot be divided evenly among {pp_size} pipeline ranks: "
            f"give a multiple of the number of ranks"
        )
    return [Placement(place, costs) for place in loop_and_v(pp_size, chunks)]


Orders = list[list[int]]

FORWARD, INPUT, WEIGHT, WHOLE = range(4)
_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}

# Tolerance for sums of costs in different orders; times and memories here are near 1.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """One placement, its micro-batches and memory limits, scaled so that all numbers are near 1.

    A *result* is what other steps wait for: F of stage s gives result s, I and B of stage s give
    result num_stages + s, W gives none.

    Args:
        placement: stages, their ranks and costs.
        rank_of_stage: the rank of each stage.
        limit: the memory limit of each rank.
        time_unit: the time that is 1 here: the work of the busiest rank for one micro-batch.
        memory_unit: the memory that is 1 here: the most that a rank must hold under any plan.
        time: the time of each code.
        memory: change of the held memory by each code; negative if it is released.
        needs: the result that each code waits for, -1 for none. W has none, because its I runs
            earlier on the same rank.
        latency: time until that result arrives.
        result_of: the result of each code, -1 for W.
        stages: the stages of each rank, in the order of the model.
    """

    placement: Placement
    num_stages: int
    num_ranks: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    limit: tuple[float, ...]
    time_unit: float
    memory_unit: float
    time: tuple[float, ...]
    memory: tuple[float, ...]
    needs: tuple[int, ...]
    latency: tuple[float, ...]
    result_of: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, limit: Sequence[float]) -> "Problem":
        """Return the problem for `placement` with a limit per rank in units of its costs."""
        costs, rank_of_stage = placement.costs, placement.rank_of_stage
        num = costs.num_stages
        stages = tuple(
            tuple(s for s in range(num) if rank_of_stage[s] == rank)
            for rank in range(placement.num_ranks)
        )
        halves = (*costs.backward_input, *costs.backward_weight)
        times = (*costs.forward, *halves, *costs.whole_backward)
        work = [sum(times[kind * num + s] for kind in range(3) for s in row) for row in stages]
        time_unit = max(work) or costs.message or 1.0
        memory_unit = max(placement.least_memory) or 1.0
        held, kept = costs.held_after_forward, costs.held_after_input
        memory = (
            *held,
            *(after - before for after, before in zip(kept, held, strict=True)),
            *(-size for size in kept),
            *(-size for size in held),
        )
        up = range(-1, num - 1)  # F waits for F of the previous stage
        down = (*range(num + 1, 2 * num), num - 1)  # I for I of the next stage, or the last F
        needs = (*up, *down, *(-1 for _ in rank_of_stage), *down)
        crosses = [
            need >= 0 and rank_of_stage[need % num] != rank_of_stage[code % num]
            for code, need in enumerate(needs)
        ]
        return cls(
            placement,
            num,
            placement.num_ranks,
            num_microbatches,
            rank_of_stage,
            tuple(size / memory_unit for size in limit),
            time_unit,
            memory_unit,
            tuple(time / time_unit for time in times),
            tuple(size / memory_unit for size in memory),
            needs,
            tuple(costs.message / time_unit if away else 0.0 for away in crosses),
            (*range(2 * num), *(-1 for _ in rank_of_stage), *range(num, 2 * num)),
            stages,
        )

    def times_of(self, kind: int) -> tuple[float, ...]:
        """Return the time of one step of `kind` at each stage."""
        return self.time[kind * self.num_stages : (kind + 1) * self.num_stages]

    @cached_property
    def fastest_backward(self) -> tuple[float, ...]:
        """The time of I and W or of B at each stage, whichever is shorter."""
        halves = map(add, self.times_of(INPUT), self.times_of(WEIGHT))
        return tuple(map(min, halves, self.times_of(WHOLE)))

    @cached_property
    def least_work(self) -> tuple[float, ...]:
        """The compute time of each rank, with the faster kind of backward."""
        each = tuple(map(add, self.times_of(FORWARD), self.fastest_backward))
        return tuple(self.num_microbatches * sum(each[s] for s in row) for row in self.stages)

    @property
    def size(self) -> int:
        """The number of steps of a plan with split backward."""
        return 3 * self.num_stages * self.num_microbatches

    @property
    def whole_backward_helps(self) -> bool:
        """Whether a B can be better than I followed by W: faster, or with less memory than between
        I and W."""
        num = self.num_stages
        return any(
            self.time[WHOLE * num + s]
            < self.time[INPUT * num + s] + self.time[WEIGHT * num + s] - ROUNDING
            or self.memory[INPUT * num + s] > ROUNDING
            for s in range(num)
        )

    def fits(self, orders: Orders) -> bool:
        """Return whether no rank exceeds its memory limit."""
        memory = self.memory
        return all(
            max(accumulate(memory[code] for code in order)) <= limit + ROUNDING
            for order, limit in zip(orders, self.limit, strict=True)
        )

    def orders_of(self, plan: Plan) -> Orders:
        """Return the codes of `plan`, whose steps of a kind run in the order of micro-batches."""
        num = self.num_stages
        return [
            [_NUMBER[step.kind] * num + step.stage for step in program]
            for program in plan.compute_only().programs
        ]

    def plan_of(self, name: str, orders: Orders) -> Plan:
        """Return the plan with these orders."""
        programs = tuple(map(self._program, orders))
        return Plan(name, self.num_microbatches, self.rank_of_stage, programs)

    def _program(self, order: Sequence[int]) -> Program:
        num = self.num_stages
        seen = [0] * (3 * num)
        program = []
        for code in order:
            kind, stage = divmod(code, num)
            counted = INPUT * num + stage if kind == WHOLE else code
            program.append(Instruction(_KINDS[kind], stage, seen[counted]))
            seen[counted] += 1
            if kind == WHOLE:
                seen[WEIGHT * num + stage] += 1
        return tuple(program)


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

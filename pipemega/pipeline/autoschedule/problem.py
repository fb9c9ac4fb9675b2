"""A scheduling problem as flat tuples of numbers, on which the searches work.

A plan is stored as *orders*: for each rank a list of codes, `kind * num_stages + stage`, with the
kinds F, I, W, B numbered from 0. A code has no micro-batch: the steps of one kind at one stage run
in the order of the micro-batches, as in every schedule of this project, so the n-th occurrence of a
code is the step of micro-batch n. A B counts as an I and as a W.

    stage 0 of 2:   [0, 0, 2, 4, 2, 4]   is   F0 F1 I0 W0 I1 W1

An order remains a valid plan after any permutation in which no I comes before its F, no W before
its I, and no B while an earlier W has not run (gradients are summed in the order of the
micro-batches).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add

from pipemega.pipeline.autoschedule.placements import Placement
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program

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
        time: of each code.
        memory: change of the held memory by each code; negative if it is released.
        needs: the result that each code waits for, -1 for none. W has none, because its I runs
            earlier on the same rank.
        latency: time until that result arrives.
        result_of: the result of each code, -1 for W.
        stages: those of each rank, in the order of the model.
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

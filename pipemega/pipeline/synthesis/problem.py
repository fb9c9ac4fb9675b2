"""A scheduling problem in flat tuples of numbers: what the searches work on.

A plan is written as *orders*: for each rank a list of codes, `kind * num_stages + stage`, with the
kinds F, I, W, B counted from 0. A code names no micro-batch: the steps of one kind at one stage run
in the order of micro-batches, under every schedule of this package, so its n-th occurrence is the
step of micro-batch n; a B is the n-th I and the n-th W at once.

    stage 0 of 2:   [0, 0, 2, 4, 2, 4]   is   F0 F1 I0 W0 I1 W1

So orders can be shuffled without any book-keeping, and remain a plan as long as no I comes before
its F, no W before its I, and no B while an older W waits (gradients add up in the order of
micro-batches).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.synthesis.layouts import Layout

Orders = list[list[int]]

FORWARD, INPUT, WEIGHT, WHOLE = range(4)
_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}

# Sums of costs in another order differ in their last bits; times and memories here are near 1.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """One layout, its micro-batches and its memory, scaled so that all numbers are near 1.

    A *result* is what other steps wait for: F of stage s gives result s, I and B of stage s give
    result num_stages + s, a W gives none.

    Args:
        layout: stages, their ranks and costs.
        num_stages, num_ranks, num_microbatches: how many there are.
        home: the rank of each stage.
        limit: the most that each rank may hold.
        time_unit: the time that is 1 here: the work of the busiest rank for one micro-batch.
        memory_unit: the memory that is 1 here: the most that a rank must hold under any plan.
        time: of each code.
        takes: memory that each code takes, or gives back if negative.
        needs: the result that each code waits for, -1 for none. A W waits for its I, which is on
            its own rank and comes before it, so that no clock need ask.
        travels: how long that result takes to come.
        gives: the result of each code, -1 for a W.
        stages: those of each rank, in the order of the model.
    """

    layout: Layout
    num_stages: int
    num_ranks: int
    num_microbatches: int
    home: tuple[int, ...]
    limit: tuple[float, ...]
    time_unit: float
    memory_unit: float
    time: tuple[float, ...]
    takes: tuple[float, ...]
    needs: tuple[int, ...]
    travels: tuple[float, ...]
    gives: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, num_microbatches: int, limit: Sequence[float]) -> "Problem":
        """The problem of `layout` with the given limit per rank, in units of its costs."""
        costs, home, num = layout.costs, layout.rank_of_stage, layout.costs.num_stages
        stages = tuple(
            tuple(s for s in range(num) if home[s] == rank) for rank in range(layout.num_ranks)
        )
        times = (
            *costs.forward,
            *costs.backward_input,
            *costs.backward_weight,
            *costs.whole_backward,
        )
        work = [sum(times[kind * num + s] for kind in range(3) for s in row) for row in stages]
        time_unit = max(work) or costs.message or 1.0
        memory_unit = max(layout.least_memory) or 1.0
        held, kept = costs.held_after_forward, costs.held_after_input
        takes = (
            *held,
            *(after - before for after, before in zip(kept, held, strict=True)),
            *(-size for size in kept),
            *(-size for size in held),
        )
        up = range(-1, num - 1)  # F needs that of the stage before
        down = (*range(num + 1, 2 * num), num - 1)  # I that of the stage after, or the last F
        needs = (*up, *down, *(-1 for _ in home), *down)
        crosses = [
            need >= 0 and home[need % num] != home[code % num] for code, need in enumerate(needs)
        ]
        return cls(
            layout,
            num,
            layout.num_ranks,
            num_microbatches,
            home,
            tuple(size / memory_unit for size in limit),
            time_unit,
            memory_unit,
            tuple(time / time_unit for time in times),
            tuple(size / memory_unit for size in takes),
            needs,
            tuple(costs.message / time_unit if away else 0.0 for away in crosses),
            (*range(2 * num), *(-1 for _ in home), *range(num, 2 * num)),
            stages,
        )

    @cached_property
    def least_work(self) -> tuple[float, ...]:
        """How long each rank must work, with the quicker kind of backward."""
        num, time = self.num_stages, self.time
        return tuple(
            self.num_microbatches
            * sum(
                time[s] + min(time[INPUT * num + s] + time[WEIGHT * num + s], time[WHOLE * num + s])
                for s in row
            )
            for row in self.stages
        )

    @property
    def size(self) -> int:
        """Steps of a plan."""
        return 3 * self.num_stages * self.num_microbatches

    @property
    def whole_backward_helps(self) -> bool:
        """Whether a B can be better than an I with its W right behind it: where it is quicker, or
        more is kept between I and W than was held before."""
        num = self.num_stages
        return any(
            self.time[WHOLE * num + s]
            < self.time[INPUT * num + s] + self.time[WEIGHT * num + s] - ROUNDING
            or self.takes[INPUT * num + s] > ROUNDING
            for s in range(num)
        )

    def fits(self, orders: Orders) -> bool:
        """Whether no rank holds more than its limit."""
        takes = self.takes
        return all(
            max(accumulate(takes[code] for code in order)) <= limit + ROUNDING
            for order, limit in zip(orders, self.limit, strict=True)
        )

    def orders_of(self, plan: Plan) -> Orders:
        """The codes of `plan`, whose steps of a kind run in the order of micro-batches."""
        num = self.num_stages
        return [
            [_NUMBER[step.kind] * num + step.stage for step in program]
            for program in plan.compute_only().programs
        ]

    def plan_of(self, name: str, orders: Orders) -> Plan:
        """The plan whose codes are `orders`."""
        programs = tuple(map(self._program, orders))
        return Plan(name, self.num_microbatches, self.home, programs)

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

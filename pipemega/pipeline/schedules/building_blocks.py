"""Building blocks of V placements: repeated every six slots, then moved together.

A micro-batch passes through the two chunks of a v in four legs: forward down the ranks (leg 0),
forward up (1), backward down (2), backward up (3). Time is counted in slots of one unit. A
*building block* gives the slot in which each rank runs each leg of one micro-batch; the block of
the next micro-batch starts `INTERVAL` slots later. The time that a block takes from forward to
backward determines the memory of the schedule.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362.

Description of a schedule: its function, its sizes, and formulas for time and memory.

Sequences of steps that several schedules are built from.

Shorthand for the program of a rank with two chunks in a v placement.

Placements: which pipeline rank holds which stage.

Four ranks, two chunks each:

    loop   rank 0   0 4        v   rank 0   0 7
           rank 1   1 5            rank 1   1 6
           rank 2   2 6            rank 2   2 5
           rank 3   3 7            rank 3   3 4

With one chunk per rank both are the same.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any, Final, Literal, NamedTuple

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program

INTERVAL: Final = 6
FORWARD_DOWN, FORWARD_UP, BACKWARD_DOWN, BACKWARD_UP, WEIGHT = range(5)

Slots = list[list[int]]  # slots[leg][k]: the slot of the k-th step of a leg on one rank
Line = list[int | None]  # line[slot]: the leg that one rank runs in the slot, or None

_SECOND_HALF: Final = 5  # the second slot of a step that takes two


class Step(NamedTuple):
    """One step; the k-th of its leg (`place`) on its rank. Sorts by slot, then by rank."""

    slot: int
    rank: int
    leg: int
    place: int


def repeat(blocks: Sequence[Sequence[int]], num_microbatches: int) -> list[Slots]:
    """Return the slots of each rank when its block is repeated for every micro-batch."""
    starts = range(0, INTERVAL * num_microbatches, INTERVAL)
    return [[[offset + start for start in starts] for offset in block] for block in blocks]


def sort_by_slot(ranks: Sequence[Slots]) -> list[Step]:
    """Return all steps in the order of their slots."""
    return sorted(
        Step(slot, rank, leg, place)
        for rank, slots in enumerate(ranks)
        for leg, row in enumerate(slots)
        for place, slot in enumerate(row)
    )


def fill_gaps_with_weights(slots: Slots) -> list[tuple[int, int]]:
    """Return where one rank runs its W steps: (slot, leg of the I), in order.

    Each idle slot takes one W whose I has run, W steps of leg 2 first; the rest follow at the end.
    """
    legs = {slot: leg for leg, row in enumerate(slots[:WEIGHT]) for slot in row}
    backward = (BACKWARD_DOWN, BACKWARD_UP)
    ready = dict.fromkeys(backward, 0)
    weights: list[tuple[int, int]] = []
    slot, total = 0, sum(len(slots[leg]) for leg in backward)
    while len(weights) < total:
        if slot in legs:
            if (leg := legs[slot]) in ready:
                ready[leg] += 1
        elif (leg := next((leg for leg in backward if ready[leg]), -1)) in ready:
            ready[leg] -= 1
            weights.append((slot, leg))
        slot += 1
    return weights


def compact(ranks: Sequence[Slots]) -> list[Slots]:
    """Keep the order of every rank and move each step to the first slot that its inputs allow."""
    moved: list[Slots] = [[[] for _ in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, leg, place in sort_by_slot(ranks):
        slot = max(free[rank], 1 + _last_input(moved, rank, leg, place))
        moved[rank][leg].append(slot)
        free[rank] = slot + 1
    return moved


def move_earlier(
    ranks: Sequence[Slots],
    lengths: Sequence[int],
    may_move: Callable[[Step], bool],
    weights_fill_gaps: bool = False,
) -> list[Slots]:
    """Move each step to the earliest idle slot after its inputs that keeps the memory limit.

    The limit for every rank is the highest memory of any rank before the move.

    Args:
        ranks: the slots of each rank; legs 0 to 3, and optionally 4 for W.
        lengths: slots that a step of each leg takes, 1 or 2. Memory is released by W, or in the
            second slot of a backward that takes two.
        may_move: called for each step, in order; returns whether the step may move.
        weights_fill_gaps: count memory as if each idle slot ran a W whose I has run.
    """
    ranks = [[list(row) for row in slots] for slots in ranks]
    lines = [_line(slots, lengths) for slots in ranks]
    limit = max(_peak(line, weights_fill_gaps) for line in lines)
    inputs: list[list[int]] = [[] for _ in ranks]  # slots of the I steps seen so far
    for step in sort_by_slot(ranks):
        slot, rank, leg, place = step
        if may_move(step):
            first = 1 + _last_input(ranks, rank, leg, place, lengths)
            if leg == WEIGHT:
                first = max(first, 1 + sorted(inputs[rank])[place])
            slot = _earliest(lines[rank], step, first, lengths[leg], limit, weights_fill_gaps)
            ranks[rank][leg][place] = slot
        if leg in (BACKWARD_DOWN, BACKWARD_UP):
            inputs[rank].append(slot)
    return ranks


def _last_input(
    ranks: Sequence[Slots], rank: int, leg: int, place: int, lengths: Sequence[int] = (1,) * 5
) -> int:
    """Return the last slot of the inputs of a step and of the previous step of its leg; -1: none.

    For W only the latter.
    """
    last = ranks[rank][leg][place - 1] + lengths[leg] - 1 if place else -1
    if leg == WEIGHT:
        return last
    before = rank - 1 if leg in (FORWARD_DOWN, BACKWARD_DOWN) else rank + 1
    if 0 <= before < len(ranks):
        return max(last, ranks[before][leg][place] + lengths[leg] - 1)
    if leg == FORWARD_DOWN:
        return last
    return max(last, ranks[rank][leg - 1][place] + lengths[leg - 1] - 1)


def _line(slots: Slots, lengths: Sequence[int]) -> Line:
    line: Line = [None] * (2 + max(slot for row in slots for slot in row))
    for leg, row in enumerate(slots):
        for slot in row:
            line[slot] = leg
            if lengths[leg] == 2:
                line[slot + 1] = _SECOND_HALF
    return line


def _peak(line: Line, weights_fill_gaps: bool) -> int:
    held = most = ready = 0
    for leg in line:
        if leg is None:
            if weights_fill_gaps and ready:
                ready -= 1
                held -= 1
        elif leg <= FORWARD_UP:
            held += 1
            most = max(most, held)
        elif leg <= BACKWARD_UP:
            ready += 1
        else:
            held -= 1
    return most


def _earliest(
    line: Line, step: Step, first: int, length: int, limit: int, weights_fill_gaps: bool
) -> int:
    """Move `step` in `line` to the earliest possible slot from `first` on; return that slot."""
    here, leg = step.slot, step.leg
    content, idle = line[here : here + length], [None] * length
    line[here : here + length] = idle
    for slot in range(first, here):
        if line[slot : slot + length] != idle:
            continue
        line[slot : slot + length] = content
        takes_more = leg <= FORWARD_UP or weights_fill_gaps
        if not takes_more or _peak(line, weights_fill_gaps) <= limit:
            return slot
        line[slot : slot + length] = idle
    line[here : here + length] = content
    return here


class Sizes(NamedTuple):
    """The sizes that a schedule is built for."""

    pp_size: int
    num_microbatches: int
    chunks: int = 1


class RankCosts(NamedTuple):
    """Times for one micro-batch in all stages of one rank together, and the time of one message."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0

    @property
    def work(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


UNIT_COSTS: Final = RankCosts()


class Formula(str):
    """A Python expression that prints as it is written and can be evaluated.

    Variables: p ranks, m micro-batches, v stages per rank, r the rank; F, I and W the times of all
    stages of one rank for one micro-batch, c the time of a message. Functions: min, max, ceil.

        Formula("min(m, p - r)")(Sizes(4, 8), rank=1) == 3
    """

    __slots__ = ()

    def __call__(self, sizes: Sizes, costs: RankCosts = UNIT_COSTS, rank: int = 0) -> float:
        """Return the value of the expression; True or False for a condition."""
        variables = dict(zip("pmvFIWcr", (*sizes, *costs, rank), strict=True))
        value: float = eval(_compiled(self), _FUNCTIONS, variables)
        return value


_FUNCTIONS: Final[dict[str, Any]] = {
    "__builtins__": {}, "min": min, "max": max, "ceil": math.ceil,
}  # fmt: skip


ALWAYS: Final = Formula("True")


@cache
def _compiled(formula: Formula) -> CodeType:
    return compile(formula, "<formula>", "eval")


@dataclass(frozen=True)
class ScheduleFamily:
    """One schedule: the function that builds it, and formulas for stages of equal cost.

    A test compares the formulas with the simulation.

    Args:
        name: name of the schedule in `pipeline.schedule`.
        build: returns the plan for (pp_size, num_microbatches), and chunks if `chunks` is None.
        makespan: time from the first step to the last, where `exact` is true.
        peak: the most micro-batches whose activations rank r holds at one time, as a fraction of
            the activations of all its stages. An upper bound on every rank, exact on the rank that
            holds most.
        source: where it was published.
        aliases: other names of the schedule.
        placement: which rank holds which stage.
        chunks: stages on each rank; None: any number, 2 by default.
        exact: condition on sizes and costs under which `makespan` is exact; otherwise only the
            simulation gives the makespan.
    """

    name: str
    build: Callable[..., Plan]
    makespan: Formula
    peak: Formula
    source: str
    aliases: tuple[str, ...] = ()
    placement: Literal["loop", "v"] = "loop"
    chunks: int | None = 1
    exact: Formula = ALWAYS

    @property
    def default_chunks(self) -> int:
        """Stages on each rank if the caller does not say how many."""
        return self.chunks or 2

    def plan(self, sizes: Sizes) -> Plan:
        """Return the plan for `sizes`, whose chunks the schedule accepts."""
        return self.build(*sizes) if self.chunks is None else self.build(*sizes[:2])

    def chunks_error(self, chunks: int) -> str | None:
        """Return why the schedule does not accept `chunks` and what to do; None if it does."""
        if self.chunks in (None, chunks):
            return None
        stages = "one stage" if self.chunks == 1 else f"{self.chunks} stages"
        in_a_v = ", placed in a v" if self.placement == "v" else ""
        others = ", or use pipeline.schedule 'interleaved'" if self.chunks == 1 else ""
        return (
            f"pipeline.chunks is {chunks}, and schedule {self.name!r} runs {stages} per rank"
            f"{in_a_v}: set it to {self.chunks}{others}"
        )

    def bubble(self, sizes: Sizes, costs: RankCosts = UNIT_COSTS) -> float:
        """Return the fraction of the makespan in which a rank is idle, by formula, 0 to 1."""
        makespan = self.makespan(sizes, costs)
        busy = sizes.num_microbatches * costs.work
        # Rounding can make the busy time larger than the makespan.
        return max(0.0, 1.0 - busy / makespan) if makespan else 0.0


def steps(kind: Kind, stage: int, num_microbatches: int) -> Program:
    """Return one step per micro-batch at one stage: F0 F1 F2 .."""
    return tuple(Instruction(kind, stage, m) for m in range(num_microbatches))


def steps_in_groups(kind: Kind, stages: Sequence[int], groups: Sequence[int]) -> Program:
    """Return the steps of each group of micro-batches: all at the first stage, then at the next.

    stages=[0, 2], groups=[2, 1]:   F0@0 F1@0 F0@2 F1@2   F2@0 F2@2
    """
    order: list[Instruction] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        order += [Instruction(kind, stage, m) for stage in stages for m in group]
        first += size
    return tuple(order)


def alternate(first: Sequence[Instruction], second: Sequence[Instruction], lead: int) -> Program:
    """Return `lead` steps of `first`, then steps of `second` and `first` in turn.

    Both have the same length. lead=1:   F0   F1 B0   F2 B1   B2
    """
    lead = min(lead, len(first))
    turns = (step for pair in zip(first[lead:], second, strict=False) for step in pair)
    return (*first[:lead], *turns, *second[len(first) - lead :])


def delay_weights(order: Sequence[Instruction], lag: int) -> Program:
    """Return `order` with the W of each I inserted `lag` I steps later, or at the end.

    lag=1:   F0 I0   F1 I1 W0   I2 W1   W2
    """
    inputs = [step for step in order if step.kind is Kind.BACKWARD_INPUT]
    weights = [step._replace(kind=Kind.BACKWARD_WEIGHT) for step in inputs]
    inserted = dict(zip(inputs[lag:], weights, strict=False))
    program: list[Instruction] = []
    for step in order:
        program.append(step)
        if step in inserted:
            program.append(inserted[step])
    return (*program, *weights[len(inserted) :])


def keep_first(plan: Plan, num_microbatches: int) -> Plan:
    """Return `plan` with only its first `num_microbatches` micro-batches.

    The result stays valid, because no step needs a step of another micro-batch.
    """
    programs = (
        tuple(step for step in program if step.microbatch < num_microbatches)
        for program in plan.programs
    )
    return replace(plan, num_microbatches=num_microbatches, programs=tuple(programs))


class TwoChunkProgram:
    """Builds the program of one rank from letters, and numbers the micro-batches.

    `F`, `B`, `I`, `W` are steps of the first chunk, `f`, `b`, `i`, `w` of the second, each for the
    next micro-batch for which this chunk has not run such a step. `*` is the oldest W of either
    chunk that can run; it adds nothing if there is none.

        rank 0 of 2, run("F f", times=2), run("b i *"):   F0@0 F0@3 F1@0 F1@3 B0@3 I1@3 W1@3
    """

    def __init__(self, pp_size: int, rank: int) -> None:
        self._stages = (rank, 2 * pp_size - 1 - rank)
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._open: list[Instruction] = []  # W steps whose I has run
        self._steps: list[Instruction] = []

    @property
    def program(self) -> Program:
        return tuple(self._steps)

    def run(self, letters: str, times: int = 1) -> None:
        """Append the steps of `letters`, `times` times."""
        for letter in letters.split() * times:
            if letter != "*":
                self._append(Kind(letter.upper()), self._stages[letter.islower()])
            elif self._open:
                self._append(Kind.BACKWARD_WEIGHT, self._open[0].stage)

    def append_open_weights(self) -> None:
        """Append all W steps that can run, steps of the second chunk first."""
        for step in sorted(self._open, key=lambda step: (-step.stage, step.microbatch)):
            self._append(Kind.BACKWARD_WEIGHT, step.stage)

    def _append(self, kind: Kind, stage: int) -> None:
        if kind is Kind.BACKWARD_WEIGHT:
            microbatch = next(step.microbatch for step in self._open if step.stage == stage)
            self._open.remove(Instruction(kind, stage, microbatch))
        else:
            # B and I share one count: a micro-batch has one or the other.
            counted = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
            microbatch = self._next[counted, stage]
            self._next[counted, stage] += 1
        if kind is Kind.BACKWARD_INPUT:
            self._open.append(Instruction(Kind.BACKWARD_WEIGHT, stage, microbatch))
        self._steps.append(Instruction(kind, stage, microbatch))


def loop(pp_size: int, chunks: int = 1) -> tuple[int, ...]:
    """Place stage s on rank s mod pp_size.  Source: Narayanan et al. 2021, arXiv:2104.04473."""
    return tuple(stage % pp_size for stage in range(pp_size * chunks))


def v(pp_size: int, chunks: int = 2) -> tuple[int, ...]:
    """Place chunks down the ranks and up again in turn; no message at a turning point.

    Source: Qi et al. 2023, arXiv:2401.10241, section 6; with more than two chunks, the waves of
    Liu et al. 2023, arXiv:2308.15762.
    """
    down = tuple(range(pp_size))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def loop_and_v(pp_size: int, chunks: int) -> list[tuple[int, ...]]:
    """Return both placements, or the one if they are equal."""
    return list(dict.fromkeys((loop(pp_size, chunks), v(pp_size, chunks))))

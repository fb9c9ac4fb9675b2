"""Simulation of a plan: start and end of each step, idle time and memory.

Each rank runs one step at a time, as early as its program and its inputs allow. A message takes
`costs.message` and does not occupy a rank. Two measures of time:

    makespan   from the first step of any rank to the end of the last; the time of a training step
               in which all ranks wait for the gradient norm
    span       the longest time of any rank from its own first step to its own last; the "cost" in
               the papers, and the measure for which "zero bubble" is claimed
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.execution_order import execution_order
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program

Times = tuple[tuple[float, ...], ...]


class MemorySpan(NamedTuple):
    """Memory of a rank while a step runs, and from its end to the next step."""

    during: float
    after: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of each step, simulated or measured.

    Args:
        plan: compute steps only.
        start, end: start[r][i] and end[r][i] are the times of step i of rank r.
        peak: the highest memory of each rank, in units of the costs.
    """

    plan: Plan
    start: Times
    end: Times
    peak: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(row[-1] for row in self.end if row) - min(row[0] for row in self.start if row)

    @property
    def span(self) -> float:
        rows = zip(self.start, self.end, strict=True)
        return max(end[-1] - start[0] for start, end in rows if end)

    def busy(self, rank: int) -> float:
        """Return the compute time of `rank`."""
        return sum(self.end[rank]) - sum(self.start[rank])

    def bubble_of(self, rank: int) -> float:
        """Return the fraction of the makespan in which `rank` is idle, 0 to 1."""
        # Rounding can make the busy time larger than the makespan.
        return max(0.0, 1.0 - self.busy(rank) / self.makespan) if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """The fraction of the makespan in which ranks are idle, averaged over ranks."""
        return sum(map(self.bubble_of, range(self.plan.num_ranks))) / self.plan.num_ranks

    def steps(self, rank: int) -> Iterator[tuple[Instruction, float, float]]:
        """Yield (step, start, end) of `rank`, in order."""
        return zip(self.plan.programs[rank], self.start[rank], self.end[rank], strict=True)

    def waits(self, rank: int) -> list[tuple[Instruction, float]]:
        """Return the steps before which `rank` is idle, and for how long; the first from time 0."""
        ends = (0.0, *self.end[rank])
        gaps = zip(self.plan.programs[rank], self.start[rank], ends, strict=False)
        return [(step, start - before) for step, start, before in gaps if start > before]


def simulate(plan: Plan, costs: CostModel) -> Timeline:
    """Compute the times of the compute steps of `plan`, in time proportional to their number.

    Raises:
        ScheduleError: the costs have another number of stages, or the plan deadlocks.
    """
    plan = plan.compute_only()
    if costs.num_stages != plan.num_stages:
        raise ScheduleError(
            f"schedule {plan.name!r} has {plan.num_stages} stages, but the costs have "
            f"{costs.num_stages}"
        )
    time = {
        Kind.FORWARD: costs.forward,
        Kind.BACKWARD: costs.whole_backward,
        Kind.BACKWARD_INPUT: costs.backward_input,
        Kind.BACKWARD_WEIGHT: costs.backward_weight,
    }
    passes = costs.vocabulary.times
    clock = [0.0] * plan.num_ranks
    done: dict[Instruction, float] = {}
    start: list[list[float]] = [[] for _ in plan.programs]
    end: list[list[float]] = [[] for _ in plan.programs]
    for rank, step, needs in execution_order(plan):
        at = clock[rank]
        for need in needs:
            ready = done[need]
            if plan.rank_of(need) != rank:
                ready += costs.message
            if ready > at:
                at = ready
        start[rank].append(at)
        of_stage = time.get(step.kind)
        duration = passes[step.kind] if of_stage is None else of_stage[step.stage]
        clock[rank] = done[step] = at + duration
        end[rank].append(clock[rank])
    return Timeline(
        plan,
        tuple(map(tuple, start)),
        tuple(map(tuple, end)),
        tuple(peak_held(program, costs, plan.forward_only) for program in plan.programs),
    )


def peak_held(program: Program, costs: CostModel, forward_only: bool = False) -> float:
    """Return the highest memory of a rank that runs `program`, in units of the costs.

    Activations count from the start of F to the end of W or B, with the memory `costs.kept` between
    I and W. With vocabulary parallelism S holds `costs.vocabulary.kept` until T. An evaluation
    holds only the current micro-batch.
    """
    return max((span.during for span in memory_spans(program, costs, forward_only)), default=0.0)


def memory_spans(program: Program, costs: CostModel, forward_only: bool) -> Iterator[MemorySpan]:
    """Yield the memory of a rank for each of its steps, by the rules of `peak_held`.

    A step allocates at its start and frees at its end.
    """
    activation, kept = costs.held_after_forward, costs.held_after_input
    held = 0.0
    for kind, stage, _ in program:
        during = after = held
        if kind is Kind.FORWARD:
            during += activation[stage]
            after = held if forward_only else during
        elif kind is Kind.BACKWARD_INPUT:
            after += kept[stage] - activation[stage]
            during = max(held, after)
        elif kind is Kind.BACKWARD:
            after -= activation[stage]
        elif kind is Kind.BACKWARD_WEIGHT:
            after -= kept[stage]
        elif kind is Kind.OUTPUT:
            during += costs.vocabulary.kept
            after = held if forward_only else during
        elif kind is Kind.OUTPUT_WEIGHT:
            after -= costs.vocabulary.kept
        yield MemorySpan(during, after)
        held = after

"""A plan played against a clock: when each step would run, who waits, what is held.

Each rank runs one step at a time, each as early as its program and its inputs allow. A message
takes `costs.message` and keeps no rank busy. Two measures that must not be mixed up:

    makespan   from the first step of any rank to the last; what a fenced optimizer step sees
    span       the longest that any one rank takes from its own first step to its own last; the
               papers' "cost", and what "zero bubble" is a claim about
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.order import running_order

Times = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Timeline:
    """When each step runs, simulated or measured.

    Args:
        plan: compute steps only.
        start, end: start[r][i] is when rank r begins step i of its program; `end` likewise.
        peak: the most memory that each rank holds at one time, in units of the costs.
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
        """The time that `rank` works."""
        return sum(self.end[rank]) - sum(self.start[rank])

    def bubble_of(self, rank: int) -> float:
        """The share of the makespan that `rank` does not work, 0 to 1."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """The share of the makespan that the ranks do not work, in the mean."""
        return sum(map(self.bubble_of, range(self.plan.num_ranks))) / self.plan.num_ranks

    def steps(self, rank: int) -> Iterator[tuple[Instruction, float, float]]:
        """(step, start, end), in order."""
        return zip(self.plan.programs[rank], self.start[rank], self.end[rank], strict=True)

    def waits(self, rank: int) -> list[tuple[Instruction, float]]:
        """The steps that `rank` stands still for, and how long; the first from time 0."""
        ends = (0.0, *self.end[rank])
        gaps = zip(self.plan.programs[rank], self.start[rank], ends, strict=False)
        return [(step, start - before) for step, start, before in gaps if start > before]


def simulate(plan: Plan, costs: CostModel) -> Timeline:
    """Plays the compute steps of `plan`, in time proportional to their number.

    Raises:
        ScheduleError: the costs are of another number of stages, or the plan stands still.
    """
    plan = plan.compute_only()
    if costs.num_stages != plan.num_stages:
        raise ScheduleError(
            f"schedule {plan.name!r} has {plan.num_stages} stages, and the costs are of "
            f"{costs.num_stages}"
        )
    time = {
        Kind.FORWARD: costs.forward,
        Kind.BACKWARD: costs.whole_backward,
        Kind.BACKWARD_INPUT: costs.backward_input,
        Kind.BACKWARD_WEIGHT: costs.backward_weight,
    }
    home = plan.rank_of_stage
    clock = [0.0] * plan.num_ranks
    done: dict[Instruction, float] = {}
    start: list[list[float]] = [[] for _ in plan.programs]
    end: list[list[float]] = [[] for _ in plan.programs]
    for rank, step, need in running_order(plan):
        at = clock[rank]
        if need is not None:
            ready = done[need]
            if home[need.stage] != rank:
                ready += costs.message
            if ready > at:
                at = ready
        start[rank].append(at)
        clock[rank] = done[step] = at + time[step.kind][step.stage]
        end[rank].append(clock[rank])
    return Timeline(
        plan,
        tuple(map(tuple, start)),
        tuple(map(tuple, end)),
        tuple(peak_held(program, costs, plan.forward_only) for program in plan.programs),
    )


def peak_held(program: Program, costs: CostModel, forward_only: bool = False) -> float:
    """The most memory that a rank holds while it runs `program`, in units of the costs.

    Activations count from the start of F to the end of W, or of a whole B; between I and W as
    much as the costs say is kept. An evaluation holds the micro-batch it works on, no longer.
    """
    activation, kept = costs.held_after_forward, costs.held_after_input
    if forward_only:
        return max((activation[step.stage] for step in program), default=0.0)
    held = peak = 0.0
    for kind, stage, _ in program:
        if kind is Kind.FORWARD:
            held += activation[stage]
        elif kind is Kind.BACKWARD_INPUT:
            held += kept[stage] - activation[stage]
        peak = max(peak, held)
        if kind is Kind.BACKWARD:
            held -= activation[stage]
        elif kind is Kind.BACKWARD_WEIGHT:
            held -= kept[stage]
    return peak

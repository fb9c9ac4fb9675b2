"""What comes of a config under one schedule: time, memory of each rank, traffic."""

from collections import Counter
from dataclasses import dataclass

from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.schedules import SCHEDULES, ShareCosts, Sizes
from pipemega.pipeline.simulate import Timeline, simulate
from pipemega.planning.footprint import Footprint
from pipemega.planning.layout import Drawing, Layout
from pipemega.planning.ledger import Held, peak_of
from pipemega.planning.rates import Rates


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one pipeline rank at its fullest moment; its data and tensor peers have as much.

    Args:
        footprint: what is always there.
        held: what the schedule makes it hold.
        batch: inputs and labels of a whole step.
    """

    footprint: Footprint
    held: Held
    batch: int

    @property
    def _in_the_step(self) -> bool:
        """Whether the end of the step, after the last backward, is the fullest moment."""
        return self.footprint.step > self.held.total + self.batch

    @property
    def activations(self) -> int:
        return 0 if self._in_the_step else self.held.activations

    @property
    def buffers(self) -> int:
        """Messages, the batch, and what the instruction or the reduction itself needs."""
        if self._in_the_step:
            return self.footprint.step
        return self.held.messages + self.held.working + self.batch

    @property
    def total(self) -> int:
        return self.footprint.total + self.activations + self.buffers


@dataclass(frozen=True, eq=False)
class Outcome:
    """A schedule for a config.

    Args:
        plan: lowered.
        layout: the stages and their costs.
        costs: of the stages, in bytes, and in seconds or a rank's mean forwards.
        timeline: simulated.
        bubble_formula: the schedule's own, for stages of equal cost; None where there is none.
        memory: by pipeline rank.
        messages, message_bytes: between the pipeline ranks of one data and tensor rank, in a step.
    """

    plan: Plan
    layout: Layout
    costs: CostModel
    timeline: Timeline
    bubble_formula: float | None
    memory: tuple[RankMemory, ...]
    messages: int
    message_bytes: int

    @property
    def chunks(self) -> int:
        return self.plan.num_stages // self.plan.num_ranks

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.memory)

    def fits(self, limit: int | None) -> bool | None:
        """None without a limit."""
        return None if limit is None else self.peak <= limit


def outcome_of(drawing: Drawing, plan: Plan, rates: Rates) -> Outcome:
    """`plan`, with or without messages, played on what its stages cost."""
    compute = plan.compute_only()
    layout = drawing.layout(compute)
    lowered = lower(compute)
    costs = rates.cost_model(layout, plan.num_ranks)
    timeline = simulate(compute, costs)
    sent = Counter(step.kind for step in lowered.steps() if step.kind.is_message)
    traffic = sum(
        layout.costs[step.stage].message
        if step.kind is Kind.SEND_ACTIVATION
        else layout.costs[step.stage].gradient_out
        for step in lowered.steps()
        if step.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    )
    return Outcome(
        plan=lowered,
        layout=layout,
        costs=costs,
        timeline=timeline,
        bubble_formula=_by_formula(compute, costs.message, timeline),
        memory=tuple(
            RankMemory(
                layout.footprints[rank],
                peak_of(lowered, rank, layout.costs, drawing.device),
                _batch(lowered, layout, rank),
            )
            for rank in range(plan.num_ranks)
        ),
        messages=sent[Kind.SEND_ACTIVATION] + sent[Kind.SEND_GRADIENT],
        message_bytes=traffic,
    )


def _by_formula(plan: Plan, message: float, timeline: Timeline) -> float | None:
    family = SCHEDULES.get(plan.name)
    if family is None:
        return None
    work = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), 0.0)
    for rank in range(plan.num_ranks):
        for step, start, end in timeline.steps(rank):
            kind = Kind.BACKWARD_INPUT if step.kind is Kind.BACKWARD else step.kind
            work[kind] += end - start
    forward, inputs, weights = (w / plan.num_ranks / plan.num_microbatches for w in work.values())
    sizes = Sizes(plan.num_ranks, plan.num_microbatches, plan.num_stages // plan.num_ranks)
    return family.bubble(sizes, ShareCosts(forward, inputs, weights, message))


def _batch(plan: Plan, layout: Layout, rank: int) -> int:
    """Bytes of the inputs and labels that the engine puts on the device for a whole step."""
    homes = plan.rank_of_stage
    each = layout.input_bytes * (homes[0] == rank) + layout.label_bytes * (homes[-1] == rank)
    return each * plan.num_microbatches

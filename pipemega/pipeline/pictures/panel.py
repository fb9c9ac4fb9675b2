"""One timeline as it is drawn: from time 0, with what each step waited for and what was held."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Instruction, Kind
from pipemega.pipeline.simulate import Timeline


class Wait(NamedTuple):
    """The time that a rank stood still before one of its steps.

    Args:
        at: where the step stands in the program of its rank.
        time: from the end of the step before, or from time 0, to its start.
        awaited: the step of another rank whose result it waited for; None: the rank was free and
            had what it needed, as before the first step, or where time went elsewhere.
    """

    at: int
    time: float
    awaited: Instruction | None


class Held(NamedTuple):
    """Memory of a rank: while a step runs, and from its end to the next."""

    during: float
    after: float


@dataclass(frozen=True)
class Panel:
    """A timeline and what stands above it.

    Args:
        timeline: simulated or measured; it is drawn from its first step on.
        title: None: the schedule's name and sizes.
        costs: what its stages hold; None: a micro-batch of one rank's share of the model is 1,
            which the stages of the rank divide evenly.
    """

    timeline: Timeline
    title: str | None = None
    costs: CostModel | None = None

    @property
    def heading(self) -> str:
        plan = self.timeline.plan
        if self.title is not None:
            return self.title
        return (
            f"{plan.name}, {_counted(plan.num_ranks, 'rank')}, "
            f"{_counted(plan.num_microbatches, 'micro-batch', 'es')}"
        )

    @cached_property
    def origin(self) -> float:
        """When the first step of all begins: a measured clock may start anywhere."""
        return min((row[0] for row in self.timeline.start if row), default=0.0)

    @cached_property
    def chunk_of_stage(self) -> tuple[int, ...]:
        """The place of each stage among those of its rank."""
        plan = self.timeline.plan
        chunks = [0] * plan.num_stages
        for rank in range(plan.num_ranks):
            for chunk, stage in enumerate(plan.stages_of(rank)):
                chunks[stage] = chunk
        return tuple(chunks)

    @property
    def num_chunks(self) -> int:
        """The most stages that a rank holds."""
        return 1 + max(self.chunk_of_stage)

    def waits(self, rank: int) -> list[Wait]:
        """What `rank` stood still for, in order."""
        plan, timeline = self.timeline.plan, self.timeline
        found, free = [], self.origin
        for at, (step, start, end) in enumerate(timeline.steps(rank)):
            if start > free:
                need = plan.needs(step)
                elsewhere = need is not None and plan.rank_of_stage[need.stage] != rank
                found.append(Wait(at, start - free, need if elsewhere else None))
            free = max(free, end)
        return found

    def held(self, rank: int) -> list[Held]:
        """What `rank` holds, step by step, by the rules of `simulate.peak_held`.

        What a step takes is there from its start; what it lets go, at its end.
        """
        plan = self.timeline.plan
        costs = self.costs or CostModel.shared(plan.rank_of_stage)
        activation, kept = costs.held_after_forward, costs.held_after_input
        found, held = [], 0.0
        for kind, stage, _ in plan.programs[rank]:
            during = after = held
            if kind is Kind.FORWARD:
                during += activation[stage]
                after = held if plan.forward_only else during
            elif kind is Kind.BACKWARD_INPUT:
                after += kept[stage] - activation[stage]
                during = max(held, after)
            elif kind is Kind.BACKWARD:
                after -= activation[stage]
            elif kind is Kind.BACKWARD_WEIGHT:
                after -= kept[stage]
            found.append(Held(during, after))
            held = after
        return found

    def figures(self, unit: str) -> str:
        """Makespan and bubble, as the line beside the title says them."""
        timeline = self.timeline
        return f"makespan {timeline.makespan:.4g} {unit}, bubble {timeline.bubble:.1%}"


def panels_of(
    shown: Timeline | Panel | Sequence[Panel], measured: Timeline | None = None
) -> tuple[Panel, ...]:
    """What the functions that draw are given, as panels.

    Args:
        shown: one timeline, or several.
        measured: of the same plan; then the one that is shown is called the predicted one.
    """
    if isinstance(shown, Timeline):
        shown = Panel(shown)
    panels = (shown,) if isinstance(shown, Panel) else tuple(shown)
    if measured is None:
        return panels
    heading, costs = panels[0].heading, panels[0].costs
    return (
        Panel(panels[0].timeline, f"predicted: {heading}", costs),
        *panels[1:],
        Panel(measured, f"measured: {heading}", costs),
    )


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"

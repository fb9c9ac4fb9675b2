"""One timeline to draw: from time 0, with the waits and the memory of each rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipemega.monitor.step_phases import Phase, PhasesByRank
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.instructions import Instruction
from pipemega.pipeline.plan.simulate import MemorySpan, Timeline, memory_spans
from pipemega.printing import counted, percent


class Wait(NamedTuple):
    """Idle time of a rank before one of its steps.

    Args:
        at: index of the step in the program of its rank.
        time: from the end of the previous step, or from time 0, to the start of the step.
        awaited: the step of another rank whose result was awaited; None if the rank waited for no
            other rank.
    """

    at: int
    time: float
    awaited: Instruction | None


@dataclass(frozen=True)
class Panel:
    """A timeline with its title and memory costs.

    Args:
        timeline: simulated or measured; drawn from its first step on.
        title: None: name and sizes of the schedule.
        costs: memory costs of the stages; None: a micro-batch takes 1 on each rank, divided evenly
            among the stages of the rank.
        phases: for each rank, the phases of a measured step outside of its pipeline.
        mark: words that distinguish the panel from others, such as "chosen"; None: no mark.
    """

    timeline: Timeline
    title: str | None = None
    costs: CostModel | None = None
    mark: str | None = None
    phases: PhasesByRank = ()

    @property
    def heading(self) -> str:
        plan = self.timeline.plan
        if self.title is not None:
            return self.title
        return (
            f"{plan.name}, {counted(plan.num_ranks, 'rank')}, "
            f"{counted(plan.num_microbatches, 'micro-batch', 'es')}"
        )

    @cached_property
    def origin(self) -> float:
        """Start of the first step or phase: a measured clock may start at any number."""
        return min((start for start, _ in self._intervals()), default=0.0)

    @cached_property
    def length(self) -> float:
        """Time from the start of the first step or phase to the end of the last."""
        return max((end for _, end in self._intervals()), default=0.0) - self.origin

    def _intervals(self) -> Iterator[tuple[float, float]]:
        """Yield (start of the first step, end of the last step) of each rank, and the phases."""
        timeline = self.timeline
        yield from ((a[0], b[-1]) for a, b in zip(timeline.start, timeline.end, strict=True) if a)
        yield from ((phase.start, phase.end) for rank in self.phases for phase in rank)

    @cached_property
    def chunk_of_stage(self) -> tuple[int, ...]:
        """For each stage, its index among the stages of its rank."""
        plan = self.timeline.plan
        chunks = [0] * plan.num_stages
        for rank in range(plan.num_ranks):
            for chunk, stage in enumerate(plan.stages_of(rank)):
                chunks[stage] = chunk
        return tuple(chunks)

    @property
    def num_chunks(self) -> int:
        """The maximum number of stages on a rank."""
        return 1 + max(self.chunk_of_stage)

    def waits(self, rank: int) -> list[Wait]:
        """Return the waits of `rank` in order."""
        plan, timeline = self.timeline.plan, self.timeline
        found, starts = [], timeline.start[rank]
        before = [p.end for p in self.phases_of(rank) if starts and p.end <= starts[0]]
        free = max(before, default=self.origin)
        for at, (step, start, end) in enumerate(timeline.steps(rank)):
            if start > free:
                found.append(Wait(at, start - free, plan.remote_need(step)))
            free = max(free, end)
        return found

    def phases_of(self, rank: int) -> Sequence[Phase]:
        return self.phases[rank] if self.phases else ()

    def held(self, rank: int) -> list[MemorySpan]:
        """Return the memory of `rank` for each of its steps."""
        plan = self.timeline.plan
        costs = self.costs or CostModel.from_rank_costs(plan.rank_of_stage)
        return list(memory_spans(plan.programs[rank], costs, plan.forward_only))

    def summary(self, unit: str) -> str:
        """Return makespan and bubble, the text next to the title."""
        timeline = self.timeline
        step = f"step {self.length:.4g} {unit}, " if self.phases else ""
        return f"{step}makespan {timeline.makespan:.4g} {unit}, bubble {percent(timeline.bubble)}"


def as_panels(
    shown: Timeline | Panel | Sequence[Panel], measured: Timeline | None = None
) -> tuple[Panel, ...]:
    """Return the arguments of a drawing function as panels.

    Args:
        shown: one timeline, or panels.
        measured: the measured timeline of the same plan; the first panel is then called predicted.
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

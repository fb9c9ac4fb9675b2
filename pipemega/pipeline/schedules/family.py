"""What is known of a schedule beside its plan: what it can take, what it costs by formula."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pipemega.pipeline.instructions import Plan


class Sizes(NamedTuple):
    """What a schedule is built for."""

    pp_size: int
    num_microbatches: int
    chunks: int = 1


class ShareCosts(NamedTuple):
    """Times of one rank's share of the model for one micro-batch, and of one message."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0

    @property
    def work(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


UNIT_COSTS: Final = ShareCosts()


@dataclass(frozen=True)
class ScheduleFamily:
    """One schedule: how it is built and what is known of it.

    The formulas are for stages of equal cost. Each is there twice: as a function, and as people
    read it, with p ranks, m micro-batches, v chunks, rank r, times F, I and W of one rank's share
    and c of a message; a test holds both to the simulation.

    Args:
        name: as `pipeline.schedule` names it.
        aliases: other names that it goes by.
        build: the plan for given sizes.
        placement: how the stages lie on the ranks.
        chunks: stages on each rank; None: any number, usually 2.
        makespan, makespan_formula: from the first step to the last, where `exact` says so.
        exact, exact_formula: for which sizes and costs the makespan is that of the formula; for
            others the simulation alone tells.
        peak, peak_formula: the most micro-batches whose activations a rank holds at one time, in
            shares of the whole rank; no rank holds more, and the fullest holds as much.
        source: where it was published.
    """

    name: str
    build: Callable[[Sizes], Plan]
    makespan: Callable[[Sizes, ShareCosts], float]
    makespan_formula: str
    peak: Callable[[Sizes, int], float]
    peak_formula: str
    source: str
    aliases: tuple[str, ...] = ()
    placement: Literal["loop", "v"] = "loop"
    chunks: int | None = 1
    exact: Callable[[Sizes, ShareCosts], bool] = lambda sizes, costs: True
    exact_formula: str = "True"

    @property
    def usual_chunks(self) -> int:
        """Stages on each rank where nobody says how many."""
        return self.chunks or 2

    def refuses(self, sizes: Sizes) -> str | None:
        """Why it cannot take these sizes, and what to do; None if it can."""
        if self.chunks in (None, sizes.chunks):
            return None
        stages = "one stage" if self.chunks == 1 else f"{self.chunks} stages"
        in_a_v = ", placed in a v" if self.placement == "v" else ""
        return (
            f"runs {stages} per rank{in_a_v}, and pipeline.chunks is {sizes.chunks}: set it to "
            f"{self.chunks}"
        )

    def bubble(self, sizes: Sizes, costs: ShareCosts = UNIT_COSTS) -> float:
        """The share of the makespan that a rank does not work, by formula, 0 to 1."""
        makespan = self.makespan(sizes, costs)
        return 1.0 - sizes.num_microbatches * costs.work / makespan if makespan else 0.0

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

    The two formulas are exact for stages of equal cost. Each is there twice: as a function, and
    as people read it, with p ranks, m micro-batches, rank r, times F, I and W of one rank's share
    and c of a message; a test holds both to the simulation.

    Args:
        name: as `pipeline.schedule` names it.
        aliases: other names that it goes by.
        build: the plan for given sizes.
        placement: how the stages lie on the ranks.
        refuses: why it cannot take these sizes and what to do, or None.
        needs: the same in a few words, for the table.
        makespan, makespan_formula: from the first step to the last.
        peak, peak_formula: the most micro-batches whose activations a rank holds at one time, in
            shares of the whole rank.
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
    refuses: Callable[[Sizes], str | None] = lambda sizes: None
    needs: str = "-"

    def bubble(self, sizes: Sizes, costs: ShareCosts = UNIT_COSTS) -> float:
        """The share of the makespan that a rank does not work, by formula, 0 to 1."""
        makespan = self.makespan(sizes, costs)
        return 1.0 - sizes.num_microbatches * costs.work / makespan if makespan else 0.0


def needs_one_chunk(sizes: Sizes) -> str | None:
    """Why a schedule of one stage per rank cannot take `sizes`, or None."""
    if sizes.chunks == 1:
        return None
    return f"runs one stage per rank, and pipeline.chunks is {sizes.chunks}: set it to 1"

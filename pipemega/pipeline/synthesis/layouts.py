"""Where the stages of a model can lie on the ranks, and what they cost there."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.schedules import ShareCosts
from pipemega.pipeline.schedules.placement import loop, v


@dataclass(frozen=True)
class Layout:
    """One way to lay a model over pipeline ranks.

    Args:
        rank_of_stage: stage s lies on rank rank_of_stage[s]; every rank holds at least one.
        costs: time and memory of each stage, and of a message.

    Raises:
        ScheduleError: the costs are of another number of stages, or a rank has no stage.
    """

    rank_of_stage: tuple[int, ...]
    costs: CostModel

    def __post_init__(self) -> None:
        if self.costs.num_stages != len(self.rank_of_stage):
            raise ScheduleError(
                f"a layout of {len(self.rank_of_stage)} stages, and costs of "
                f"{self.costs.num_stages}: give each stage one"
            )
        ranks = set(self.rank_of_stage)
        if ranks != set(range(len(ranks))) or not ranks:
            raise ScheduleError(
                f"rank_of_stage is {list(self.rank_of_stage)}: number the ranks from 0 and leave "
                f"none out"
            )

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def chunks(self) -> int:
        """The most stages that any rank holds."""
        return max(map(self.rank_of_stage.count, range(self.num_ranks)))

    @property
    def least_memory(self) -> tuple[float, ...]:
        """What each rank must hold under any plan: one micro-batch at all of its stages.

        Less will not do, since the last of these forwards comes before the first backward; and as
        much is enough, one micro-batch after the other with whole backwards.
        """
        held = [0.0] * self.num_ranks
        for rank, size in zip(self.rank_of_stage, self.costs.held_after_forward, strict=True):
            held[rank] += size
        return tuple(held)


def layouts_of_shares(
    pp_size: int, costs: ShareCosts, chunks: Iterable[int] = (1, 2, 4)
) -> list[Layout]:
    """Layouts of a model that can be cut into any number of equal stages.

    Each rank's share costs the same however many stages it is cut into: by `chunks`, placed in a
    loop, and in a v where there are two or more. A pipeline of one rank has nothing to gain from
    chunks, and gets one.

    Raises:
        ScheduleError: fewer than one rank or chunk, or a cost that is none.
    """
    counts = sorted(set(chunks)) if pp_size > 1 else [1]
    for what, size in (("pipeline ranks", pp_size), *(("chunks", count) for count in counts)):
        if size < 1:
            raise ScheduleError(f"layouts for {size} {what}: give at least 1")
    placements = [place for count in counts for place in _placements(pp_size, count)]
    return [Layout(place, CostModel.shared(place, *costs)) for place in placements]


def layouts_of_stages(pp_size: int, costs: CostModel) -> list[Layout]:
    """Layouts of a model that is cut into stages already: in a loop, and in a v where it turns.

    Raises:
        ScheduleError: the stages do not divide among the ranks.
    """
    chunks, rest = divmod(costs.num_stages, max(1, pp_size))
    if pp_size < 1 or chunks < 1 or rest:
        raise ScheduleError(
            f"{costs.num_stages} stages do not divide among {pp_size} pipeline ranks: give each "
            f"rank equally many"
        )
    return [Layout(place, costs) for place in _placements(pp_size, chunks)]


def _placements(pp_size: int, chunks: int) -> list[tuple[int, ...]]:
    return list(dict.fromkeys((loop(pp_size, chunks), v(pp_size, chunks))))

"""Placements of the stages on the ranks, with the costs of each stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.schedules import RankCosts
from pipemega.pipeline.schedules.placement import loop_and_v


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage, and the costs of the stages.

    Args:
        rank_of_stage: stage s is on rank rank_of_stage[s]; every rank holds at least one stage.
        costs: time and memory of each stage, and time of a message.
        memory_limit: limit of each rank on this placement, in units of the costs; None: only the
            limit of the search.

    Raises:
        ScheduleError: the costs have another number of stages, or a rank has no stage.
    """

    rank_of_stage: tuple[int, ...]
    costs: CostModel
    memory_limit: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.costs.num_stages != len(self.rank_of_stage):
            raise ScheduleError(
                f"the placement has {len(self.rank_of_stage)} stages and the costs have "
                f"{self.costs.num_stages}: give the same number"
            )
        ranks = set(self.rank_of_stage)
        if ranks != set(range(len(ranks))) or not ranks:
            raise ScheduleError(
                f"rank_of_stage is {list(self.rank_of_stage)}: number the ranks from 0 without gaps"
            )

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def chunks(self) -> int:
        """The highest number of stages on a rank."""
        return max(map(self.rank_of_stage.count, range(self.num_ranks)))

    @property
    def least_memory(self) -> tuple[float, ...]:
        """The memory that each rank needs under any plan: one micro-batch at all of its stages.

        Less is not enough, because the last of these forwards runs before the first backward. It is
        always enough: run one micro-batch after the other with whole backwards.
        """
        held = [0.0] * self.num_ranks
        for rank, size in zip(self.rank_of_stage, self.costs.held_after_forward, strict=True):
            held[rank] += size
        return tuple(held)

    def limits_within(self, limits: Sequence[float]) -> tuple[float, ...]:
        """Return the limit of each rank: the lower one of `limits` and of `memory_limit`."""
        return tuple(map(min, limits, self.memory_limit or limits))


# Chunk counts that are tried in any case, and the highest one.
_USUAL_CHUNKS, _MAX_CHUNKS = (1, 2, 4), 8


def chunk_counts(pp_size: int, *layer_counts: int) -> tuple[int, ...]:
    """Return the numbers of stages per rank to try: 1, 2, 4 and those that divide the layers.

    Args:
        layer_counts: the number of layers, then other numbers to divide, such as that of blocks.
    """
    if pp_size == 1:
        return (1,)
    divisible = (
        count
        for layers in layer_counts
        for count in range(1, _MAX_CHUNKS + 1)
        if layers and layers % (pp_size * count) == 0
    )
    counts = sorted({*_USUAL_CHUNKS, *divisible})
    return tuple(count for count in counts if count == 1 or pp_size * count <= layer_counts[0])


def limit_of_1f1b(placements: Sequence[Placement], num_microbatches: int) -> float:
    """Return what 1F1B holds on its fullest rank, or what any plan needs if that is more.

    1F1B has one stage per rank: consecutive stages of a placement together.
    """
    held = [_held_by_1f1b(placement, num_microbatches) for placement in placements]
    return max(*held, min(max(placement.least_memory) for placement in placements))


def _held_by_1f1b(placement: Placement, num_microbatches: int) -> float:
    ranks, held = placement.num_ranks, placement.costs.held_after_forward
    chunks = len(held) // ranks
    return max(
        min(num_microbatches, ranks - rank) * sum(held[rank * chunks : (rank + 1) * chunks])
        for rank in range(ranks)
    )


def placements_of_rank_costs(
    pp_size: int, costs: RankCosts, chunks: Iterable[int] = _USUAL_CHUNKS
) -> list[Placement]:
    """Return placements for costs per rank: a model that can be cut into any number of stages.

    The costs of a rank are divided among its `chunks` stages. Placements are a loop for each number
    of chunks, and a v for two or more. A pipeline of one rank gets one chunk, since more would not
    help.

    Raises:
        ScheduleError: fewer than one rank or chunk, or an invalid cost.
    """
    counts = sorted(set(chunks)) if pp_size > 1 else [1]
    for what, size in (("pipeline ranks", pp_size), *(("chunks", count) for count in counts)):
        if size < 1:
            raise ScheduleError(f"placements for {size} {what}: give at least 1")
    places = [place for count in counts for place in loop_and_v(pp_size, count)]
    return [Placement(place, CostModel.from_rank_costs(place, *costs)) for place in places]


def placements_of_stage_costs(pp_size: int, costs: CostModel) -> list[Placement]:
    """Return placements for costs per stage: a loop, and a v if ranks hold several stages.

    Raises:
        ScheduleError: the number of stages is not a multiple of the number of ranks.
    """
    chunks, rest = divmod(costs.num_stages, max(1, pp_size))
    if pp_size < 1 or chunks < 1 or rest:
        raise ScheduleError(
            f"{costs.num_stages} stages cannot be divided evenly among {pp_size} pipeline ranks: "
            f"give a multiple of the number of ranks"
        )
    return [Placement(place, costs) for place in loop_and_v(pp_size, chunks)]

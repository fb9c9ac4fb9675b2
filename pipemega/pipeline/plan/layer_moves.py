"""Cuts of a model into stages, and the moves of layers between its stages."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product

from pipemega.pipeline.plan.partition import partition_at

Bounds = tuple[int, ...]
"""Stage s is layers bounds[s] to bounds[s + 1] - 1."""

# Layers move between this number of the busiest ranks and of the least busy ones.
_RANKS = 4


class LayerMoves:
    """Cuts of one model into the stages of one placement.

    Args:
        rank_of_stage: for each stage, its pipeline rank.
        times: of each layer for one micro-batch.
        splits: layers at which stages start, as for `partition_at`.

    Raises:
        ConfigError: more stages than layers.
    """

    def __init__(
        self, rank_of_stage: Sequence[int], times: Sequence[float], splits: Sequence[int] = ()
    ) -> None:
        self._ranks, self._num_ranks = tuple(rank_of_stage), max(rank_of_stage) + 1
        self._stages: list[list[int]] = [[] for _ in range(self._num_ranks)]
        for stage, rank in enumerate(rank_of_stage):
            self._stages[rank].append(stage)
        marks = (0, *splits, len(times))
        # With fewer stages than marks, stages start at marks only; otherwise at each mark.
        self._only_marks = bool(splits) and len(rank_of_stage) < len(marks)
        self._marks = frozenset(marks)
        self._places = marks if self._only_marks else tuple(range(len(times) + 1))
        self._until = [*accumulate(times, initial=0.0)]
        self._even = tuple(partition_at(times, splits, len(rank_of_stage)))

    def even_cuts(self) -> tuple[Bounds, Bounds]:
        """Return the cut with the lowest time of the slowest stage, and one for ranks.

        They differ if ranks have several stages: even stages need not give even ranks.
        """
        bounds = self._even
        for _ in range(len(self._until)):
            pairs = self._pairs(self._work(bounds))
            moves = [m for pair in pairs if (m := self._moved(bounds, *pair)) is not None]
            better = min(moves, key=self._unevenness, default=bounds)
            if self._unevenness(better) >= self._unevenness(bounds):
                break
            bounds = better
        return self._even, bounds

    @property
    def num_cuts(self) -> int:
        """The number of cuts, or more if some are not allowed by the splits."""
        return math.comb(len(self._places) - 2, len(self._ranks) - 1)

    def all_cuts(self) -> Iterator[Bounds]:
        """Yield all cuts that the splits allow."""
        first, *inner, last = self._places
        for middle in combinations(inner, len(self._ranks) - 1):
            bounds = (first, *middle, last)
            if self._is_allowed(bounds):
                yield bounds

    def around(self, bounds: Bounds) -> Iterator[Bounds]:
        """Yield cuts with one layer moved: from the busiest ranks, then between neighbours."""
        neighbours = [*pairwise(range(len(self._ranks)))]
        pairs = [*self._pairs(self._work(bounds)), *neighbours, *((b, a) for a, b in neighbours)]
        for giver, taker in dict.fromkeys(pairs):
            moved = self._moved(bounds, giver, taker)
            if moved is not None:
                yield moved

    def _is_allowed(self, bounds: Bounds) -> bool:
        if any(a >= b for a, b in pairwise(bounds)):
            return False
        return self._only_marks or self._marks <= set(bounds)

    def _work(self, bounds: Bounds) -> list[float]:
        """Return the time of each rank for one micro-batch."""
        work = [0.0] * self._num_ranks
        for rank, (a, b) in zip(self._ranks, pairwise(bounds), strict=True):
            work[rank] += self._until[b] - self._until[a]
        return work

    def _unevenness(self, bounds: Bounds) -> tuple[float, float]:
        work = self._work(bounds)
        return rounded(max(work)), rounded(sum(w * w for w in work))

    def _pairs(self, work: Sequence[float]) -> Iterator[tuple[int, int]]:
        """Yield (giver, taker): stages of the busiest ranks, and of the least busy ones."""
        order = sorted(range(self._num_ranks), key=lambda rank: (-work[rank], rank))
        for busy, idle in product(order[:_RANKS], order[: -_RANKS - 1 : -1]):
            if work[busy] > work[idle]:
                yield from product(self._stages[busy], self._stages[idle])

    def _moved(self, bounds: Bounds, giver: int, taker: int) -> Bounds | None:
        """Return bounds with a layer less in stage `giver` and one more in `taker`, if allowed.

        Each stage between them gets a layer from one neighbour and gives one to the other.
        """
        step = 1 if taker < giver else -1
        moved = list(bounds)
        for bound in range(min(giver, taker) + 1, max(giver, taker) + 1):
            place = bisect_left(self._places, moved[bound])
            moved[bound] = self._places[place + step]
        found = tuple(moved)
        return found if self._is_allowed(found) else None


def rounded(number: float) -> float:
    """Return nine digits of `number`, so that the order of a sum does not decide a comparison."""
    return float(f"{number:.9g}")

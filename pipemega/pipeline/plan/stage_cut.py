"""Cuts the layers of a model into the stages of a plan, so that the simulated step is shortest.

The search starts from cuts with even times, and from cuts of the caller; then it moves layers
between stages as long as the simulated time of a step falls.  If there are few cuts, it tries all
of them.  The effort is counted in simulated instructions, not in seconds, so that the same input
gives the same cut on every machine.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipemega.errors import ConfigError
from pipemega.pipeline.plan.cost_replay import CostReplay
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.layer_moves import Bounds, LayerMoves, rounded
from pipemega.pipeline.plan.simulate import Timeline, simulate

# Instructions that a search with effort 1 simulates, about one second on one core; at least so
# many times all instructions of the plan.
_EFFORT, _LEAST_CUTS = 3_000_000, 24
# All cuts are tried if they have at most so many instructions together.
_TRY_ALL = 100_000


@dataclass(frozen=True)
class LayerCosts:
    """Costs of each layer for one micro-batch.

    Args:
        forward, backward_input, backward_weight, backward: seconds of F, I, W and B.
        held: bytes from F to B.
        kept: bytes from I to W.
        message: seconds from the end of a step to the start of the step on another rank that uses
            its result.
        instruction: seconds that each F, I, W and B takes beyond those of its layers.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    message: float = 0.0
    instruction: float = 0.0

    @property
    def total(self) -> tuple[float, ...]:
        """Seconds of F and B."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    def cost_model(self, bounds: Sequence[int]) -> CostModel:
        """Return the costs of the stages: stage s is layers bounds[s] to bounds[s + 1] - 1."""

        def by_stage(costs: Sequence[float], more: float = 0.0) -> tuple[float, ...]:
            # fsum: the order of the layers in a stage does not change the sum.
            return tuple(math.fsum(costs[a:b]) + more for a, b in pairwise(bounds))

        more = self.instruction
        return CostModel(
            by_stage(self.forward, more),
            by_stage(self.backward_input, more),
            by_stage(self.backward_weight, more),
            by_stage(self.backward, more),
            by_stage(self.held),
            by_stage(self.kept),
            self.message,
        )


@dataclass(frozen=True, eq=False)
class Cut:
    """Stages of a plan.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        costs: of the stages.
        timeline: simulated with these costs.
    """

    bounds: Bounds
    costs: CostModel
    timeline: Timeline

    @classmethod
    def of(cls, bounds: Sequence[int], plan: Plan, layers: LayerCosts) -> "Cut":
        """Return the cut of `plan` at `bounds`."""
        costs = layers.cost_model(bounds)
        return cls(tuple(bounds), costs, simulate(plan, costs))

    @property
    def peak(self) -> float:
        """Bytes of activations of the fullest rank."""
        return max(self.timeline.peak)

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds of all instructions of each rank."""
        return tuple(map(self.timeline.busy, range(self.timeline.plan.num_ranks)))

    @property
    def imbalance(self) -> float:
        """The work of the slowest rank over the mean, less 1."""
        mean = sum(self.work) / len(self.work)
        return max(self.work) / mean - 1 if mean else 0.0


def even_ranks(
    rank_of_stage: Sequence[int], layers: LayerCosts, splits: Sequence[int] = ()
) -> Bounds:
    """Return bounds with the most even times of ranks that were found; nothing is simulated."""
    return LayerMoves(rank_of_stage, layers.total, splits).even_cuts()[1]


def best_cut(
    plan: Plan,
    layers: LayerCosts,
    *,
    starts: Iterable[Bounds] = (),
    splits: Sequence[int] = (),
    limit: float | None = None,
    effort: float = 1.0,
) -> Cut:
    """Return the fastest cut of `plan` that was found; never slower than those of `starts`.

    Args:
        plan: compute steps only.
        starts: further cuts to compare, and to start from.
        splits: layers at which stages start, as for `partition_at`.
        limit: bytes of activations that a rank may hold. If no cut keeps it, the result is the one
            that comes closest.
        effort: 1 takes a second at most, unless the plan has more than 100,000 instructions.

    Raises:
        ConfigError: more stages than layers.
    """
    moves = LayerMoves(plan.rank_of_stage, layers.total, splits)
    search = _Search(plan, layers, limit, effort)
    search.try_all(dict.fromkeys((*starts, *moves.even_cuts())))
    if moves.num_cuts * search.steps <= _TRY_ALL:
        search.try_all(moves.all_cuts())
    else:
        while search.finds_better(moves.around(search.best)):
            pass
    return Cut.of(search.best, plan, layers)


class _Search:
    """Cuts of one plan, the best so far, and the remaining effort."""

    def __init__(self, plan: Plan, layers: LayerCosts, limit: float | None, effort: float) -> None:
        self._layers, self._limit = layers, limit
        self._replay = CostReplay(plan)
        self.steps = self._replay.steps
        self._effort = effort * max(_EFFORT, _LEAST_CUTS * self.steps)
        self._orders: dict[Bounds, tuple[float, ...]] = {}
        self.best: Bounds = ()

    def try_all(self, cuts: Iterable[Bounds]) -> None:
        """Simulate cuts while effort is left."""
        for bounds in cuts:
            self._is_better(bounds)

    def finds_better(self, cuts: Iterable[Bounds]) -> bool:
        """Simulate cuts up to the first better one; return whether there is one."""
        return any(map(self._is_better, cuts))

    def _is_better(self, bounds: Bounds) -> bool:
        if bounds in self._orders or (self.best and self._effort < self.steps):
            return False
        self._effort -= self.steps
        self._orders[bounds] = order = self._order(bounds)
        if self.best and order >= self._orders[self.best]:
            return False
        self.best = bounds
        return True

    def _order(self, bounds: Bounds) -> tuple[float, ...]:
        """Return a sort key, the best first: excess over the limit, time, memory, balance."""
        costs = self._layers.cost_model(bounds)
        peak = self._replay.peak(costs)
        excess = 0.0 if self._limit is None else max(0.0, peak - self._limit)
        stages = zip(costs.forward, costs.whole_backward, strict=True)
        squares = sum((f + b) ** 2 for f, b in stages)
        # Rounded, so that the order of a sum does not decide.
        return tuple(map(rounded, (excess, self._replay.makespan(costs), peak, squares)))


def limit_error(cut: Cut, limit: float) -> ConfigError:
    """Return the error of pipeline.memory_limit; `cut` comes closest to it."""
    needed = math.ceil(cut.peak)
    return ConfigError(
        f"pipeline.memory_limit ({limit:,.0f}): schedule {cut.timeline.plan.name!r} holds at least "
        f"{needed:,} bytes of activations on its fullest rank, with the best cut for memory that "
        f"was found ({list(cut.bounds)}): set pipeline.memory_limit to {needed} or more, choose a "
        "schedule with less memory, or recompute activations"
    )

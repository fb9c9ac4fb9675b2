"""Divides the layers of a model into stages.  The result is a list of bounds:

    layers    0 1 2 | 3 4 | 5 6 7
    bounds    [0,     3,    5,     8]      stage s has layers bounds[s] to bounds[s + 1] - 1

Every layer is in exactly one stage and no stage is empty. If layers do not divide evenly, later
stages get more: under 1F1B an earlier stage holds the activations of more micro-batches.

The search for the shortest simulated step starts from cuts with even times, and from cuts of the
caller; then it moves layers between stages as long as the time falls.  If there are few cuts, it
tries all.  Its effort is counted in simulated instructions: the result is equal on every machine.

Some layers may be for one device only ("-" may be on any device):

    layers    cpu | cuda  -     -   | cuda cuda
    stages    cpu | cuda            | cuda
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise, product

from pipemega.errors import ConfigError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import CostModel, CostReplay, Timeline, simulate


def partition(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds with the lowest maximum cost of a stage, the most even ones of several.

    The slowest stage limits the throughput of a pipeline, so the maximum is minimised exactly. Ties
    are broken by the smallest sum of squares, then by the earliest bounds.

    Args:
        costs: the cost of each layer, in the order of the model; may be 0.
        num_parts: number of stages, at most the number of layers.

    Raises:
        ConfigError: fewer layers than stages, or a cost that is negative or not finite.
    """
    _check_enough_layers(len(costs), num_parts)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(
                f"pipeline.partition: the cost of layer {layer} is {cost}; a cost must be "
                f"a finite number, at least 0"
            )
    until = list(accumulate(_exact(costs), initial=0))
    return _most_even(until, num_parts, _bottleneck(until, num_parts))


def partition_at(costs: Sequence[float], splits: Sequence[int], num_parts: int) -> list[int]:
    """Return bounds as `partition`, with stages that start at the layers `splits`.

    With more parts than splits allow, the runs of layers between splits are divided further; with
    fewer, several runs are one part.

    Raises:
        ConfigError: as `partition`.
    """
    if not splits:
        return partition(costs, num_parts)
    marks = [0, *splits, len(costs)]
    runs = [costs[start:stop] for start, stop in pairwise(marks)]
    if num_parts <= len(runs):
        return [marks[bound] for bound in partition([sum(run) for run in runs], num_parts)]
    _check_enough_layers(len(costs), num_parts)
    parts = [partition(run, 1) for run in runs]
    for _ in range(num_parts - len(runs)):
        # One more part for the run with the slowest part.
        slowest = max(
            (run for run in range(len(runs)) if len(parts[run]) <= len(runs[run])),
            key=lambda run: max(sum(runs[run][i:j]) for i, j in pairwise(parts[run])),
        )
        parts[slowest] = partition(runs[slowest], len(parts[slowest]))
    inner = [start + bound for start, part in zip(marks, parts, strict=False) for bound in part[1:]]
    return [0, *inner]


def uniform(num_layers: int, num_parts: int) -> list[int]:
    """Return bounds with the same number of layers per stage; the last ones get the remainder.

    Raises:
        ConfigError: fewer layers than stages.
    """
    _check_enough_layers(num_layers, num_parts)
    each, rest = divmod(num_layers, num_parts)
    return [part * each + max(0, part - (num_parts - rest)) for part in range(num_parts + 1)]


def by_type(
    regex: str, names: Sequence[str], num_parts: int, splits: Sequence[int] = ()
) -> list[int]:
    """Return bounds that divide the layers whose class name matches evenly among the stages.

    Args:
        splits: see `partition_at`.
        regex: searched in the class name, case-insensitive; DeepSpeed's `type:block|layer`.
        names: the class name of each layer.

    Raises:
        ConfigError: `regex` is invalid, or matches fewer layers than there are stages.
    """
    _check_enough_layers(len(names), num_parts)
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"pipeline.partition 'type:{regex}' is not a regular expression: {error}"
        ) from error
    matches = [int(pattern.search(name) is not None) for name in names]
    if sum(matches) < num_parts:
        found = "no layer" if not any(matches) else f"only {sum(matches)} layers"
        raise ConfigError(
            f"pipeline.partition 'type:{regex}' matches {found}, but there are {num_parts} "
            f"stages; the classes are {', '.join(dict.fromkeys(names))}: "
            f"match more of them, or use fewer stages (mesh.pipeline)"
        )
    return partition_at(matches, splits, num_parts)


def explicit(bounds: Sequence[int], num_layers: int, num_parts: int) -> list[int]:
    """Return the bounds given by the user, after checking them.

    Raises:
        ConfigError: not one bound more than stages, first bound not 0, last bound not the number of
            layers, or an empty stage.
    """
    _check_enough_layers(num_layers, num_parts)
    given = f"pipeline.partition {list(bounds)}"
    if len(bounds) != num_parts + 1:
        raise ConfigError(
            f"{given} has {len(bounds)} bounds, but {num_parts} stages need {num_parts + 1}: the "
            f"first layer of each stage, then the number of layers"
        )
    if bounds[0] != 0:
        raise ConfigError(f"{given} starts at layer {bounds[0]}: begin with 0")
    if bounds[-1] != num_layers:
        raise ConfigError(f"{given} ends at {bounds[-1]}: the model has {num_layers} layers")
    for stage in range(num_parts):
        if bounds[stage + 1] <= bounds[stage]:
            raise ConfigError(
                f"{given} leaves stage {stage} without a layer: {bounds[stage + 1]} comes after "
                f"{bounds[stage]}, but bounds must increase"
            )
    return list(bounds)


def _check_enough_layers(num_layers: int, num_parts: int) -> None:
    if num_parts < 1:
        raise ConfigError(f"pipeline.partition: {num_parts} stages; give at least 1")
    if num_layers < num_parts:
        raise ConfigError(
            f"pipeline.partition: more stages than layers: {num_layers} layers cannot be divided "
            f"into {num_parts} stages without an empty one; lower mesh.pipeline to {num_layers} or "
            f"less, or add layers"
        )


def _exact(costs: Sequence[float]) -> list[int]:
    """Return the costs as integers of a common unit, so that sums are exact."""
    fractions = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _bottleneck(until: Sequence[int], num_parts: int) -> int:
    """Return the lowest possible maximum cost of a part.

    until[i] is the cost of the layers before i. The result equals the cost of some run of
    neighbouring layers; a binary search finds the lowest that fits.
    """
    layers = range(len(until))
    at_least = -(-until[-1] // num_parts)
    runs = {until[stop] - until[start] for start in layers for stop in layers[start + 1 :]}
    candidates = sorted(cost for cost in runs if cost >= at_least)
    return candidates[bisect_left(candidates, True, key=lambda cost: _fits(until, num_parts, cost))]


def _fits(until: Sequence[int], num_parts: int, limit: int) -> bool:
    """Return whether `num_parts` parts of cost at most `limit` can hold all layers."""
    start = 0
    for _ in range(num_parts):
        start = bisect_right(until, until[start] + limit) - 1
    return start == len(until) - 1


def _most_even(until: Sequence[int], num_parts: int, limit: int) -> list[int]:
    """Return the bounds of parts of cost at most `limit` with the smallest sum of squares.

    Dynamic programming: squares[i] is the smallest sum for the layers from i on, in as many parts
    as rounds so far.
    """
    num_layers = len(until) - 1
    squares: dict[int, int] = {num_layers: 0}
    rounds: list[dict[int, int]] = []  # per part from the last: its first layer -> its bound
    for _ in range(num_parts):
        best: dict[int, tuple[int, int]] = {}
        for stop, rest in squares.items():
            for start in range(stop - 1, -1, -1):
                if (cost := until[stop] - until[start]) > limit:
                    break
                found = (rest + cost * cost, stop)
                best[start] = min(best.get(start, found), found)
        squares = {start: total for start, (total, _) in best.items()}
        rounds.append({start: stop for start, (_, stop) in best.items()})
    bounds = [0]
    for bound_of in reversed(rounds):
        bounds.append(bound_of[bounds[-1]])
    return bounds


Devices = Sequence[str | None]


def partition_on_devices(
    costs: Sequence[float], layers: Devices, stages: Sequence[str], names: Sequence[str]
) -> list[int]:
    """Return the bounds with the lowest maximum cost of a stage, the most even ones of several.

    Args:
        costs: the cost of each layer.
        layers: the device of each layer; None: any.
        stages: the device of each stage.
        names: the names of the layers.

    Raises:
        ConfigError: no cut puts each layer on its device.
    """
    until = [*accumulate(costs, initial=0.0)]
    # best[i]: (maximum, sum of squares, bounds) of the layers before i in the stages so far.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for device in stages:
        following: dict[int, tuple[float, float, list[int]]] = {}
        for start, (most, squares, bounds) in best.items():
            for stop in range(start + 1, len(layers) + 1):
                if layers[stop - 1] not in (None, device):
                    break
                cost = until[stop] - until[start]
                found = max(most, cost), squares + cost * cost, [*bounds, stop]
                following[stop] = min(following.get(stop, found), found)
        best = following
    if len(layers) not in best:
        raise ConfigError(
            f"the layers cannot be cut into stages on these devices: the layers are on "
            f"{_runs(layers, names)}, and the stages on {', '.join(stages)}: give mesh.device a "
            f"device for each pipeline rank in the order of the layers, with at least one rank for "
            f"each change of device",
            on_every_rank=True,
        )
    return best[len(layers)][2]


def check_stage_devices(
    bounds: Sequence[int], layers: Devices, stages: Sequence[str], names: Sequence[str]
) -> None:
    """Check that no stage has a layer for another device.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        layers, stages, names: as for `partition_on_devices`.

    Raises:
        ConfigError: a stage has layers for two devices, or its rank has another device.
    """
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        given = {layer: layers[layer] for layer in range(start, stop) if layers[layer] is not None}
        first = next(iter(given), None)
        other = next((layer for layer in given if given[layer] != given[first or start]), None)
        if first is not None and other is not None:
            raise ConfigError(
                f"stage {stage} has layers on two devices: layer {first} ({names[first]}) on "
                f"{given[first]!r} and layer {other} ({names[other]}) on {given[other]!r}; a stage "
                f"is on one device: start a stage at each change of device, with more pipeline "
                f"ranks (mesh.pipeline) or other bounds (pipeline.partition)",
                on_every_rank=True,
            )
        if first is not None and given[first] != stages[stage]:
            raise ConfigError(
                f"layer {first} ({names[first]}) is for device {given[first]!r}, and its pipeline "
                f"rank is on {stages[stage]!r}: change mesh.device (it may be a list, one device "
                f"for each pipeline rank), the bounds in pipeline.partition, or the LayerSpec",
                on_every_rank=True,
            )


def changes_of_device(layers: Devices) -> list[int]:
    """Return the layers whose device differs from the device of the previous layer."""
    return [layer for layer, (a, b) in enumerate(pairwise(layers), 1) if a != b]


def _runs(layers: Devices, names: Sequence[str]) -> str:
    """Return "cpu (layer 0, Embedding), cuda (layers 1 to 8), any (layer 9, Linear)"."""
    marks = [0, *changes_of_device(layers), len(layers)]
    shown = []
    for start, stop in pairwise(marks):
        which = f"layer {start}, {names[start]}"
        if stop > start + 1:
            which = f"layers {start} to {stop - 1}"
        shown.append(f"{layers[start] or 'any device'} ({which})")
    return ", ".join(shown)


Bounds = tuple[int, ...]
"""Stage s is layers bounds[s] to bounds[s + 1] - 1."""

# Layers move between this number of the busiest ranks and of the least busy ones.
_RANKS = 4


class LayerMoves:
    """Cuts of one model into the stages of one placement.

    Args:
        rank_of_stage: for each stage, its pipeline rank.
        times: the time of each layer for one micro-batch.
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
        instruction: seconds that each F, I, W and B takes in addition to the seconds of its layers.
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
        costs: the costs of the stages.
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
    """Return the fastest cut of `plan` that was found; never slower than a cut in `starts`.

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

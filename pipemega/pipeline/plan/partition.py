"""Divides the layers of a model into stages.  The result is a list of bounds:

    layers    0 1 2 | 3 4 | 5 6 7
    bounds    [0,     3,    5,     8]      stage s has layers bounds[s] to bounds[s + 1] - 1

Every layer is in exactly one stage and no stage is empty. If layers do not divide evenly, later
stages get more: under 1F1B an earlier stage holds the activations of more micro-batches.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from pipemega.errors import ConfigError


def partition(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds with the lowest maximum cost of a stage, the most even ones of several.

    The slowest stage limits the throughput of a pipeline, so the maximum is minimised exactly. Ties
    are broken by the smallest sum of squares, then by the earliest bounds.

    Args:
        costs: of each layer, in the order of the model; may be 0.
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

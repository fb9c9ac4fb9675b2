"""How the layers of a model are cut into stages.  Bounds say where:

    layers    0 1 2 | 3 4 | 5 6 7
    bounds    [0,     3,    5,     8]      stage s is layers bounds[s] to bounds[s + 1] - 1

Every layer is in exactly one stage and no stage is empty, whichever way was chosen. Where layers
cannot be shared out evenly, the later stages get more: under 1F1B an earlier stage holds the
activations of more micro-batches.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from pipemega.errors import ConfigError


def partition(costs: Sequence[float], num_parts: int) -> list[int]:
    """The cut whose dearest part is as cheap as can be, and among those the most even one.

    The makespan of a pipeline goes by its slowest stage, so the bottleneck is what counts; it is
    exactly minimal. Of the cuts that share it, the one with the smallest sum of squares is taken,
    and of those the one with the earliest bounds.

    Args:
        costs: of each layer, in the order of the model; zero is allowed.
        num_parts: at most as many as layers.

    Raises:
        ConfigError: fewer layers than parts, or a cost that is negative or no number.
    """
    _check_enough_layers(len(costs), num_parts)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(
                f"pipeline.partition: the cost of layer {layer} is {cost}; a cost is a number "
                f"from 0 up"
            )
    until = list(accumulate(_exact(costs), initial=0))
    return _most_even(until, num_parts, _bottleneck(until, num_parts))


def uniform(num_layers: int, num_parts: int) -> list[int]:
    """The same number of layers per part; the last parts have one more if they do not divide.

    Raises:
        ConfigError: fewer layers than parts.
    """
    _check_enough_layers(num_layers, num_parts)
    each, rest = divmod(num_layers, num_parts)
    return [part * each + max(0, part - (num_parts - rest)) for part in range(num_parts + 1)]


def by_type(regex: str, names: Sequence[str], num_parts: int) -> list[int]:
    """Layers whose class name matches count 1, the others 0; each part gets equally many.

    Args:
        regex: searched in the name, whatever the case; `type:block|layer` of DeepSpeed.
        names: the class name of each layer.

    Raises:
        ConfigError: `regex` is none, or matches fewer layers than there are parts.
    """
    _check_enough_layers(len(names), num_parts)
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"pipeline.partition 'type:{regex}' is no regular expression: {error}"
        ) from error
    matches = [int(pattern.search(name) is not None) for name in names]
    if sum(matches) < num_parts:
        found = "no layer" if not any(matches) else f"only {sum(matches)} layers"
        raise ConfigError(
            f"pipeline.partition 'type:{regex}' matches {found}, and there are {num_parts} "
            f"stages to share them out to; the classes are {', '.join(dict.fromkeys(names))}: "
            f"match more of them, or use fewer stages (mesh.pipeline)"
        )
    return partition(matches, num_parts)


def explicit(bounds: Sequence[int], num_layers: int, num_parts: int) -> list[int]:
    """The bounds as the user gave them, once they are proven.

    Raises:
        ConfigError: they are not as many as the stages and one, do not start at 0, do not end at
            the last layer, or leave a stage empty.
    """
    _check_enough_layers(num_layers, num_parts)
    given = f"pipeline.partition {list(bounds)}"
    if len(bounds) != num_parts + 1:
        raise ConfigError(
            f"{given} has {len(bounds)} bounds, and {num_parts} stages have {num_parts + 1}: the "
            f"first layer of each stage, and at the end the number of layers"
        )
    if bounds[0] != 0:
        raise ConfigError(f"{given} starts at layer {bounds[0]}: begin with 0")
    if bounds[-1] != num_layers:
        raise ConfigError(f"{given} ends at {bounds[-1]}: the model has {num_layers} layers")
    for stage in range(num_parts):
        if bounds[stage + 1] <= bounds[stage]:
            raise ConfigError(
                f"{given} leaves stage {stage} without a layer: {bounds[stage + 1]} comes after "
                f"{bounds[stage]}, and bounds must rise"
            )
    return list(bounds)


def _check_enough_layers(num_layers: int, num_parts: int) -> None:
    if num_parts < 1:
        raise ConfigError(f"pipeline.partition: {num_parts} stages; there is at least 1")
    if num_layers < num_parts:
        raise ConfigError(
            f"pipeline.partition: more stages than layers: {num_layers} layers cannot be cut into "
            f"{num_parts} stages without an empty one; lower mesh.pipeline to {num_layers} or "
            f"less, or add layers"
        )


def _exact(costs: Sequence[float]) -> list[int]:
    """The same costs in a unit so small that all are whole numbers, so that no sum rounds."""
    fractions = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _bottleneck(until: Sequence[int], num_parts: int) -> int:
    """The least cost that no part need exceed; until[i] is the cost of the layers before i.

    It is the cost of some run of neighbouring layers, so those are searched, by halves.
    """
    layers = range(len(until))
    at_least = -(-until[-1] // num_parts)
    runs = {until[stop] - until[start] for start in layers for stop in layers[start + 1 :]}
    candidates = sorted(cost for cost in runs if cost >= at_least)
    return candidates[bisect_left(candidates, True, key=lambda cost: _fits(until, num_parts, cost))]


def _fits(until: Sequence[int], num_parts: int, limit: int) -> bool:
    """Whether `num_parts` parts of at most `limit` take all layers, each filled to the brim."""
    start = 0
    for _ in range(num_parts):
        start = bisect_right(until, until[start] + limit) - 1
    return start == len(until) - 1


def _most_even(until: Sequence[int], num_parts: int, limit: int) -> list[int]:
    """The cut into parts of at most `limit` with the smallest sum of squares, by induction.

    squares[i] is that sum for the layers from i on, in as many parts as the round counts.
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

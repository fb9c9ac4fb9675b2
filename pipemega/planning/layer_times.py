"""Measured times of layers, from the measured times of stages."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.stage_cut import LayerCosts


def measured_layers(
    counted: LayerCosts, bounds: Sequence[int], costs: CostModel, *, split: bool
) -> LayerCosts:
    """Return the costs of layers with the times of measured stages.

    The time of each stage is divided among its layers in proportion to their counted times.

    Args:
        counted: by the fixed table of rates.
        bounds: of the measured stages.
        costs: of the measured stages.
        split: I and W were measured; otherwise the counted times divide the time of B.
    """

    def by_layer(times: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            time * share
            for time, (start, stop) in zip(times, pairwise(bounds), strict=True)
            for share in _shares(shares[start:stop])
        )

    inputs, weights = list(costs.backward_input), list(costs.backward_weight)
    if not split:
        for number, (start, stop) in enumerate(pairwise(bounds)):
            i, w = sum(counted.backward_input[start:stop]), sum(counted.backward_weight[start:stop])
            share = i / (i + w) if i + w else 0.5
            inputs[number] = share * costs.whole_backward[number]
            weights[number] = (1 - share) * costs.whole_backward[number]
    return replace(
        counted,
        forward=by_layer(costs.forward, counted.forward),
        backward_input=by_layer(inputs, counted.backward_input),
        backward_weight=by_layer(weights, counted.backward_weight),
        backward=by_layer(costs.whole_backward, counted.backward),
        message=costs.message,
    )


def _shares(times: Sequence[float]) -> list[float]:
    total = sum(times)
    return [time / total if total else 1 / len(times) for time in times]

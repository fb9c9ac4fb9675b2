"""Measured times of layers, from the measured times of stages."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.stage_cut import LayerCosts

# Standard deviations: of the measured time of a stage, as a part of the mean of the stages; and of
# the ratio of measured to counted time of a kind of layer, as a part of the ratio of the model.
_NOISE, _SPREAD = 0.02, 0.2
_LEAST_RATIO = 0.1


def measured_layers(
    counted: LayerCosts, bounds: Sequence[int], costs: CostModel, *, split: bool
) -> LayerCosts:
    """Return the costs of layers with the times of measured stages.

    The time of each stage is divided among its layers in proportion to their likely times: layers
    with equal counted times take about as long in all stages, so stages of blocks alone show how
    much of the last stage is the head.

    Args:
        counted: by the fixed table of rates; `instruction`, but at most a tenth of the mean F, is
            taken off the measured times.
        bounds: of the measured stages.
        costs: of the measured stages.
        split: I and W were measured; otherwise the counted times divide the time of B.
    """
    counts = zip(counted.forward, counted.backward_input, counted.backward_weight, strict=True)
    numbers: dict[tuple[float, ...], int] = {}
    kinds = [numbers.setdefault(count, len(numbers)) for count in counts]

    def by_layer(times: Sequence[float], counted: Sequence[float]) -> tuple[float, ...]:
        times = [max(0.0, time - instruction) for time in times]
        likely = _likely_times(times, counted, kinds, bounds)
        return tuple(
            time * share
            for time, (start, stop) in zip(times, pairwise(bounds), strict=True)
            for share in _shares(likely[start:stop])
        )

    inputs, weights = list(costs.backward_input), list(costs.backward_weight)
    if not split:
        for number, (start, stop) in enumerate(pairwise(bounds)):
            i, w = sum(counted.backward_input[start:stop]), sum(counted.backward_weight[start:stop])
            share = i / (i + w) if i + w else 0.5
            inputs[number] = share * costs.whole_backward[number]
            weights[number] = (1 - share) * costs.whole_backward[number]
    mean = sum(costs.forward) / len(costs.forward)
    instruction = min(counted.instruction, 0.1 * mean)
    return replace(
        counted,
        forward=by_layer(costs.forward, counted.forward),
        backward_input=by_layer(inputs, counted.backward_input),
        backward_weight=by_layer(weights, counted.backward_weight),
        backward=by_layer(costs.whole_backward, counted.backward),
        message=costs.message,
        instruction=instruction,
    )


def _likely_times(
    times: Sequence[float], counted: Sequence[float], kinds: Sequence[int], bounds: Sequence[int]
) -> Sequence[float]:
    """Return the most likely times of the layers, if equal kinds have equal times."""
    if not sum(times) or not sum(counted):
        return counted
    ratio, mean = sum(times) / sum(counted), sum(times) / len(times)
    work = np.zeros((len(times), max(kinds) + 1))  # of each kind in each stage
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        np.add.at(work[stage], kinds[start:stop], counted[start:stop])
    # By their work, so that kinds which only occur together keep the ratio of their counted times.
    weights = np.sqrt(work.sum(0) / work.sum() * work.shape[1]) / _SPREAD
    equations = [work * ratio / mean / _NOISE, np.diag(weights)]
    values = [np.array(times) / mean / _NOISE, weights]
    ratios, *_ = np.linalg.lstsq(np.concatenate(equations), np.concatenate(values))
    ratios = ratios.clip(_LEAST_RATIO)
    return [count * float(ratios[kind]) for count, kind in zip(counted, kinds, strict=True)]


def _shares(times: Sequence[float]) -> list[float]:
    total = sum(times)
    return [time / total if total else 1 / len(times) for time in times]

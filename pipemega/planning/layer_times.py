"""Measured times of layers, from the measured times of stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipemega.pipeline.plan.costs import CostModel
from pipemega.planning.meta_model import StageLayout


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds of each layer for one micro-batch, and of a message.

    They give the times of the stages of any cut of the same model.

    Args:
        forward, backward_input, backward_weight, backward: of F, I, W and B, for each layer.
        message: from the end of a step to the start of the step on another rank that uses it.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...]
    message: float

    @classmethod
    def of_stages(cls, costs: CostModel, layout: StageLayout, *, split: bool) -> "LayerTimes":
        """Divide the times of each stage among its layers, in proportion to their FLOPs.

        Args:
            costs: measured, of the stages of `layout`.
            layout: counted with split backward.
            split: I and W were measured; otherwise their counted FLOPs divide the time of B.
        """
        inputs, weights = list(costs.backward_input), list(costs.backward_weight)
        if not split:
            for number, stage in enumerate(layout.costs):
                _, i, w = stage.flops
                share = i / (i + w) if i + w else 0.5
                inputs[number] = share * costs.whole_backward[number]
                weights[number] = (1 - share) * costs.whole_backward[number]

        def by_layer(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                time * share
                for time, stage in zip(times, layout.costs, strict=True)
                for share in _shares(stage.layer_flops)
            )

        return cls(
            by_layer(costs.forward),
            by_layer(inputs),
            by_layer(weights),
            by_layer(costs.whole_backward),
            costs.message,
        )

    def cost_model(self, layout: StageLayout) -> CostModel:
        """Return the times of the stages of `layout`; without memory."""

        def by_stage(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(sum(times[start:stop]) for start, stop in pairwise(layout.bounds))

        return CostModel(
            by_stage(self.forward),
            by_stage(self.backward_input),
            by_stage(self.backward_weight),
            by_stage(self.backward),
            message=self.message,
        )


def _shares(flops: Sequence[float]) -> list[float]:
    total = sum(flops)
    return [f / total if total else 1 / len(flops) for f in flops]

"""Costs of the stages and layers of a model, counted on the meta device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.mixed_precision import Precision
from pipemega.pipeline.messages import Header
from pipemega.pipeline.module import BuildOptions, PipelineModule, Stage, build_stages
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.layer_moves import Bounds
from pipemega.pipeline.plan.stage_cut import LayerCosts
from pipemega.pipeline.spec import LayerSpec
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward
from pipemega.profiling.meta_costs import Probe, StageCosts
from pipemega.profiling.meta_kernels import DeviceType
from pipemega.profiling.tensor_meter import unmetered
from pipemega.random import preserve_rng


class ModelTotals(NamedTuple):
    """Sums over all layers, for one micro-batch; they do not depend on the cut.

    Args:
        forward, seconds: of F, and of F, I and W, by the fixed table of rates.
        flops, kernels: of F, I and W.
    """

    forward: float
    seconds: float
    flops: float
    kernels: int


@dataclass(frozen=True)
class _CostKey:
    """Everything that determines the costs of a stage."""

    specs: Sequence[LayerSpec] = field(compare=False)
    entering: Header
    splits_backward: bool
    is_first: bool
    is_last: bool
    device: DeviceType

    def same_as(self, other: "_CostKey") -> bool:
        return (
            self == other
            and len(self.specs) == len(other.specs)
            and all(map(_builds_same_layer, self.specs, other.specs))
        )


class StageCounts:
    """Counts the stages of one model, and caches the results: equal stages run once.

    Args:
        net: the model.
        probe: measures a stage.
        options: how layers are built; on the meta device.
        precision: of the parameters.
        entering: header of the inputs of a micro-batch.
    """

    def __init__(
        self,
        net: PipelineModule,
        probe: Probe,
        options: BuildOptions,
        precision: Precision,
        entering: Header,
    ) -> None:
        self._net, self._probe, self._options = net, probe, options
        self._precision, self._entering = precision, entering
        self._costs: list[tuple[_CostKey, tuple[StageCosts, Header]]] = []

    @cached_property
    def of_layers(self) -> LayerCosts:
        """The costs of each layer by the fixed table of rates; each distinct layer runs once."""
        interval, stages = max(1, self._options.checkpoint_interval), self._layers
        forward, inputs, weights = zip(*(stage.seconds for stage in stages), strict=True)
        return LayerCosts(
            forward,
            inputs,
            weights,
            backward=tuple(map(sum, zip(inputs, weights, strict=True))),
            # Each activation checkpoint of several layers stores one input.
            held=tuple(stage.held / interval for stage in stages),
            kept=tuple(float(stage.kept) for stage in stages),
        )

    @cached_property
    def totals(self) -> ModelTotals:
        """The sums over all layers."""
        return ModelTotals(
            math.fsum(layer.seconds[0] for layer in self._layers),
            math.fsum(sum(layer.seconds) for layer in self._layers),
            math.fsum(sum(layer.flops) for layer in self._layers),
            sum(sum(layer.kernels) for layer in self._layers),
        )

    @property
    def message_bytes(self) -> float:
        """The mean over the layers of what one sends to the next."""
        return math.fsum(layer.message for layer in self._layers) / len(self._layers)

    @cached_property
    def _layers(self) -> tuple[StageCosts, ...]:
        return self.of_stages(tuple(range(len(self._net) + 1)), splits_backward=True)

    def of_stages(
        self, bounds: Bounds, splits_backward: bool, devices: Sequence[DeviceType] = ()
    ) -> tuple[StageCosts, ...]:
        """Return the costs of stages; equal stages run once.

        Args:
            devices: of each stage, if they differ.

        Raises:
            PipelineError: a layer failed, for example because it reads a tensor value.
        """
        costs: list[StageCosts] = []
        entering = self._entering
        last = len(bounds) - 2
        with preserve_rng(), unmetered():
            for number in range(last + 1):
                specs = self._net.specs[bounds[number] : bounds[number + 1]]
                key = _CostKey(
                    specs,
                    entering,
                    splits_backward,
                    is_first=number == 0,
                    is_last=number == last,
                    device=devices[number] if devices else self._probe.device,
                )
                stage, entering = self._costs_of(key, partial(self._build, bounds, number))
                costs.append(stage)
        return tuple(costs)

    def _build(self, bounds: Bounds, number: int) -> tuple[Stage, GradientBuffer]:
        """Build one stage as in a run, with the buffer of its gradients."""
        (stage,) = build_stages(self._net, bounds, [number], self._options).values()
        named = [*stage.logical_names().items()]
        self._precision.cast_parameters(named)
        return stage, GradientBuffer(named, dtype=self._precision.accumulation_dtype)

    def _costs_of(
        self, key: _CostKey, build: Callable[[], tuple[Stage, GradientBuffer]]
    ) -> tuple[StageCosts, Header]:
        """Return the costs of a stage and the header of its output; cached by key."""
        for known, result in self._costs:
            if known.same_as(key):
                return result
        stage, gradients = build()
        weights = None
        if key.splits_backward:
            weights = WeightGradQueue(gradients)
            enable_split_backward([stage], weights)
        probe = replace(self._probe, device=key.device)
        result = probe.measure(stage, key.entering, gradients, weights, key.is_last)
        self._costs.append((key, result))
        return result


def stage_times(stages: Sequence[StageCosts], unit: float = 1.0) -> CostModel:
    """Return the costs of stages by the fixed table of rates.

    Args:
        unit: of the times, in seconds of the table.
    """
    forward, inputs, weights = (
        tuple(stage.seconds[kind] / unit for stage in stages) for kind in range(3)
    )
    return CostModel(
        forward,
        inputs,
        weights,
        activation=tuple(float(stage.held) for stage in stages),
        kept=tuple(float(stage.kept) for stage in stages),
    )


def _builds_same_layer(one: LayerSpec, other: LayerSpec) -> bool:
    """Return True only if both specs are certain to build equal layers."""
    if one is other:
        return True
    if type(one) is not type(other) or one.already_built:
        return False
    if one.equality_key is not None:
        return one.equality_key == other.equality_key
    if getattr(one, "forward_fn", None) is not getattr(other, "forward_fn", None):
        return False
    if one.typename is not other.typename:
        return False
    if len(one.args) != len(other.args) or one.kwargs.keys() != other.kwargs.keys():
        return False
    pairs = [
        *zip(one.args, other.args, strict=True),
        *((value, other.kwargs[key]) for key, value in one.kwargs.items()),
    ]
    # "is True": == on tensors returns a tensor.
    return all(a is b or (a == b) is True for a, b in pairs)

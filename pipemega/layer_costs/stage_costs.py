"""Counts the bytes and FLOPs of stages and layers for one micro-batch, on the meta device.

The stage is built, cast and checkpointed as in a run. It is run like the executor runs it: after
the forward only the autograd graph of the output is kept, and of the input only what backward
needs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from pipemega.distributed.torch_versions import gradient_edge
from pipemega.errors import PipelineError, code_of_user
from pipemega.layer_costs.tensor_meter import (
    DeviceKernels,
    DeviceType,
    Fp8Counter,
    KernelKind,
    KernelRates,
    TensorMeter,
    unmetered,
)
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.mixed_precision import Precision
from pipemega.pipeline.activation_offload import is_movable, offloads_from, storages_of
from pipemega.pipeline.executor import run_backward
from pipemega.pipeline.messages import (
    Header,
    InputGradient,
    TensorMeta,
    collect_gradients,
    tensors_of,
)
from pipemega.pipeline.microbatch_loss import Loss, weighted_loss
from pipemega.pipeline.model.fp8_linears import enable_fp8
from pipemega.pipeline.model.module import BuildOptions, PipelineModule, RngKey, Stage, build_stages
from pipemega.pipeline.model.spec import LayerSpec
from pipemega.pipeline.plan.fill_waits import NO_WAITS, Waits
from pipemega.pipeline.plan.partition import Bounds, LayerCosts
from pipemega.pipeline.plan.simulate import CostModel
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.random import preserve_rng
from pipemega.tensor_parallel.deferred_logits import defer_logits
from pipemega.tensor_parallel.linear_cross_entropy import pending_bytes

# Dropout needs a key; the random numbers do not change the costs.
_RNG_KEY = RngKey(0, 0, 0)
_MICROBATCH = "0"  # name under which the weight half is queued


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one micro-batch, on one rank.

    Args:
        input: bytes of the input as received.
        held: bytes kept from the end of F to B, including what is kept of the input.
        output: bytes kept in addition until the output has been sent.
        message: bytes sent to the next stage; 0 for the last stage.
        gradient_in, gradient_out: bytes of the gradient of the output and of the input.
        kept: bytes kept from I to W.
        kept_gradient: the bytes of `gradient_out` that are in `kept` too: W uses that gradient.
        working: temporary bytes, beyond those in use at the start: during F, B or I, and W.
        flops: FLOPs of F, of B or I, of W.
        kernels: number of kernels of F, of B or I, of W.
        seconds: seconds of F, of B or I, of W, by the fixed table of `kernel_rates`.
        held_once: the bytes of `held` that only one micro-batch keeps at a time: the weight
            gradient of such a head.
        whole_working: if backward is split: temporary bytes during a B; None: not counted.
        moved: the bytes of `held` that move to host memory if there is time; see
            `pipeline.activation_offload`.
        kinds: the time without fp8 by kind of kernel.
        seconds_without_fp8: seconds of F, I and W if products in fp8 were in bf16.
        exchanged: bytes that a rank sends to the others of the expert axis, if all experts get
            equally many tokens.
        waits: the exchanges of these tokens.
    """

    input: int
    held: int
    output: int
    message: int
    gradient_in: int
    gradient_out: int
    kept: int
    working: tuple[int, int, int]
    flops: tuple[float, float, float]
    kernels: tuple[int, int, int]
    seconds: tuple[float, float, float]
    kept_gradient: int = 0
    held_once: int = 0
    whole_working: int | None = None
    moved: int = 0
    kinds: Mapping[KernelKind, float] = field(default_factory=dict, compare=False)
    seconds_without_fp8: float = 0.0
    exchanged: int = 0
    waits: Waits = NO_WAITS


@dataclass(frozen=True)
class Probe:
    """Measures stages of one model.

    Args:
        device: the device whose kernels are assumed.
        loss: runs after the last stage.
        labels: the labels of one micro-batch, for the loss.
        cast_inputs: applied to the input of the first stage.
        rates: the kernel rates of the device that the times are for.
        offloads: saved activations move from devices to host memory.
    """

    device: DeviceType
    loss: Loss
    labels: Any
    cast_inputs: Callable[[Any], Any]
    rates: KernelRates
    offloads: bool = False

    def measure(
        self,
        stage: Stage,
        entering: Header,
        gradients: GradientBuffer,
        weights: WeightGradQueue | None,
        is_last: bool,
    ) -> tuple[StageCosts, Header]:
        """Return the costs of `stage` and the header of its output, which the next stage receives.

        Args:
            entering: header of the input.
            gradients: the buffer that accumulates the gradients of the stage.
            weights: the queue for weight gradients if the plan splits backward into I and W.
        """
        stage.train()
        existing = [*stage.parameters(), *stage.buffers(), *gradients.flats.values()]
        existing += tensors_of(self.labels)

        def measure(where: AbstractContextManager[Any]) -> tuple[StageCosts, Header]:
            meter = TensorMeter(existing, self.rates)
            with where, DeviceKernels(self.device), meter:
                run = _StageRun(self, stage, meter, weights, storages_of(existing))
                return run.measure(entering, is_last)

        try:
            result = measure(nullcontext())
        except PipelineError:
            # The stage changes inputs, which it copies from now on; or its layers create tensors
            # and name no device.
            copies = stage.input_guard.copies
            return measure(nullcontext() if copies else torch.device("meta"))
        # The run has shown whether the stage changes inputs that it has to copy before.
        return measure(nullcontext()) if stage.input_guard.copies else result


@dataclass
class _LiveTensors:
    """Tensors of a micro-batch that the executor keeps, dropped where the executor drops them."""

    x: Any
    output: Any = None
    inputs: list[InputGradient] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    shapes: list[TensorMeta] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class _Metered(NamedTuple):
    """Costs of one instruction: bytes beyond those in use before, FLOPs, kernels, seconds.

    Args:
        waits: seconds and number of its exchanges.
    """

    working: int
    flops: float
    kernels: int
    seconds: float
    waits: tuple[float, int]


class _StageRun:
    """Runs F and B, or F, I and W, of one micro-batch."""

    def __init__(
        self,
        probe: Probe,
        stage: Stage,
        meter: TensorMeter,
        weights: WeightGradQueue | None,
        fixed: set[int],
    ) -> None:
        self._probe, self._stage, self._meter, self._weights = probe, stage, meter, weights
        # Storages that do not move, and the sizes of those that do.
        self._fixed, self._moved = fixed, dict[int, int]()

    def measure(self, entering: Header, is_last: bool) -> tuple[StageCosts, Header]:
        """Return the costs and the header of the output."""
        meter, first = self._meter, self._stage.number == 0
        live = _LiveTensors(_empty(entering))
        arrived = meter.now
        moves = self._probe.offloads and offloads_from(self._probe.device)
        if first:
            self._fixed |= storages_of(tensors_of(live.x))
        with saved_tensors_hooks(self._note, lambda t: t) if moves else nullcontext():
            header, forward = self._metered(lambda: self._forward(live, is_last))
        with_output = meter.now
        live.output = None
        output = with_output - meter.now
        if not first:
            # The engine keeps the inputs of the first stage until the end of the step.
            live.x = None
        held = meter.now
        held_once = sum(pending_bytes(parameter) for parameter in self._stage.parameters())
        live.gradients = [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in live.shapes]
        gradient_in = meter.now - held
        _, backward = self._metered(lambda: self._backward(live))
        gradient_out = sum(g.value.nbytes for g in live.inputs if g.value is not None)
        live.x, with_gradient = None, meter.now
        live.inputs = []
        kept = meter.now
        _, weight = self._metered(self._weight_half)
        costs = StageCosts(
            input=arrived,
            held=held,
            output=0 if is_last else output,
            message=0 if is_last else sum(_sizes(header)),
            gradient_in=0 if is_last else gradient_in,
            gradient_out=0 if first else gradient_out,
            kept=kept,
            working=(forward.working, backward.working, weight.working),
            flops=(forward.flops, backward.flops, weight.flops),
            kernels=(forward.kernels, backward.kernels, weight.kernels),
            seconds=(forward.seconds, backward.seconds, weight.seconds),
            kept_gradient=0 if first else max(0, gradient_out - (with_gradient - kept)),
            held_once=held_once,
            moved=sum(self._moved.values()),
            kinds=dict(meter.kinds),
            seconds_without_fp8=meter.seconds_without_fp8,
            exchanged=meter.exchanged,
            waits=Waits(
                forward.waits[0], backward.waits[0], forward.waits[1], backward.waits[1],
                weight.seconds,
            ),
        )  # fmt: skip
        return costs, header

    def _note(self, tensor: Tensor) -> Tensor:
        """Note the size of a saved tensor that moves."""
        if is_movable(tensor, self._fixed):
            storage = tensor.untyped_storage()
            self._moved[storage._cdata] = storage.nbytes()
        return tensor

    def _metered(self, work: Callable[[], Any]) -> tuple[Any, "_Metered"]:
        """Return the result of `work` and its costs."""
        meter = self._meter
        before, flops, kernels, seconds = meter.now, meter.flops, meter.kernels, meter.seconds
        waited, exchanges = meter.kinds["exchanges"], meter.exchanges
        meter.reset_peak()
        result = work()
        return result, _Metered(
            meter.peak - before,
            meter.flops - flops,
            meter.kernels - kernels,
            meter.seconds - seconds,
            (meter.kinds["exchanges"] - waited, meter.exchanges - exchanges),
        )

    def _forward(self, live: _LiveTensors, is_last: bool) -> Header:
        if self._stage.number == 0:
            x = self._probe.cast_inputs(live.x)
        else:
            x, live.inputs = collect_gradients(live.x)
        loss = self._probe.loss if is_last else None
        # All labels count.
        labels = self._probe.labels
        counted = labels.numel() if isinstance(labels, Tensor) else None
        with defer_logits(loss, self._stage.last_layer, counted=counted):
            output = self._stage(x, _RNG_KEY)
        header = Header.of(output)
        if loss is not None:
            with code_of_user("the loss failed on the meta device", PipelineError):
                output = loss(output, self._probe.labels)
            output = weighted_loss(output).sum
        live.output = output
        differentiable = [t for t in tensors_of(output) if t.requires_grad]
        live.edges = [gradient_edge(t) for t in differentiable]
        live.shapes = [TensorMeta.of(t) for t in differentiable]
        return header

    def _backward(self, live: _LiveTensors) -> None:
        weights = self._weights
        with nullcontext() if weights is None else weights.defer(_MICROBATCH):
            if live.edges:
                with code_of_user(self._backward_failed, PipelineError):
                    run_backward(live.edges, live.gradients)
        live.edges, live.gradients = [], []

    @property
    def _backward_failed(self) -> str:
        stage = self._stage
        names = [stage.name_of(position) for position in range(stage.start, stage.stop)]
        return f"the backward of {', '.join(dict.fromkeys(names))} failed on the meta device"

    def _weight_half(self) -> None:
        if self._weights is not None:
            self._weights.run(_MICROBATCH)


def _sizes(header: Header) -> list[int]:
    """Return the bytes of each tensor of a message."""
    return [torch.Size(t.shape).numel() * t.dtype.itemsize for t in header.tensors]


def _empty(header: Header) -> Any:
    """Return an uninitialised message with this header, on the meta device."""
    tensors = [
        torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)
        for t in header.tensors
    ]
    return header.fill(tensors)


class ModelTotals(NamedTuple):
    """Sums over all layers, for one micro-batch; they do not depend on the cut.

    Args:
        forward: seconds of F, by the fixed table of rates.
        seconds: seconds of the kernels of F, I and W without fp8, by the same table.
        flops, kernels: FLOPs and number of kernels of F, I and W.
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
        precision: the precision of the parameters.
        entering: header of the inputs of a micro-batch.
        fp8: the products of linears in fp8; None: in the dtype of the run.
    """

    def __init__(
        self,
        net: PipelineModule,
        probe: Probe,
        options: BuildOptions,
        precision: Precision,
        entering: Header,
        fp8: Fp8Counter | None = None,
    ) -> None:
        self._net, self._probe, self._options, self._fp8 = net, probe, options, fp8
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
            math.fsum(
                layer.seconds_without_fp8 - layer.kinds.get("exchanges", 0.0)
                for layer in self._layers
            ),
            math.fsum(sum(layer.flops) for layer in self._layers),
            sum(sum(layer.kernels) for layer in self._layers),
        )

    @property
    def waits(self) -> tuple[Waits, ...]:
        """The exchanges of each layer."""
        return tuple(layer.waits for layer in self._layers)

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
            devices: the device of each stage, if they differ.

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
        stages = build_stages(self._net, bounds, [number], self._options)
        (stage,) = stages.values()
        named = [*stage.logical_names().items()]
        self._precision.cast_parameters(named)
        enable_fp8(self._net, stages, self._fp8)
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


def stage_times(
    stages: Sequence[StageCosts], unit: float = 1.0, *, fills_waits: bool = False
) -> CostModel:
    """Return the costs of stages by the fixed table of rates.

    Args:
        unit: the unit of the times, in seconds of the table.
        fills_waits: parts of W run within exchanges.
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
        waits=tuple(stage.waits for stage in stages) if fills_waits else None,
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


@dataclass(frozen=True, eq=False)
class Sample:
    """Inputs and labels of one micro-batch, on the meta device.

    Args:
        label_ranks: the pipeline ranks that have labels; None: every rank.
    """

    inputs: Any
    labels: Any
    label_ranks: frozenset[int] | None = None

    @classmethod
    def like(cls, inputs: Any, labels: Any) -> "Sample":
        """Return a sample with the shapes of real tensors."""
        return cls(_to_meta(inputs), _to_meta(labels))


def _to_meta(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), tree)

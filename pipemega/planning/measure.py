"""What one stage costs for one micro-batch: bytes and FLOPs, by running it on the meta device.

The stage is the real one, cast and checkpointed as it will be, and run as the executor runs it: of
the output only the graph stays, of the input what wants a gradient.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipemega.gradients import GradientBuffer
from pipemega.pipeline.messages import Header, TensorMeta
from pipemega.pipeline.module import Draws, Loss, Stage
from pipemega.pipeline.split_backward import WeightGradients
from pipemega.planning.kernels import DeviceType, KernelsOf
from pipemega.planning.meter import Meter

# The numbers that dropout draws do not matter; that it draws does.
_DRAWS = Draws(0, 0, 0)
_SPLIT = "the second half"


@dataclass(frozen=True)
class StageCosts:
    """One stage and one micro-batch, on one rank.

    Args:
        input: bytes of what enters, as it arrives.
        held: bytes from the end of F to B, what is kept of the input among them.
        output: bytes that live beside those until the output has been sent.
        message: bytes of what goes on to the next stage; 0 for the last.
        gradient_in, gradient_out: bytes of the gradients of output and input.
        kept: bytes between I and W.
        working: bytes beyond what is held at the start: during F, during B or I, during W.
        flops: of F, of B or I, of W.
        layer_flops: of the forward of each layer.
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
    layer_flops: tuple[float, ...]


@dataclass(frozen=True)
class Probe:
    """How stages are measured.

    Args:
        device: whose kernels are taken.
        loss: closes the last stage.
        labels: of a micro-batch, for the loss.
        cast_inputs: applied to what enters the first stage.
    """

    device: DeviceType
    loss: Loss
    labels: Any
    cast_inputs: Callable[[Any], Any]

    def measure(
        self,
        stage: Stage,
        entering: Header,
        gradients: GradientBuffer,
        weights: WeightGradients | None,
        is_last: bool,
    ) -> tuple[StageCosts, Header]:
        """The costs of `stage`, and what its output looks like to the next.

        Args:
            entering: what arrives.
            gradients: where the stage's gradients are summed up.
            weights: where its weight halves wait, if the plan has such.
        """
        stage.train()
        there = [*stage.parameters(), *stage.buffers(), *gradients.flats.values()]
        there += _tensors(self.labels)
        with KernelsOf(self.device), Meter(there) as meter:
            return _Run(self, stage, meter, weights).all(entering, is_last)


class _Run:
    """F and B, or F, I and W, of one micro-batch."""

    def __init__(
        self, probe: Probe, stage: Stage, meter: Meter, weights: WeightGradients | None
    ) -> None:
        self._probe, self._stage, self._meter, self._weights = probe, stage, meter, weights

    def all(self, entering: Header, is_last: bool) -> tuple[StageCosts, Header]:
        """Runs them. What the executor lets go of, `flying` lets go of at the same points."""
        meter, first = self._meter, self._stage.number == 0
        flying = _Flying(_fresh(entering))
        arrived = meter.now
        layers = _LayerFlops(self._stage, meter)
        leaving, forward_working, forward_flops = self._during(
            lambda: self._forward(flying, is_last)
        )
        layers.close()
        with_output = meter.now
        flying.output = None
        extra = with_output - meter.now
        if not first:
            # The micro-batches of the first stage stay to the end of the step.
            flying.x = None
        held = meter.now
        flying.gradients = [
            torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in flying.shapes
        ]
        gradient_in = meter.now - held
        _, working, backward_flops = self._during(lambda: self._backward(flying))
        gradient_out = sum(t.grad.nbytes for t in flying.inputs if t.grad is not None)
        flying.x, flying.inputs = None, []
        kept = meter.now
        _, weight_working, weight_flops = self._during(self._weight_half)
        costs = StageCosts(
            input=arrived,
            held=held,
            output=0 if is_last else extra,
            message=0 if is_last else sum(_sizes(leaving)),
            gradient_in=0 if is_last else gradient_in,
            gradient_out=0 if first else gradient_out,
            kept=kept,
            working=(forward_working, working, weight_working),
            flops=(forward_flops, backward_flops, weight_flops),
            layer_flops=layers.counts,
        )
        return costs, leaving

    def _during(self, work: Callable[[], Any]) -> tuple[Any, int, float]:
        """What `work` gives, the bytes it needs beyond what is alive now, its FLOPs."""
        before, counted = self._meter.now, self._meter.flops
        self._meter.restart()
        result = work()
        return result, self._meter.peak - before, self._meter.flops - counted

    def _forward(self, flying: "_Flying", is_last: bool) -> Header:
        x = self._probe.cast_inputs(flying.x) if self._stage.number == 0 else flying.x
        output = self._stage(x, _DRAWS)
        header = Header.of(output)
        if is_last:
            loss = self._probe.loss(output, self._probe.labels)
            output = loss[0] if isinstance(loss, tuple) else loss
        flying.output = output
        wanted = [t for t in _tensors(output) if t.requires_grad]
        flying.inputs = [t for t in _tensors(x) if t.requires_grad]
        flying.edges = [get_gradient_edge(t) for t in wanted]
        flying.shapes = [TensorMeta.of(t) for t in wanted]
        return header

    def _backward(self, flying: "_Flying") -> None:
        halves: AbstractContextManager[None] = (
            nullcontext() if self._weights is None else self._weights.putting_off(_SPLIT)
        )
        with halves:
            if flying.edges:
                torch.autograd.backward(flying.edges, flying.gradients)
        flying.edges, flying.gradients = [], []

    def _weight_half(self) -> None:
        if self._weights is not None:
            self._weights.run(_SPLIT)


@dataclass
class _Flying:
    """What is alive of a micro-batch in a stage."""

    x: Any
    output: Any = None
    inputs: list[Tensor] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    shapes: list[TensorMeta] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class _LayerFlops:
    """Reads the counter before and after the forward of each layer."""

    def __init__(self, stage: Stage, meter: Meter) -> None:
        self._meter, self._counts = meter, dict.fromkeys(stage.layers, 0.0)
        self._handles = []
        for name, layer in stage.layers.items():
            self._handles += [
                layer.register_forward_pre_hook(self._add(name, -1)),
                layer.register_forward_hook(self._add(name, +1)),
            ]

    def _add(self, name: str, sign: int) -> Callable[..., None]:
        def add(*_: Any) -> None:
            self._counts[name] += sign * self._meter.flops

        return add

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def counts(self) -> tuple[float, ...]:
        return tuple(self._counts.values())


def _sizes(header: Header) -> list[int]:
    """Bytes of each tensor of a message."""
    return [torch.Size(t.shape).numel() * t.dtype.itemsize for t in header.tensors]


def _fresh(header: Header) -> Any:
    tensors = [
        torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)
        for t in header.tensors
    ]
    return header.fill(tensors)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]

"""The adapter of one linear: y = W x + scale * B A x, with W frozen.

A and B are children of the linear, `lora_A` and `lora_B`, so the names of its own parameters do not
change. They are sharded like W:

    W            A [r, in]                            B [out, r]
    rows         replicated, gradient partial         rows as in W
    columns      columns as in W                      replicated, gradient partial
    replicated   replicated                           replicated

Neither needs a collective of its own: a column-parallel W and A use one copy of x, whose backward
is one all-reduce; the outputs of a row-parallel W and of B are summed in one all-reduce, because
B (A_0 x_0 + A_1 x_1) = B A_0 x_0 + B A_1 x_1. With sequence parallelism the column-parallel A
computes on the slice of x, and [batch, seq, r] is gathered: the gathered x would be kept until
backward.

Source: Hu et al. 2021, arXiv:2106.09685; the layout of the tensors is peft's.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from pipemega.config.sections.run_sections import LoraSection
from pipemega.distributed.mesh import Axis
from pipemega.parameters import InitMethod, Shard, attach_shard, shard_of
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    copy_to_tensor,
    gather_sequence,
    keeping,
)
from pipemega.tensor_parallel.layers import Product

A, B, SCALE = "lora_A", "lora_B", "lora_scale"


@dataclass(frozen=True)
class LinearShape:
    """The parts of a linear that its adapter depends on.

    Args:
        inputs, outputs: numbers of inputs and outputs of the linear on this rank.
        weight: shard of its weight, [outputs, inputs] in the logical parameter.
        axis: the tensor axis of a parallel linear; None for a replicated one.
        gathers_hidden: x is a slice of the sequence, and y has the whole sequence.
        rows: rows of the output that this rank computes with a replicated weight; None: all rows.
        copies_hidden: with `rows`: x is replicated, so each rank has a part of its gradient.
    """

    inputs: int
    outputs: int
    weight: Shard
    axis: Axis | None
    gathers_hidden: bool
    rows: slice | None = None
    copies_hidden: bool = False

    @classmethod
    def of(cls, linear: nn.Module) -> "LinearShape":
        """Return the shape of an `nn.Linear`, a parallel linear, or a Conv1D of transformers."""
        weight, axis = linear.get_parameter("weight"), getattr(linear, "axis", None)
        shard = shard_of(weight)
        outputs, inputs = weight.shape
        if not hasattr(linear, "product") and hasattr(linear, "nf"):
            # A Conv1D multiplies by [inputs, outputs].
            inputs, outputs = outputs, inputs
            shard = replace(shard, shape=shard.shape[::-1])
        slices = getattr(linear, "sequence_parallel", False) and shard.dim == 0
        gathers = slices and axis is not None and axis.size > 1
        gathers = gathers and not getattr(linear, "gather_output", False)
        rows = getattr(linear, "output_rows", None)
        copies = getattr(linear, "copies_input", False)
        return cls(inputs, outputs, shard, axis, gathers, rows, copies)


def add_adapter(linear: nn.Module, section: LoraSection) -> None:
    """Add `lora_A` and `lora_B` to a linear, which then computes W x + scale * B A x.

    A is initialized as in peft (Kaiming uniform), B is 0; `initialize_parameters` does it by the
    logical names.
    """
    if hasattr(linear, A):
        return
    shape, weight = LinearShape.of(linear), linear.get_parameter("weight")
    for name, module in zip((A, B), _matrices(shape, section.r, weight), strict=True):
        linear.add_module(name, module)
    if section.dropout:
        linear.add_module("lora_dropout", _Dropout(section.dropout, shape))
    scale = section.scale
    setattr(linear, SCALE, scale)
    if shape.gathers_hidden or not hasattr(linear, "product"):
        # Before other hooks, which expect the output of the linear.
        linear.register_forward_hook(_AddToOutput(scale, shape), prepend=True)
    else:
        vars(linear)["product"] = _Product(linear, scale)


def _matrices(shape: LinearShape, r: int, like: Tensor) -> tuple[nn.Module, nn.Module]:
    """Return A and B; their values are set by `initialize_parameters`."""
    shard = shape.weight
    outputs, inputs = shard.shape
    partial = shard.partial_gradient
    sharded = shape.axis is not None and shape.axis.size > 1
    a_shard = Shard(
        (r, inputs),
        init_method=_kaiming_uniform(inputs),
        partial_gradient=partial and not shape.copies_hidden,
    )
    b_shard = Shard((outputs, r), init_method=_zero, partial_gradient=partial)
    if shard.dim == 0:
        a_shard = replace(a_shard, partial_gradient=sharded)
        b_shard = replace(b_shard, dim=0, ranges=shard.ranges)
    elif shard.dim == 1:
        a_shard = replace(a_shard, dim=1, ranges=shard.ranges)
        b_shard = replace(b_shard, partial_gradient=sharded)
    options: dict[str, Any] = {"bias": False, "dtype": like.dtype, "device": like.device}
    a, b = (
        skip_init(nn.Linear, *sizes, **options)  # type: ignore[no-untyped-call]
        for sizes in ((shape.inputs, r), (r, shape.outputs))
    )
    attach_shard(a.weight, a_shard)
    attach_shard(b.weight, b_shard)
    return a, b


def _kaiming_uniform(inputs: int) -> InitMethod:
    # torch's kaiming_uniform_(a=sqrt(5)), the initialization of nn.Linear.
    bound = 1 / math.sqrt(inputs)
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


def _zero(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def _hidden(linear: nn.Module, x: Tensor) -> Tensor:
    """Return A x [..., r], with dropout on x."""
    dropout = linear._modules.get("lora_dropout")
    x = x if dropout is None else dropout(x)
    return linear.get_submodule(A)(x)  # type: ignore[no-any-return]


class _Product:
    """The product of a parallel linear with its adapter: of full local tensors, as W x."""

    def __init__(self, linear: nn.Module, scale: float) -> None:
        self._linear, self._scale = linear, scale
        # W x; in fp8 if `fp8_linears` replaces it.
        self.base: Product = F.linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        added = self._linear.get_submodule(B)(_hidden(self._linear, x))
        product = self.base(x, weight, bias)
        # In place: nothing else uses W x, unless a recomputation keeps it.
        if torch.compiler.is_compiling() or keeping.get() == "off":
            return product.add_(added, alpha=self._scale)
        return product.add(added, alpha=self._scale)


class _AddToOutput:
    """Forward hook: adds scale * B A x to the output of a linear."""

    def __init__(self, scale: float, shape: LinearShape) -> None:
        self._scale, self._shape = scale, shape

    def __call__(self, linear: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
        hidden = _hidden(linear, inputs[0])
        if self._shape.gathers_hidden:
            assert self._shape.axis is not None
            hidden = gather_sequence(hidden, self._shape.axis)
        elif self._shape.copies_hidden:
            assert self._shape.axis is not None
            hidden = copy_to_tensor(hidden, self._shape.axis)
        added = linear.get_submodule(B)(hidden)
        if self._shape.rows is not None:
            added = added[..., self._shape.rows]
        return torch.add(y, added, alpha=self._scale)


class _Dropout(nn.Module):
    """Dropout of the input of A: each rank takes its part of the mask of the unsharded model.

    Not `F.dropout`: a model may use another generator for its own dropout on sharded activations.
    """

    def __init__(self, p: float, shape: LinearShape) -> None:
        super().__init__()
        self.p, self._shape = p, shape

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        with torch.no_grad():
            mask = self._mask(x)
        return x * mask

    def _mask(self, x: Tensor) -> Tensor:
        """Return a mask of the shape of x: 0 or 1 / (1 - p)."""
        shape, size = self._shape, list(x.shape)
        if shape.gathers_hidden:
            assert shape.axis is not None
            length = size[SEQUENCE_DIM]
            size[SEQUENCE_DIM] *= shape.axis.size
        elif shape.weight.dim == 1:
            size[-1] = shape.weight.shape[1]
        mask = x.new_empty(size).bernoulli_(1 - self.p).div_(1 - self.p)
        if shape.gathers_hidden:
            assert shape.axis is not None
            # A copy: a view would keep the whole mask until backward.
            return mask.narrow(SEQUENCE_DIM, shape.axis.rank * length, length).clone()
        if shape.weight.dim == 1 and shape.weight.segments:
            return torch.cat([mask.narrow(-1, s, n) for s, n, _ in shape.weight.segments], -1)
        return mask

"""Linear layers whose weight is sharded over the tensor ranks.

    x --copy--> [ column-parallel ] --> activation --> [ row-parallel ] --all-reduce--> y

With sequence parallelism, x and y are slices of the sequence:

    x --all-gather--> [ column-parallel ] --> ... --> [ row-parallel ] --reduce-scatter--> y

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.parameters import InitMethod, Shard, attach_shard, even_share, normal
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    copy_to_tensor,
    gather_from_tensor,
    gather_sequence,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    sum_in_place,
)
from pipemega.tensor_parallel.output_shard import OutputShard


class Product(Protocol):
    """F.linear, or its replacement with a deferred weight gradient (split_backward.py)."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, with the rows of W sharded over the tensor ranks.

        W  [out, in]   =   W_0   rank 0   [out / T, in]
                           W_1   rank 1   [out / T, in]

    A `RowParallelLinear` can take its output directly: the pair needs one all-reduce in forward
    and one in backward.

    Args:
        in_features: columns of W, not sharded.
        out_features: rows of W; or the sizes of the blocks that W stacks (query, key, value; gate,
            up): each block is sharded separately, so that every rank has a part of each.
        axis: the tensor axis of the mesh.
        gather_output: y is replicated, in the order of the unsharded layer.
        sequence_parallel: x is this rank's slice of the sequence and is gathered first.
        init_method: used by `initialize_parameters`; W is NaN until then. b is initialized to 0.
            None: the caller fills W and b.

    Shape:
        x [..., in], equal on all tensor ranks  ->  y [..., out / T], a slice per rank
        sequence_parallel:   x [batch, seq / T, in]  ->  y [batch, seq, out / T]
        gather_output:   y [..., out], equal on all tensor ranks

    Raises:
        ConfigError: out_features, or a block of it, is not a multiple of T.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        axis: Axis,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = normal(0.02),  # noqa: B008 (a pure function's value)
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        one_block = isinstance(out_features, int)
        blocks = [out_features] if isinstance(out_features, int) else list(out_features)
        self.in_features, self.out_features = in_features, sum(blocks)
        self.axis, self.gather_output = axis, gather_output
        # The slices of several blocks are not in the order of the whole output.
        self.output_shard: OutputShard | None = None
        if one_block and not gather_output:
            self.output_shard = OutputShard(axis, sum(blocks))
        self.sequence_parallel = sequence_parallel
        self.local_blocks = [
            even_share(size, axis.size, "out_features" if one_block else f"out_features[{i}]")
            for i, size in enumerate(blocks)
        ]
        ranges = _block_ranges(blocks, axis)
        new = partial(torch.full, dtype=dtype, device=device)
        local = sum(self.local_blocks)
        shape = (self.out_features, in_features)
        shard = Shard(shape, dim=0, ranges=ranges, init_method=init_method)
        self.weight = attach_shard(nn.Parameter(new((local, in_features), torch.nan)), shard)
        self.bias = None
        if bias:
            shard = Shard((self.out_features,), dim=0, ranges=ranges)
            self.bias = attach_shard(nn.Parameter(new((local,), 0.0)), shard)

    product: Product = staticmethod(F.linear)
    # The product of the gathered x with a deferred weight gradient, for sequence parallelism.
    gathered_product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if self.product is F.linear and not compiling:
            y = column_product(x, self.weight, self.bias, self.axis, self.sequence_parallel)
        elif self.gathered_product is not None and not compiling:
            y = self.gathered_product(x, self.weight, self.bias)
        else:
            gather_or_copy = gather_sequence if self.sequence_parallel else copy_to_tensor
            y = self.product(gather_or_copy(x, self.axis), self.weight, self.bias)
        if not self.gather_output or self.axis.size == 1:
            return y
        # Gather each block separately; otherwise the order would be q0 k0 v0 q1 k1 v1.
        blocks = torch.split(y, self.local_blocks, -1)
        return torch.cat([gather_from_tensor(block, self.axis) for block in blocks], -1)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features} / {self.axis.size}"


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b, with the columns of W sharded over the tensor ranks.

        W  [out, in]   =   W_0 | W_1          y  =  x_0 W_0ᵀ + x_1 W_1ᵀ + b

    b is replicated and added once, after the sum.

    Args:
        in_features: columns of W; a multiple of the tensor ranks T.
        out_features: rows of W, not sharded.
        axis: the tensor axis of the mesh.
        sequence_parallel: each rank keeps its slice of the sequence of the sum; the gradient of b
            is then partial (`Shard.partial_gradient`).
        init_method: used by `initialize_parameters`; W is NaN until then. b is initialized to 0.
            None: the caller fills W and b.

    Shape:
        x [..., in / T], a slice per rank  ->  y [..., out], equal on all tensor ranks
        sequence_parallel:   x [batch, seq, in / T]  ->  y [batch, seq / T, out]

    Raises:
        ConfigError: in_features is not a multiple of T; in forward, the sequence length is not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = normal(0.02),  # noqa: B008 (a pure function's value)
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.sequence_parallel = sequence_parallel
        local = even_share(in_features, axis.size, "in_features")
        new = partial(torch.full, dtype=dtype, device=device)
        ranges = _block_ranges([in_features], axis)
        shard = Shard((out_features, in_features), dim=1, ranges=ranges, init_method=init_method)
        self.weight = attach_shard(nn.Parameter(new((out_features, local), torch.nan)), shard)
        self.bias = None
        if bias:
            shard = Shard((out_features,), partial_gradient=sequence_parallel and axis.size > 1)
            self.bias = attach_shard(nn.Parameter(new((out_features,), 0.0)), shard)

    product: Product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self.product(x, self.weight, self.bias)
        y = self.product(x, self.weight)
        if self.sequence_parallel:
            y = reduce_scatter_sequence(y, self.axis)
        else:
            y = sum_in_place(y, self.axis)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in={self.in_features} / {self.axis.size}, out={self.out_features}"


def column_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool = False
) -> Tensor:
    """Return x Wᵀ + b for this rank's rows of W; backward overlaps communication and computation.

        communication      all-gather x ..     all-reduce or reduce-scatter dx ..
        computation        dx = dy W           dW = dyᵀ x

    x is gathered under sequence parallelism only, which saves only the slice of x for backward.
    """
    if axis.size == 1:
        return F.linear(x, weight, bias)
    y: Tensor = _ColumnProduct.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, axis, sequence_parallel
    )
    return y


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, gather: bool
    ) -> Tensor:
        ctx.axis, ctx.gather = axis, gather
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        full = start_all_gather(x, axis, SEQUENCE_DIM)() if gather else x
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        axis = ctx.axis
        gathering = summing = None
        if need_dw and ctx.gather:
            gathering = start_all_gather(x, axis, SEQUENCE_DIM)
        if need_dx:
            dx = dy.matmul(weight)
            if gathering is not None:
                x, gathering = gathering(), None
            if ctx.gather:
                summing = start_reduce_scatter(dx, axis, SEQUENCE_DIM)
            else:
                summing = start_all_reduce(dx, axis)
        if gathering is not None:
            x = gathering()
        dw = weight_gradient(dy, x) if need_dw else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if need_db else None
        return summing() if summing is not None else None, dw, db, None, None


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return dW = dyᵀ x [out, in] of y = x Wᵀ, summed over all leading dims."""
    return dy.reshape(-1, dy.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))


def _block_ranges(blocks: Sequence[int], axis: Axis) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of this rank's share of each of the concatenated blocks."""
    ranges, offset = [], 0
    for size in blocks:
        share = size // axis.size
        ranges.append((offset + axis.rank * share, offset + (axis.rank + 1) * share))
        offset += size
    return tuple(ranges)

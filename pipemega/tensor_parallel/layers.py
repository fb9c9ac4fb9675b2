"""Linear layers whose weight is sharded over the tensor ranks.

    x --copy--> [ column-parallel ] --> activation --> [ row-parallel ] --all-reduce--> y

With sequence parallelism, x and y are slices of the sequence:

    x --all-gather--> [ column-parallel ] --> ... --> [ row-parallel ] --reduce-scatter--> y

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.

Embedding and output head with the vocabulary sharded over the tensor ranks.

Dropout with the same mask on every mesh.
"""

from collections.abc import Callable, Sequence
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
    local_range,
    reduce_scatter_sequence,
    require_in_vocabulary,
    rows_per_rank,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    sum_in_place,
    unkept,
)
from pipemega.tensor_parallel.deferred_logits import (
    DeferredLogits,
    GradientSink,
    OutputShard,
    defers_logits,
)
from pipemega.tensor_parallel.overlapped_products import (
    gathered_product,
    overlaps,
    row_product,
    rows_of,
    scattered_product,
    weight_gradient,
)


class Product(Protocol):
    """F.linear, or its replacement with a deferred weight gradient (split_backward.py)."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


class LinearProducts:
    """The three matrix products of a linear layer; a subclass computes them in another way.

        y = x Wᵀ        dx = dy W        dW = dyᵀ x

    As the `product` of a layer it is called like F.linear. Split backward calls the methods for dx
    and dW at different times.

    Shape:
        x [n, in], W [out, in], dy [n, out]
    """

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return y [n, out]."""
        return x.mm(weight.t())

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dx [n, in]."""
        return dy.mm(weight)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Return dW [out, in]."""
        return dy.t().mm(x)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        device = x.device.type
        if not x.is_meta and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y = self.differentiable_output(rows_of(x), weight)
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], y.shape[-1])

    def differentiable_output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return y [n, out], whose backward calls the two other products."""
        y: Tensor = _Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return y

    def __deepcopy__(self, memo: Any) -> "LinearProducts":
        # It has no state: the copy of a layer uses the same products.
        return self


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: LinearProducts) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return products.output(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx = ctx.products.input_gradient(dy, weight) if need_dx else None
        return dx, ctx.products.weight_gradient(x, dy) if need_dw else None, None


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
        ranges = block_ranges(blocks, axis)
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
    # The product that includes the communication of x: with a deferred weight gradient, for
    # sequence parallelism, or with other products, such as in fp8.
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
        ranges = block_ranges([in_features], axis)
        shard = Shard((out_features, in_features), dim=1, ranges=ranges, init_method=init_method)
        self.weight = attach_shard(nn.Parameter(new((out_features, local), torch.nan)), shard)
        self.bias = None
        if bias:
            shard = Shard((out_features,), partial_gradient=sequence_parallel and axis.size > 1)
            self.bias = attach_shard(nn.Parameter(new((out_features,), 0.0)), shard)

    product: Product = staticmethod(F.linear)
    # `row_product` with a deferred weight gradient.
    overlapped_product: Callable[[Tensor, Tensor, Axis], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self.product(x, self.weight, self.bias)
        # A recomputation keeps the sum over the ranks instead of the product.
        overlapped = row_product if self.product is F.linear else self.overlapped_product
        if not self.sequence_parallel:
            y = sum_in_place(unkept(self.product, x, self.weight), self.axis)
        elif overlapped is not None and overlaps(x, self.axis, scatters=True):
            y = overlapped(x, self.weight, self.axis)
        else:
            y = reduce_scatter_sequence(unkept(self.product, x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in={self.in_features} / {self.axis.size}, out={self.out_features}"


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sequence_parallel: bool = False,
    products: LinearProducts | None = None,
) -> Tensor:
    """Return x Wᵀ + b for this rank's rows of W; backward overlaps communication and computation.

        communication      all-gather x ..     all-reduce or reduce-scatter dx ..
        computation        dx = dy W           dW = dyᵀ x

    x is gathered under sequence parallelism only, which saves only the slice of x for backward. The
    axis says whether the product overlaps with the all-gather, and dx with the reduce-scatter.
    """
    if axis.size == 1:
        return (products or F.linear)(x, weight, bias)
    y: Tensor = _ColumnProduct.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, axis, sequence_parallel, products
    )
    return y


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        gather: bool,
        products: LinearProducts | None,
    ) -> Tensor:
        ctx.axis, ctx.gather, ctx.products = axis, gather, products
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.overlaps = gather and products is None and overlaps(x, axis)
        if ctx.overlaps:
            return gathered_product(x, weight.t(), bias, axis)[0]
        full = start_all_gather(x, axis, SEQUENCE_DIM)() if gather else x
        return (products or F.linear)(full, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        axis, products = ctx.axis, ctx.products
        gathering = summing = None
        if need_dw and ctx.gather:
            gathering = start_all_gather(x, axis, SEQUENCE_DIM)
        if need_dx and ctx.overlaps:
            summing = scattered_product(dy, weight, axis)
        elif need_dx:
            if products is None:
                dx = dy.matmul(weight)
            else:
                dx = products.input_gradient(rows_of(dy), weight).view(*dy.shape[:-1], -1)
            if gathering is not None:
                x, gathering = gathering(), None
            if ctx.gather:
                summing = start_reduce_scatter(dx, axis, SEQUENCE_DIM)
            else:
                summing = start_all_reduce(dx, axis)
        if gathering is not None:
            x = gathering()
        dw = None
        if need_dw and products is None:
            dw = weight_gradient(dy, x)
        elif need_dw:
            dw = products.weight_gradient(rows_of(x), rows_of(dy))
        db = rows_of(dy).sum(0) if need_db else None
        return summing() if summing is not None else None, dw, db, None, None, None


def gradient_of(products: LinearProducts | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of x [.., in] and dy [.., out] that computes dW, as autograd does."""
    return linear_gradient if products is None else products.weight_gradient


def linear_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return dW [out, in] for x [.., in] and dy [.., out]."""
    return weight_gradient(dy, x.to(dy.dtype))


def block_ranges(blocks: Sequence[int], axis: Axis) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of this rank's share of each of the concatenated blocks."""
    ranges, offset = [], 0
    for size in blocks:
        share = size // axis.size
        ranges.append((offset + axis.rank * share, offset + (axis.rank + 1) * share))
        offset += size
    return tuple(ranges)


# (ids [...], weight [rows, dim]) -> [..., dim]; split backward replaces it.
Lookup = Callable[[Tensor, Tensor], Tensor]


class _Vocabulary(nn.Module):
    """Base class: this rank's rows of the [vocabulary, dim] weight, and `logits`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        axis: Axis,
        divisible_by: int = 128,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = normal(0.02),  # noqa: B008 (a pure function's value)
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.axis, self.sequence_parallel = axis, sequence_parallel
        rows = rows_per_rank(num_embeddings, axis.size, divisible_by)
        self.start, self.stop = local_range(num_embeddings, rows, axis.rank)
        weight = torch.full((rows, embedding_dim), torch.nan, dtype=dtype, device=device)
        # Padding must be finite: its logits are computed and then masked.
        weight[self.stop - self.start :].zero_()
        shape = (num_embeddings, embedding_dim)
        ranges = ((self.start, self.stop),) if self.start < self.stop else ()
        shard = Shard(shape, dim=0, ranges=ranges, init_method=init_method)
        self.weight = attach_shard(nn.Parameter(weight), shard)

    product: Product = staticmethod(F.linear)
    # Set by split backward.
    weight_sink: GradientSink | None = None
    # A compiler has nothing to fuse in a lookup or a product.
    compiled_method: str | None = None

    @property
    def output_shard(self) -> OutputShard:
        """Declares `logits` as a slice of the vocabulary, with padding."""
        return OutputShard(self.axis, self.num_embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's slice of the vocabulary, with padding.

        `vocab_parallel_cross_entropy` masks the padding; for the full logits use
        `gather_from_tensor(logits, axis)[..., :num_embeddings]`.

        Shape:
            hidden [..., dim], equal on all tensor ranks  ->  [..., padded vocabulary / T]
            sequence_parallel:  hidden [batch, seq / T, dim]  ->  [batch, seq, padded / T]
        """
        return self.product(self._entering(hidden), self.weight)

    def _entering(self, hidden: Tensor) -> Tensor:
        """Return `hidden` of the whole sequence, for a different part on each rank."""
        if self.axis.size == 1:
            return hidden
        gather_or_copy = gather_sequence if self.sequence_parallel else copy_to_tensor
        return gather_or_copy(hidden, self.axis)

    def extra_repr(self) -> str:
        ranks = self.axis.size
        padded = self.weight.shape[0] * ranks
        return f"{self.num_embeddings} (padded to {padded}) / {ranks}, {self.embedding_dim}"


class VocabParallelEmbedding(_Vocabulary):
    """Embedding with the rows of its weight sharded over the tensor ranks.

    The weight is padded to a multiple of `divisible_by * T` rows. Padding rows are zero and get no
    gradient; checkpoints do not contain them (`Shard.shape` is without padding).

    Args:
        num_embeddings: size of the vocabulary, without padding.
        embedding_dim: size of an embedding vector.
        axis: the tensor axis of the mesh.
        divisible_by: model.make_vocab_size_divisible_by.
        sequence_parallel: each rank keeps its slice of the sequence.
        init_method: used by `initialize_parameters`; the weight is NaN until then. None: the
            caller fills the weight.

    Shape:
        ids [batch, seq]  ->  [batch, seq, dim], both equal on all tensor ranks
        sequence_parallel:   ->  [batch, seq / T, dim], a slice per rank

    Raises:
        DataError: in forward, an id is outside the vocabulary.

    A tied head calls `logits` of its copy of the weight.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    lookup: Lookup = staticmethod(F.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        require_in_vocabulary(ids, self.num_embeddings, "token id")
        if self.axis.size == 1:
            return self.lookup(ids, self.weight)
        not_local = (ids < self.start) | (ids >= self.stop)
        rows = self.lookup((ids - self.start).masked_fill(not_local, 0), self.weight)
        rows = rows.masked_fill(not_local.unsqueeze(-1), 0.0)  # [batch, seq, dim]
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.axis)
        return sum_in_place(rows, self.axis)


class VocabParallelHead(_Vocabulary):
    """Untied output head: maps hidden states to logits, without bias.

    Within `defer_logits` it returns `DeferredLogits`, unless a subclass computes something else.

    Args as in `VocabParallelEmbedding`, shapes as in `logits`.
    """

    def forward(self, hidden: Tensor) -> Tensor | DeferredLogits:
        if not self._is_changed() and defers_logits(self, self):
            return DeferredLogits.of(self, self._entering(hidden), self.num_embeddings)
        return self.logits(hidden)

    def _is_changed(self) -> bool:
        names, own = ("forward", "logits"), vars(self)
        same = (getattr(type(self), name) is getattr(VocabParallelHead, name) for name in names)
        return not all(same) or any(name in own for name in names)


class Dropout(nn.Module):
    """`nn.Dropout` for activations that are replicated over tensor ranks or sharded by sequence.

    The mask comes from the default generator, whose state must be equal on all tensor ranks
    (`random.seed_layer`). For a slice of the sequence, the mask of the full sequence is generated
    and sliced: T times the random numbers, but the same mask as in the unsharded model. For
    activations that are sharded otherwise (attention heads), use F.dropout in
    `random.sharded_rng`.

    Args:
        p: probability of an element to become 0.
        axis: the tensor axis of the mesh.
        sequence_parallel: x is this rank's slice of the sequence.
        padded_from: first position of the whole sequence that is padding; None: there is none.

    Shape:
        x [...]  ->  the same;  sequence_parallel: x [batch, seq / T, ...]  ->  the same
    """

    def __init__(
        self,
        p: float,
        *,
        axis: Axis,
        sequence_parallel: bool = False,
        padded_from: int | None = None,
    ) -> None:
        super().__init__()
        self.p, self.axis, self.sequence_parallel = p, axis, sequence_parallel
        self.padded_from = padded_from

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return F.dropout(x, self.p, self.training)
        return sequence_dropout(self.axis, x, self.p, self.training, padded_from=self.padded_from)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def sequence_dropout(
    axis: Axis,
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    padded_from: int | None = None,
) -> Tensor:
    """F.dropout of this rank's slice of the sequence, with the mask of the unsharded model.

    Args:
        padded_from: first position of the whole sequence that is padding, for which no random
            numbers are drawn.

    Shape:
        x [batch, seq / T, ...]  ->  the same
    """
    if axis.size == 1 or not training or p == 0:
        return F.dropout(x, p, training, inplace)
    length = x.shape[SEQUENCE_DIM]
    full_shape = list(x.shape)
    full_shape[SEQUENCE_DIM] = whole = length * axis.size
    if padded_from is not None:
        full_shape[SEQUENCE_DIM] = padded_from
    with torch.no_grad():
        mask = F.dropout(x.new_ones(full_shape), p)  # 0 or 1 / (1 - p)
        if padded_from is not None:
            inner_dims = (0, 0) * (x.dim() - SEQUENCE_DIM - 1)
            mask = F.pad(mask, (*inner_dims, 0, whole - padded_from))
        # A copy: a view would keep the full mask alive until backward.
        mask = mask.narrow(SEQUENCE_DIM, axis.rank * length, length).clone()
    return x * mask

"""Collectives along one mesh axis, in conjugate pairs for forward and backward.

    function                   forward          backward
    copy_to_tensor             identity         all-reduce
    reduce_from_tensor         all-reduce       identity
    scatter_to_tensor          slice            all-gather
    gather_from_tensor         all-gather       slice
    scatter_sequence           slice            all-gather
    gather_sequence            all-gather       reduce-scatter
    reduce_scatter_sequence    reduce-scatter   all-gather

If all ranks use a replicated tensor in the same computation, each rank has its full gradient. If
each rank computes a different part from it, each rank has a partial gradient, to be summed.

On an axis of one rank each function returns its argument. Sums keep the dtype of the input. On the
meta device the functions return tensors of the right shape without communication.

Source: Shoeybi et al. 2019, arXiv:1909.08053 (the first four); Korthikanti et al. 2022,
arXiv:2205.05198 (the last three).

Collectives within a compiled layer: one operator of its graph.

Sharding of the vocabulary over the tensor ranks.

Vocabulary of 1000, divisible_by 128, 2 ranks: padded to 1024, 512 rows each

    rank 0   0 .. 511           [0, 512)
    rank 1   512 .. 999 + 24    [512, 1000), then 24 rows of padding
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, library

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.device_waits import wait
from pipemega.distributed.exchanges import recorded
from pipemega.distributed.mesh import Axis
from pipemega.distributed.process_groups import sends_by_gloo
from pipemega.distributed.torch_versions import (
    ALL_GATHERS,
    REDUCE_SCATTERS,
    all_gather_single,
    reduce_scatter_single,
)
from pipemega.errors import ConfigError, DataError

Pending = Callable[[], Tensor]
"""A started collective: call it once to wait for the result."""

SEQUENCE_DIM = 1  # in [batch, sequence, ...]

keeping: ContextVar[Literal["off", "forward", "backward"]] = ContextVar("keeping", default="off")
"""Whether a region is run whose recomputation keeps results of operators, and for which pass."""

# A collective is split if its parts have at least this size, and are at most this many: copying
# smaller parts, or very many, takes less time than starting that many collectives.
_PIECE_BYTES = 1 << 20
_MOST_PIECES = 64


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sum `x` over the axis in place; `x` must be contiguous and not used elsewhere."""
    if axis.size == 1 or x.is_meta:
        return lambda: x
    start = partial(dist.all_reduce, x, group=axis.group, async_op=True)
    work = recorded("all_reduce", x.nbytes, axis.group, start)
    return _after(work, lambda: x, "all-reduce", axis)


def start_all_gather(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Concatenate `x` of all ranks along `dim`, in rank order."""
    if axis.size == 1:
        return lambda: x
    x = x.contiguous()
    gathered = x.new_empty(axis.size * x.numel())
    shape = (*x.shape[:dim], axis.size * x.shape[dim], *x.shape[dim + 1 :])
    pieces = _pieces(gathered.nbytes, shape, dim)
    if pieces:
        if x.is_meta:
            return lambda: gathered.view(shape)
        work = _start_gathers(gathered.view(pieces, -1), x.view(pieces, -1), axis)
        return _after(work, lambda: gathered.view(shape), "all-gather", axis)

    def concatenated() -> Tensor:
        return gathered.view(axis.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    if x.is_meta:
        return concatenated
    start = partial(all_gather_single, gathered, x.view(-1), group=axis.group, async_op=True)
    work = recorded("all_gather", gathered.nbytes, axis.group, start)
    return _after(work, concatenated, "all-gather", axis)


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Sum `x` over the axis and keep this rank's slice along `dim`.

    `x` must not be changed until the result is there.
    """
    if axis.size == 1:
        return lambda: x
    length = _slice_length(x, axis, dim)
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    by_gloo = sends_by_gloo(axis.group, x.device)
    if not by_gloo and (pieces := _pieces(x.nbytes, x.shape, dim)):
        x = x.contiguous()
        reduced = x.new_empty(shape)
        if x.is_meta:
            return lambda: reduced
        work = _start_reduces(reduced.view(pieces, -1), x.view(pieces, -1), axis)
        return _after(work, lambda: reduced, "reduce-scatter", axis)
    split = x.reshape(*x.shape[:dim], axis.size, length, *x.shape[dim + 1 :])
    parts = split.movedim(dim, 0).contiguous()  # [T, ..., length, ...]
    if by_gloo:
        # The reduce-scatter of gloo is an all-reduce. An all-to-all with a local sum transfers half
        # as much; the order of the sum is the rank order.
        received = torch.empty_like(parts)
        start = partial(dist.all_to_all_single, received, parts, group=axis.group, async_op=True)
        work = recorded("all_to_all", parts.nbytes, axis.group, start)
        return _after(work, lambda: received.sum(0), "reduce-scatter", axis)
    reduced = torch.empty_like(parts[0])
    if x.is_meta:
        return lambda: reduced
    start = partial(
        reduce_scatter_single, reduced.view(-1), parts.view(-1), group=axis.group, async_op=True
    )
    work = recorded("reduce_scatter", parts.nbytes, axis.group, start)
    return _after(work, lambda: reduced, "reduce-scatter", axis)


def start_all_to_all(
    x: Tensor, received: Sequence[int], sent: Sequence[int], axis: Axis
) -> tuple[Tensor, Callable[[], None]]:
    """Send each rank some rows of `x`, and receive rows from each.

    Args:
        received, sent: number of rows from, and for, each rank of the axis, in rank order.

    Returns:
        the received rows, in rank order, and what waits for them.
    """
    if axis.size == 1:
        return x, lambda: None
    if x.is_meta:
        return _exchanged(x, received), lambda: None
    rows = x.new_empty(sum(received), *x.shape[1:])
    start = partial(
        dist.all_to_all_single,
        rows,
        x.contiguous(),
        list(received),
        list(sent),
        group=axis.group,
        async_op=True,
    )
    what = f"the all-to-all of tokens for the {axis.name}"
    with named_collective(what, axis.ranks):
        work = recorded("all_to_all", x.nbytes, axis.group, start)
    return rows, lambda: wait(work, what, axis.ranks)


@library.custom_op("pipemega::exchange", mutates_args=())
def _exchanged(x: Tensor, received: Sequence[int]) -> Tensor:
    """Return the rows that an all-to-all gives, without values: a `TensorMeter` counts it."""
    return x.new_empty(sum(received), *x.shape[1:])


_exchanged.register_fake(lambda x, received: x.new_empty(sum(received), *x.shape[1:]))


def _pieces(nbytes: int, shape: Sequence[int], dim: int) -> int:
    """Return into how many collectives to split one along `dim`; 0: do not split it.

    A collective transfers contiguous memory. One along the sequence of a batch would copy the
    batch; one for each sample, all started together, copies nothing.

    Args:
        nbytes, shape: size in bytes and shape of the tensor that is not sharded.
    """
    pieces = math.prod(shape[:dim])
    return pieces if 1 < pieces <= _MOST_PIECES and nbytes >= pieces * _PIECE_BYTES else 0


def _start_gathers(gathered: Tensor, x: Tensor, axis: Axis) -> dist.Work:
    """Start the all-gather of each row of `x` [pieces, n] to a row of `gathered` [pieces, T n]."""
    assert axis.group is not None
    options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = True
    with named_collective(f"the all-gathers of a layer sharded over {axis.name}", axis.ranks):
        method: Callable[..., dist.Work] = getattr(axis.group, ALL_GATHERS)
        start = partial(method, [*gathered], [*x], options)
        return recorded("all_gather", gathered.nbytes, axis.group, start)


def _start_reduces(reduced: Tensor, x: Tensor, axis: Axis) -> dist.Work:
    """Start the reduce-scatter of each row of `x` [pieces, T n] to a row of `reduced`."""
    assert axis.group is not None
    options = dist.distributed_c10d.ReduceScatterOptions()
    options.asyncOp = True
    with named_collective(f"the reduce-scatters of a layer sharded over {axis.name}", axis.ranks):
        method: Callable[..., dist.Work] = getattr(axis.group, REDUCE_SCATTERS)
        start = partial(method, [*reduced], [*x], options)
        return recorded("reduce_scatter", x.nbytes, axis.group, start)


def _after(work: dist.Work, result: Pending, name: str, axis: Axis) -> Pending:
    def finish() -> Tensor:
        wait(work, f"the {name} of a layer sharded over {axis.name}", axis.ranks)
        return result()

    return finish


def slice_of(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's slice of `x` along `dim`, as a view."""
    length = _slice_length(x, axis, dim)
    return x.narrow(dim, axis.rank * length, length)


def sum_in_place(x: Tensor, axis: Axis) -> Tensor:
    """Apply `reduce_from_tensor` in place, without a copy or an autograd node.

    `x` must be a new tensor that is not used elsewhere. No node is needed, because the gradient of
    a sum is the gradient of each summand.
    """
    if axis.size > 1 and (torch.compiler.is_compiling() or keeping.get() != "off"):
        return reduce_from_tensor(x, axis)
    if axis.size > 1:
        start_all_reduce(x.detach(), axis)()
        # If a backward has saved x, its value is now wrong; this makes torch raise an error.
        torch.autograd.graph.increment_version(x)
    return x


def copy_to_tensor(x: Tensor, axis: Axis) -> Tensor:
    """Return a replicated x for the computation of a different part on each rank."""
    return _pair(x, axis, "identity", "all-reduce")


def reduce_from_tensor(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x over the ranks, on every rank."""
    return _pair(x, axis, "all-reduce", "identity")


def scatter_to_tensor(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Return this rank's slice of a replicated x.

    Raises:
        ConfigError: the size of dim is not a multiple of the ranks.
    """
    return _pair(x, axis, "slice", "all-gather", dim)


def gather_from_tensor(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Concatenate the slices of all ranks, for the same computation on all ranks."""
    return _pair(x, axis, "all-gather", "slice", dim)


def scatter_sequence(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Return this rank's slice of the sequence of a replicated x."""
    return scatter_to_tensor(x, axis, dim)


def gather_sequence(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Concatenate the sequence, for the computation of a different part on each rank."""
    return _pair(x, axis, "all-gather", "reduce-scatter", dim)


def reduce_scatter_sequence(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Sum x over the ranks and return this rank's slice of the sequence.

    Raises:
        ConfigError: the sequence length is not a multiple of the ranks.
    """
    return _pair(x, axis, "reduce-scatter", "all-gather", dim)


def _pair(x: Tensor, axis: Axis, forward: str, backward: str, dim: int = 0) -> Tensor:
    if axis.size == 1:
        return x
    result: Tensor = _Conjugate.apply(  # type: ignore[no-untyped-call]
        x, axis, forward, backward, dim % x.dim()
    )
    return result


class _Conjugate(torch.autograd.Function):
    """A collective whose backward is the conjugate collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: str, backward: str, dim: int) -> Tensor:
        ctx.axis, ctx.conjugate, ctx.dim = axis, backward, dim
        return _apply(forward, x, axis, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _apply(ctx.conjugate, dy, ctx.axis, ctx.dim), None, None, None, None


def _apply(name: str, x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the result of the map `name` of the table above."""
    if name == "identity":
        return x.view_as(x)
    if name == "slice":
        # A copy: a view would keep the full tensor alive.
        return slice_of(x, axis, dim).clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling():
        return traced_collective[0](x, name, dim, axis.ranks)
    if keeping.get() != "off":
        allow_tracing(axis)
        return traced_collective[0](x, name, dim, axis.ranks)
    return COLLECTIVES[name](x, axis, dim)


def unkept(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Return `function(*args)`; a recomputation keeps no results of it."""
    if torch.compiler.is_compiling() or keeping.get() == "off":
        return function(*args)
    token = keeping.set("off")
    try:
        return function(*args)
    finally:
        keeping.reset(token)


# The operator of `traced_collectives`, which is registered in runs with compiled layers only.
traced_collective: list[Callable[[Tensor, str, int, Sequence[int]], Tensor]] = []


def _all_reduced(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), axis)()


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_all_gather(x, axis, dim)()


def _reduce_scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_reduce_scatter(x, axis, dim)()


COLLECTIVES: Mapping[str, Callable[[Tensor, Axis, int], Tensor]] = {
    "all-reduce": _all_reduced,
    "all-gather": _gathered,
    "reduce-scatter": _reduce_scattered,
}


def _slice_length(x: Tensor, axis: Axis, dim: int) -> int:
    length, rest = divmod(x.shape[dim], axis.size)
    if rest or not length:
        size, nearest = x.shape[dim], max(length, 1) * axis.size
        raise ConfigError(
            f"dim {dim} of {tuple(x.shape)} is {size}, which is not a multiple of the {axis.size} "
            f"tensor ranks: make it {nearest}"
            + (", or set mesh.sequence_parallel to false" if dim == SEQUENCE_DIM else "")
        )
    return length


# Ranks -> axis: the arguments of an operator are plain values.
_axes: dict[tuple[int, ...], Axis] = {}


def allow_tracing(axis: Axis) -> None:
    """Let compiled layers call the collectives of this axis."""
    _axes[axis.ranks] = axis


@library.custom_op("pipemega::collective", mutates_args=())
def _collective(x: Tensor, name: str, dim: int, ranks: Sequence[int]) -> Tensor:
    """Return the result of a collective of `COLLECTIVES` over `ranks`."""
    return COLLECTIVES[name](x, _axes[tuple(ranks)], dim).contiguous()


@_collective.register_fake
def _(x: Tensor, name: str, dim: int, ranks: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    if name == "all-gather":
        shape[dim] *= len(ranks)
    elif name == "reduce-scatter":
        shape[dim] //= len(ranks)
    return x.new_empty(shape)


traced_collective.append(_collective)


def rows_per_rank(vocab_size: int, ranks: int, divisible_by: int) -> int:
    """Return the rows per rank with padding, a multiple of `divisible_by`."""
    return -(-vocab_size // (divisible_by * ranks)) * divisible_by


def local_range(vocab_size: int, rows: int, rank: int) -> tuple[int, int]:
    """Return [start, stop) of the ids of this rank; empty if it has only padding."""
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def require_one_target_per_token(target: Tensor, tokens: int) -> None:
    """Check that each token has a target: with fewer, targets would belong to other tokens.

    Raises:
        DataError: their numbers differ; names both.
    """
    if target.numel() != tokens:
        raise DataError(
            f"the labels {list(target.shape)} are {target.numel()}, and the inputs have {tokens} "
            "tokens: give one label for each token, the id of the next one, or -100"
        )


def require_in_vocabulary(
    ids: Tensor, vocab_size: int, what: str, ignore_index: int | None = None
) -> None:
    """Check that all ids are in the vocabulary.

    On a GPU, this is an assertion on the device, as in torch's embedding: an error message would
    make the host wait for the device.

    Raises:
        DataError: an id is negative or not less than `vocab_size`; names both.
    """
    if ids.numel() == 0:
        return
    if ignore_index is not None:
        ids = ids.masked_fill(ids == ignore_index, 0)
    low, high = torch.aminmax(ids)
    if ids.device.type != "cpu":
        torch._assert_async(((low >= 0) & (high < vocab_size)), f"{what} outside the vocabulary")
        return
    wrong = int(low) if low < 0 else int(high)
    if not 0 <= wrong < vocab_size:
        raise DataError(
            f"{what} {wrong} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}): "
            f"was the data made with another tokenizer, or is model.vocab_size too small?"
        )

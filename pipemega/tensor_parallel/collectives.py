"""Collectives along one axis, and the pairs of them that are each other's gradient.

    what                       forward          backward
    copy_to_tensor             as it is         all-reduce
    reduce_from_tensor         all-reduce       as it is
    scatter_to_tensor          slice            all-gather
    gather_from_tensor         all-gather       slice
    scatter_sequence           slice            all-gather
    gather_sequence            all-gather       reduce-scatter
    reduce_scatter_sequence    reduce-scatter   all-gather

The rule behind the table: a tensor that is whole on every rank and used alike by all has its whole
gradient on every rank; one that each rank uses for its own part has a part of its gradient there.
On an axis of one rank each of them returns its argument.  Sums keep the dtype of what is summed.
On the meta device, where a run is planned, tensors have shapes and no numbers: there each gives
what has the right shape, and talks to nobody.

Source: Shoeybi et al. 2019, arXiv:1909.08053 (the first four); Korthikanti et al. 2022,
arXiv:2205.05198 (the sequence's three).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.errors import ConfigError
from pipemega.meetings import meeting
from pipemega.mesh import Axis

Pending = Callable[[], Tensor]
"""A collective under way: call it once to wait for its result."""

SEQUENCE_DIM = 1  # of [batch, sequence, ...]

# torch 2.13 renamed both, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sums `x` over the axis, in place; `x` must be contiguous and nobody else's."""
    if axis.size == 1 or x.is_meta:
        return lambda: x
    work = dist.all_reduce(x, group=axis.group, async_op=True)
    return _after(work, lambda: x, "all-reduce", axis)


def start_all_gather(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Joins every rank's `x` along `dim`, in the order of ranks."""
    if axis.size == 1:
        return lambda: x
    x = x.contiguous()
    landed = x.new_empty(axis.size * x.numel())

    def joined() -> Tensor:
        return landed.view(axis.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    if x.is_meta:
        return joined
    work = _all_gather(landed, x.view(-1), group=axis.group, async_op=True)
    return _after(work, joined, "all-gather", axis)


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Sums `x` over the axis, and keeps this rank's slice along `dim`."""
    if axis.size == 1:
        return lambda: x
    length = _slice_length(x, axis, dim)
    cut = x.reshape(*x.shape[:dim], axis.size, length, *x.shape[dim + 1 :])
    parts = cut.movedim(dim, 0).contiguous()  # [T, ..., length, ...]; no copy for a batch of one
    if x.device.type == "cpu":
        # gloo's own reduce-scatter is an all-reduce of everything.  Sending each rank its part
        # and adding up there moves half as much; the order of the sum is the order of ranks.
        landed = torch.empty_like(parts)
        work = dist.all_to_all_single(landed, parts, group=axis.group, async_op=True)
        return _after(work, lambda: landed.sum(0), "reduce-scatter", axis)
    mine = torch.empty_like(parts[0])
    if x.is_meta:
        return lambda: mine
    work = _reduce_scatter(mine.view(-1), parts.view(-1), group=axis.group, async_op=True)
    return _after(work, lambda: mine, "reduce-scatter", axis)


def _after(work: dist.Work, result: Pending, name: str, axis: Axis) -> Pending:
    def wait() -> Tensor:
        with meeting(f"the {name} of a layer that is cut over {axis.name}", axis.ranks):
            work.wait()
        return result()

    return wait


def slice_of(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of `x` along `dim`: a view."""
    length = _slice_length(x, axis, dim)
    return x.narrow(dim, axis.rank * length, length)


def sum_in_place(x: Tensor, axis: Axis) -> Tensor:
    """`reduce_from_tensor` of a fresh product that nobody else holds: no copy, no node.

    The gradient of a sum passes to each part as it is, so autograd need not know.
    """
    if axis.size > 1:
        start_all_reduce(x.detach(), axis)()
        # A backward that had kept the product would now be wrong: this lets torch refuse it.
        torch.autograd.graph.increment_version(x)
    return x


def copy_to_tensor(x: Tensor, axis: Axis) -> Tensor:
    """For an x that is whole on every rank, and of which each rank makes its own part."""
    return _pair(x, axis, _same, _all_reduced)


def reduce_from_tensor(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's x, on every rank."""
    return _pair(x, axis, _all_reduced, _same)


def scatter_to_tensor(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """This rank's slice of an x that is whole on every rank.

    Raises:
        ConfigError: the dim does not divide by the ranks.
    """
    dim %= x.dim()
    return _pair(x, axis, partial(_sliced, dim=dim), partial(_gathered, dim=dim))


def gather_from_tensor(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Every rank's slice joined, to be used alike by all ranks."""
    dim %= x.dim()
    return _pair(x, axis, partial(_gathered, dim=dim), partial(_sliced, dim=dim))


def scatter_sequence(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """This rank's slice of the sequence, of an x that is whole on every rank."""
    return scatter_to_tensor(x, axis, dim)


def gather_sequence(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """The whole sequence, of which each rank makes its own part (of the features, say)."""
    dim %= x.dim()
    return _pair(x, axis, partial(_gathered, dim=dim), partial(_reduce_scattered, dim=dim))


def reduce_scatter_sequence(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """The sum of every rank's x, of which each rank keeps its slice of the sequence.

    Raises:
        ConfigError: the sequence does not divide by the ranks.
    """
    dim %= x.dim()
    return _pair(x, axis, partial(_reduce_scattered, dim=dim), partial(_gathered, dim=dim))


_Map = Callable[[Tensor, Axis], Tensor]


def _pair(x: Tensor, axis: Axis, forward: _Map, backward: _Map) -> Tensor:
    if axis.size == 1:
        return x
    result: Tensor = _Conjugate.apply(x, axis, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Conjugate(torch.autograd.Function):
    """One collective forward, its conjugate backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: _Map, backward: _Map) -> Tensor:
        ctx.axis, ctx.conjugate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(dy, ctx.axis), None, None, None


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduced(x: Tensor, axis: Axis) -> Tensor:
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), axis)()


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_all_gather(x, axis, dim)()


def _reduce_scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_reduce_scatter(x, axis, dim)()


def _sliced(x: Tensor, axis: Axis, dim: int) -> Tensor:
    # A copy: a view would keep the whole alive as long as the slice.
    return slice_of(x, axis, dim).clone(memory_format=torch.contiguous_format)


def _slice_length(x: Tensor, axis: Axis, dim: int) -> int:
    length, rest = divmod(x.shape[dim], axis.size)
    if rest or not length:
        whole, fits = x.shape[dim], max(length, 1) * axis.size
        raise ConfigError(
            f"dim {dim} of {tuple(x.shape)} does not divide over {axis.size} tensor ranks: make it "
            f"{fits} in place of {whole}"
            + (", or set mesh.sequence_parallel to false" if dim == SEQUENCE_DIM else "")
        )
    return length

"""Sends tokens to the ranks of their experts, and the results back.

    tokens       [n, h]     rows of this rank, equal on all its tensor ranks
      rows       [n K, h]   each token K times, sorted by expert
      exchange   all-to-all over the expert axis: rank r gets the rows of its experts
      sort       from [source, expert] to [expert, source]
    experts      [m, h]     rows of the experts of this rank, from all ranks of the axis

`Dispatch.combine` goes the same way back. The number of rows m depends on the router, so the ranks
first exchange the number of rows of each expert. In a recomputation all of this is remembered:
nothing is counted or exchanged again but the rows.

With tensor parallelism each tensor rank exchanges a slice of the channels, and the tensor ranks
then gather the slices: all of them have equally many rows, so that these collectives are even.
Without an exchange all tensor ranks keep whole rows, and the sums of the tokens are reduced.

The sums of copies are in a fixed order, and no gradient uses atomic additions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipemega.distributed.comm_errors import comm_error, named_collective, with_ranks
from pipemega.distributed.device_waits import mark, synchronize
from pipemega.distributed.exchanges import recorded
from pipemega.distributed.mesh import Axis
from pipemega.pipeline.model.recompute import remembered
from pipemega.pipeline.weight_queue import fill_wait
from pipemega.tensor_parallel.collectives import (
    copy_to_tensor,
    gather_from_tensor,
    gather_sequence,
    reduce_from_tensor,
    reduce_scatter_sequence,
    scatter_to_tensor,
    start_all_to_all,
)


class Routes(NamedTuple):
    """Where the rows of a micro-batch go; without gradients.

    Args:
        order: row of the tokens' choices [n, K], flattened -> its place when sorted by expert.
        back: the inverse of `order`.
        sent, received: rows for, and from, each rank of the expert axis.
        sizes: rows of each expert of this rank.
        by_expert: place of each row of [expert, source] in [source, expert]; None: the same.
        by_source: the inverse of `by_expert`.
    """

    order: Tensor
    back: Tensor
    sent: list[int]
    received: list[int]
    sizes: list[int]
    by_expert: Tensor | None
    by_source: Tensor | None


class Dispatch:
    """The way of the tokens of one micro-batch to their experts and back.

    Args:
        tokens: [n, h].
        experts: the experts of each token [n, K].
        num_experts: E of all ranks.
        expert, tensor: axes of the mesh.

    The exchange starts in the constructor; `arrived` waits for it. What is computed between the two
    runs meanwhile, and its backward runs during the exchange of the gradients.
    """

    def __init__(
        self, tokens: Tensor, experts: Tensor, num_experts: int, expert: Axis, tensor: Axis
    ) -> None:
        self._expert, self._tensor, self._chosen = expert, tensor, experts.shape[1]
        self._is_local = expert.size == 1
        find = partial(_routes, experts, num_experts, expert)
        self.routes = routes = remembered(find)
        if self._is_local:
            tokens = copy_to_tensor(tokens, tensor)
        rows: Tensor = _Copies.apply(tokens, routes.order, routes.back, self._chosen)  # type: ignore[no-untyped-call]
        if not self._is_local:
            rows = scatter_to_tensor(rows, tensor)
        self._exchange = _Exchange(expert, routes.sent, routes.received)
        self._rows = self._exchange.start(rows)

    def arrived(self) -> Tensor:
        """Return the rows of the experts of this rank, sorted by expert: [m, h]."""
        rows = self._exchange.finish(self._rows)
        rows = _permuted(rows, self.routes.by_expert, self.routes.by_source)
        del self._rows
        # Each tensor rank computes other columns: their gradients are summed.
        return rows if self._is_local else gather_sequence(rows, self._tensor, dim=-1)

    def combine(self, rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of the experts of each token: [n, h].

        Args:
            rows: the results of this rank's experts [m, h], of which each tensor rank has a part of
                a sum.
            weights: the weights of the experts of each token [n, K].
            bias: added to the rows: [m, h / T], this rank's slice of the channels.
        """
        routes, tensor = self.routes, self._tensor
        if not self._is_local:
            rows = reduce_scatter_sequence(rows, tensor, dim=-1)
        elif bias is not None and tensor.size > 1:
            own = bias.shape[1]
            bias = F.pad(bias, (tensor.rank * own, (tensor.size - 1 - tensor.rank) * own))
        if bias is not None:
            rows = rows + bias
        rows = _permuted(rows, routes.by_source, routes.by_expert)
        back = _Exchange(self._expert, routes.received, routes.sent)
        rows = back.finish(back.start(rows))
        rows = _permuted(rows, routes.back, routes.order)
        weights = copy_to_tensor(weights, tensor).to(rows.dtype)
        summed = (rows.view(-1, self._chosen, rows.shape[-1]) * weights.unsqueeze(-1)).sum(1)
        # A part of the sum, or a slice of the channels.
        return (reduce_from_tensor if self._is_local else gather_from_tensor)(summed, tensor)


def _routes(experts: Tensor, num_experts: int, axis: Axis) -> Routes:
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    local = num_experts // axis.size
    if flat.is_meta:
        # As if all experts got equally many rows.
        sizes = [len(flat) * (e + 1) // local - len(flat) * e // local for e in range(local)]
        ranks = [sum(sizes) // axis.size] * axis.size
        ranks[0] += sum(sizes) - sum(ranks)
        place = torch.empty_like(order) if axis.size > 1 else None
        return Routes(order, back, ranks, ranks, sizes, place, place)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    if axis.size == 1:
        synchronize()
        return Routes(order, back, [len(flat)], [len(flat)], counts.tolist(), None, None)
    arriving = torch.empty_like(counts)
    what = f"the exchange of token counts for the {axis.name}"
    with named_collective(what, axis.ranks):
        start = partial(dist.all_to_all_single, arriving, counts, group=axis.group)
        recorded("all_to_all", counts.nbytes, axis.group, start)
    mark(lambda cause: comm_error(with_ranks(what, axis.ranks), cause))
    synchronize()
    # One read of the device: the host needs the sizes of both directions.
    leaving, coming = torch.stack([counts, arriving]).view(2, axis.size, local).tolist()
    sizes = [sum(column) for column in zip(*coming, strict=True)]
    # Number of each row's expert in [source, expert].
    numbers = torch.arange(local, device=flat.device).repeat(axis.size)
    of_row = torch.repeat_interleave(numbers, arriving, output_size=sum(sizes))
    by_expert = torch.argsort(of_row, stable=True)
    by_source = torch.empty_like(by_expert)
    by_source[by_expert] = torch.arange(len(by_expert), device=flat.device)
    sent, received = ([sum(row) for row in part] for part in (leaving, coming))
    return Routes(order, back, sent, received, sizes, by_expert, by_source)


def _permuted(rows: Tensor, places: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Return rows[places]; `inverse` is the inverse permutation. None: the rows as they are."""
    if places is None:
        return rows
    permuted: Tensor = _Permuted.apply(rows, places, inverse)  # type: ignore[no-untyped-call]
    return permuted


class _Permuted(torch.autograd.Function):
    """rows[places] for a permutation, whose gradient is a permutation too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.inverse], None, None


class _Copies(torch.autograd.Function):
    """Each token K times, sorted by expert; the gradient is the sum of its K copies in order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor, chosen: int) -> Tensor:
        ctx.back, ctx.chosen = back, chosen
        return tokens[order // chosen]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        copies = gradients[0][ctx.back]
        return copies.view(-1, ctx.chosen, copies.shape[-1]).sum(1), None, None, None


class _Exchange:
    """An all-to-all of rows in two parts, of which each starts or ends one in backward too.

    forward     start: send the rows         finish: wait for the received ones
    backward    wait for the gradients       send the gradients
    """

    def __init__(self, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> None:
        self.axis, self.sent, self.received = axis, sent, received
        # Waits for what was started.
        self.wait: Callable[[], None] | None = None
        # The gradient that is received.
        self.gradient: Tensor | None = None

    def end(self) -> None:
        """Wait for what was started, and release it: it holds the memory of both sides."""
        if self.wait is None:
            return
        fill_wait()
        wait, self.wait = self.wait, None
        wait()

    def start(self, rows: Tensor) -> Tensor:
        """Return the received rows, which have no values before `finish`."""
        if self.axis.size == 1:
            return rows
        started: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]
        return started

    def finish(self, rows: Tensor) -> Tensor:
        """Return the received rows."""
        if self.axis.size == 1:
            return rows
        finished: Tensor = _Finish.apply(rows, self)  # type: ignore[no-untyped-call]
        return finished


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        received, exchange.wait = start_all_to_all(
            rows, exchange.received, exchange.sent, exchange.axis
        )
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.end()
        gradient, exchange.gradient = exchange.gradient, None
        return gradient, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.gradient, exchange.wait = start_all_to_all(
            gradients[0], exchange.sent, exchange.received, exchange.axis
        )
        # Autograd wants the shape of the received rows, and `_Start` gives the gradient.
        return gradients[0], None

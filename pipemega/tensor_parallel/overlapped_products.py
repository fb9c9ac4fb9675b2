"""Products that overlap with the collectives of sequence parallelism.

    gathered_product      communication    all-gather 0 | all-gather 1 | all-gather 2
                          computation                   | product 0    | product 1     | product 2

    scattered_product     computation      product 0 | product 1        | product 2
                          communication              | reduce-scatter 0 | reduce-scatter 1 | ...

A piece is a sample or some of its rows: the same rows of the slice of each tensor rank, so that
each collective transfers contiguous memory.

    rank 0    s0 s1 | s2 s3         piece 0    s0 s1  s4 s5
    rank 1    s4 s5 | s6 s7         piece 1    s2 s3  s6 s7

Every element of the result is the dot product of the unsplit product. Schedules stay bitwise equal,
because B, I and a recomputation cut equally.

On GPUs of one node with symmetric memory, an operator of torch does both: each rank reads the
slices of the others from their memory, and multiplies one while it reads the next.
"""

import importlib
import socket
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import collective_error
from pipemega.distributed.device_waits import mark
from pipemega.distributed.exchanges import recorded
from pipemega.distributed.mesh import Axis, gather_objects
from pipemega.distributed.torch_versions import HAS_SYMMETRIC_PRODUCTS
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    Pending,
    keeping,
    start_all_gather,
    start_reduce_scatter,
)

# The first all-gather and the last reduce-scatter overlap with nothing: of four pieces a quarter of
# the communication. More pieces save little, and each costs the start of a collective.
_MOST_PIECES = 4
# On a GPU. A product of 1024 rows and 4096 columns has 128 tiles of 128 x 256, about as many as an
# H100 has multiprocessors (132). A piece with fewer rows takes as long, so pieces lose more than
# they hide. A CPU is efficient with a few rows.
_LEAST_ROWS = 1024


def with_overlap(axis: Axis, device: torch.device, log: Any) -> Axis:
    """Return the tensor axis of layers that overlap their products; collective over the axis.

    Args:
        log: gets the reason why a GPU does not use symmetric memory.
    """
    if axis.size == 1:
        return axis
    reason = "the device is no GPU" if device.type != "cuda" else _no_symmetric_memory(axis)
    if reason and device.type == "cuda":
        log.info(
            "mesh.overlap_sequence_parallel splits products, without symmetric memory: %s", reason
        )
    return replace(axis, overlap="split" if reason else "symmetric")


def _no_symmetric_memory(axis: Axis) -> str:
    """Return why the GPUs of the axis have no symmetric memory; the same text on all ranks."""
    assert axis.group is not None
    if not HAS_SYMMETRIC_PRODUCTS:
        return f"its products need torch 2.13 or newer, and this is torch {torch.__version__}"
    if len({*gather_objects(socket.gethostname(), axis)}) > 1:
        return "the tensor ranks are on several nodes"
    reason = ""
    try:
        # The first use of the memory connects the GPUs.
        module = importlib.import_module("torch.distributed._symmetric_memory")
        module.get_symm_mem_workspace(axis.group.group_name, 1)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    return next(filter(None, gather_objects(reason, axis)), "")


def overlaps(x: Tensor, axis: Axis, *, scatters: bool = False) -> bool:
    """Return whether a product with x [batch, seq, width] overlaps with its collective.

    Args:
        scatters: x has the whole sequence; otherwise this rank's slice.
    """
    # A compiler gets plain collectives. Autocast casts in functions of torch, not in ours.
    if torch.compiler.is_compiling() or not axis.overlap or x.dim() != 3 or x.is_meta:
        return False
    # A recomputation keeps the result of the collective, of which the pieces have none.
    if keeping.get() != "off":
        return False
    length, rest = divmod(x.shape[SEQUENCE_DIM], axis.size if scatters else 1)
    if rest or torch.is_autocast_enabled(x.device.type):
        return False
    return _pieces(x.shape[0], length, axis, x.device) > 0


def _pieces(batch: int, length: int, axis: Axis, device: torch.device) -> int:
    """Return into how many pieces each sample is cut; 0: the product is not split.

    Args:
        length: the length of a rank's slice of the sequence.
    """
    least = 1 if device.type == "cpu" else _LEAST_ROWS
    for pieces in range(max(1, _MOST_PIECES // max(1, batch)), 0, -1):
        rest = length % pieces
        if not rest and axis.size * (length // pieces) >= least and batch * pieces > 1:
            return pieces
    return 0


def gathered_product(
    x: Tensor, matrix: Tensor, bias: Tensor | None, axis: Axis, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the product of the gathered sequence, and with `keep` the gathered sequence.

    Shape:
        x [batch, seq / T, in], matrix [in, out], bias [out]
        ->  [batch, seq, out], [batch, seq, in]
    """
    (batch, length, width), ranks, out = x.shape, axis.size, matrix.shape[1]
    if axis.overlap == "symmetric":
        whole, (y,) = _fused(
            "fused_all_gather_matmul", ranks * x.nbytes, axis,
            x, [matrix], SEQUENCE_DIM, return_A=keep,
        )  # fmt: skip
        # No view: queues mark the result as changed in place.
        y = x.new_empty(0).set_(y.contiguous())
        return y if bias is None else y.add_(bias), whole
    pieces = _pieces(batch, length, axis, x.device)
    rows = length // pieces
    slices = torch.split(x.reshape(-1, width), rows)
    started = [start_all_gather(piece, axis, 0) for piece in slices]
    y = x.new_empty(batch, ranks * length, out)
    whole = x.new_empty(batch, ranks * length, width) if keep else None
    cut = (batch, ranks, pieces, rows, -1)
    matrices = matrix.expand(ranks, width, out)
    started.reverse()
    for i in range(batch * pieces):
        place = (i // pieces, slice(None), i % pieces)
        piece, rows_of_y = started.pop()().view(ranks, rows, width), y.view(cut)[place]
        # `out`: the product writes to its rows of y, without a copy.
        if bias is None:
            torch.bmm(piece, matrices, out=rows_of_y)
        else:
            torch.baddbmm(bias.expand(ranks, rows, out), piece, matrices, out=rows_of_y)
        if whole is not None:
            whole.view(cut)[place] = piece
    return y, whole


def scattered_product(x: Tensor, matrix: Tensor, axis: Axis) -> Pending:
    """Start this rank's slice of the sequence of the product, summed over the axis.

    Shape:
        x [batch, seq, in], matrix [in, out]  ->  [batch, seq / T, out]
    """
    (batch, _, width), ranks, out = x.shape, axis.size, matrix.shape[1]
    length = x.shape[SEQUENCE_DIM] // ranks
    if axis.overlap == "symmetric":
        nbytes = x.nbytes // width * out
        y = _fused("fused_matmul_reduce_scatter", nbytes, axis, x, matrix, "sum", SEQUENCE_DIM)
        return lambda: y.contiguous()
    pieces = _pieces(batch, length, axis, x.device)
    parts = x.reshape(batch, ranks, pieces, length // pieces, width)
    matrices = matrix.expand(ranks, width, out)
    started = []
    for i in range(batch * pieces):
        y = torch.bmm(parts[i // pieces, :, i % pieces], matrices)  # [T, rows, out]
        started.append(start_reduce_scatter(y.flatten(0, 1), axis, 0))

    def finish() -> Tensor:
        # No view: the caller may change it in place.
        y = x.new_empty(batch, length, out)
        torch.cat([pending() for pending in started], out=y.view(-1, out))
        return y

    return finish


def _fused(name: str, nbytes: int, axis: Axis, *args: Any, **options: Any) -> Any:
    """Call the operator `name` of torch's symmetric memory, with the group as last argument."""
    group, results = axis.group, list[Any]()
    assert isinstance(group, dist.ProcessGroup)
    operator = getattr(torch.ops.symm_mem, name)
    kind = "all_gather" if "gather" in name else "reduce_scatter"
    # It returns nothing: `recorded` would take a result for an asynchronous operation.
    recorded(
        kind, nbytes, group, lambda: results.append(operator(*args, group.group_name, **options))
    )
    mark(collective_error(name, args[0], group))
    return results[0]


def row_product(
    x: Tensor, weight: Tensor, axis: Axis, whole_dy: list[Tensor] | None = None
) -> Tensor:
    """Return this rank's slice of the sequence of x Wᵀ, summed over the axis.

    Args:
        whole_dy: gets dy of the whole sequence in backward, for a weight gradient that the caller
            computes.

    Shape:
        x [batch, seq, in / T]  ->  [batch, seq / T, out]
    """
    saved: list[Any] = []
    x = _Save.apply(x, weight, saved)  # type: ignore[no-untyped-call]
    y: Tensor = _RowProduct.apply(x, weight, axis, saved, whole_dy)  # type: ignore[no-untyped-call]
    return y


class _Save(torch.autograd.Function):
    """Identity that saves x and the weight.

    It runs before the product: a recomputation stops once all tensors are saved, so it does not
    repeat the last product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saved: list[Any]) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        saved.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        axis: Axis,
        saved: list[Any],
        whole_dy: list[Tensor] | None,
    ) -> Tensor:
        ctx.axis, ctx.saved, ctx.whole_dy = axis, saved, whole_dy
        return scattered_product(x, weight.t(), axis)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved[0].saved_tensors
        need_dw = ctx.needs_input_grad[1]
        keep = need_dw or ctx.whole_dy is not None
        dx, dy = gathered_product(gradients[0], weight, None, ctx.axis, keep)
        if dy is not None and ctx.whole_dy is not None:
            ctx.whole_dy.append(dy)
        dw = weight_gradient(dy, x) if need_dw and dy is not None else None
        return dx, dw, None, None, None


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return dW = dyᵀ x [out, in] of y = x Wᵀ, summed over all leading dims."""
    # Not by `rows_of`: each W of a linear runs this.
    rows = dy.shape[:-1].numel()
    return dy.reshape(rows, dy.shape[-1]).t().mm(x.reshape(rows, x.shape[-1]))


def rows_of(tensor: Tensor) -> Tensor:
    """Return [.., n] as [rows, n]; also without elements, where torch's -1 has no value."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])

"""Squared norms of the gradients by layer, without a number of kernels that grows with the layers.

    runs       | layer 0 | layer 1 | layer 1 |  ..    ranges of the flat buffers, one layer each
    squares    |   s0    |   s1    |   s2    |  ..    one multi-tensor kernel
    columns    | s0 s1 .. |                           first run of each layer
               | 0  s2 .. |                           second run, 0 where a layer has none
    sum        | s0 s1 + s2 .. |                      one addition per column

By layer, so that the sum does not depend on which rank holds which layers: on a CPU the norm is
bitwise the same for all schedules. (On a GPU the order of additions may depend on the alignment.)
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipemega.distributed.mesh import Axis
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.parameters import shard_of

# Elements of a flat buffer that are converted to fp64 at a time on a CPU: they fit into the cache.
_NORM_BLOCK = 1 << 18


class GradientNorms:
    """Computes this rank's part of the squared norms, after the reductions.

    Each logical parameter counts once in the world: one replicated over the tensor ranks on the
    first of them, a tied one on its first holder, and all on the first data rank only, or, with
    ZeRO, each slice on its owner.

    Args:
        gradients: the buffers; the same tensors in every step.
        tensor, data: the axes of the mesh.
        tied: logical name -> the ranks that hold it.
        num_layers: of the whole model.
        device: of the result.
    """

    def __init__(
        self,
        gradients: GradientBuffer,
        tensor: Axis,
        data: Axis,
        tied: Mapping[str, Axis],
        num_layers: int,
        device: torch.device,
    ) -> None:
        runs = _runs(gradients, tensor, data, tied)
        self._parts = [gradients.flats[run.dtype][run.start : run.stop] for run in runs]
        by_layer: list[list[int]] = [[] for _ in range(num_layers)]
        for number, run in enumerate(runs):
            if run.counted:
                by_layer[run.layer].append(number)
        depth = max(map(len, by_layer))
        # A zero follows the squares: it fills the columns.
        columns = [
            [numbers[row] if row < len(numbers) else len(runs) for numbers in by_layer]
            for row in range(depth)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device).view(
            depth, num_layers
        )
        self._total = torch.zeros(num_layers + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the squares.

        Returns:
            [num_layers + 1] fp64: the squares, by the position in the logical name, and 1 if this
            rank holds any inf or nan, else 0.  That flag includes replicas that are counted on
            other ranks, so that a replica with a wrong value is noticed.
        """
        total = self._total.clone()
        if not self._parts:
            return total
        squares = square_sums(self._parts)
        padded = torch.cat([squares, self._total[:1]])
        # One after the other: a sum over the columns could depend on their number.
        by_layer = total[:-1]
        for column in padded[self._columns].unbind():
            by_layer.add_(column)
        # Not `isfinite`, which takes four kernels; nan is not below inf either.
        total[-1] = ~(squares < math.inf).all()
        return total


class _Run(NamedTuple):
    """A range of a flat buffer that belongs to one layer, and whether this rank counts it.

    Ranges of different kinds are not merged: whether they are adjacent depends on the other layers
    of the rank, and the sum on what was merged.
    """

    dtype: torch.dtype
    start: int
    stop: int
    counted: bool
    layer: int
    kind: tuple[bool, bool]  # sharded over tensor ranks, partial


def _runs(
    gradients: GradientBuffer, tensor: Axis, data: Axis, tied: Mapping[str, Axis]
) -> list[_Run]:
    """Return what this rank owns of the buffers, adjacent slots that count alike merged."""
    runs: list[_Run] = []
    layout = gradients.layout
    for dtype in gradients.flats:
        for slot in (slot for slot in gradients.slots if slot.dtype == dtype):
            start, stop = layout.owned(slot)
            if start == stop:
                continue
            shard = shard_of(slot.parameter)
            counted = is_counted(
                slot.name, slot.parameter, tensor, data, tied, sliced=bool(layout.buckets)
            )
            kind = (shard.dim is not None, shard.partial_gradient)
            run = _Run(dtype, start, stop, counted, _layer_of(slot.name), kind)
            last = runs[-1] if runs else None
            if last and (last.dtype, last.stop, *last[3:]) == (dtype, start, *run[3:]):
                run = run._replace(start=runs.pop().start)
            runs.append(run)
    return runs


def is_counted(
    name: str,
    parameter: Tensor,
    tensor: Axis,
    data: Axis,
    tied: Mapping[str, Axis],
    *,
    sliced: bool,
) -> bool:
    """Return whether this rank counts its part of a parameter, so that each element counts once.

    Args:
        name: logical name.
        tied: logical name -> the ranks that hold a tied parameter.
        sliced: the part is a slice that no other data rank has (ZeRO).
    """
    return (
        (data.rank == 0 or sliced)
        and (tensor.rank == 0 or shard_of(parameter).dim is not None)
        and (name not in tied or tied[name].rank == 0)
    )


def _layer_of(name: str) -> int:
    """Return the position in a logical name: layers.12.weight -> 12; 0 for any other name."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found.group(1)) if found else 0


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor: [tensors] fp64.

    Squares of fp32 numbers cannot overflow fp64: a sum is not finite only if an element is not.
    """
    # The square of a complex number is that of both of its parts.
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    if tensors[0].device.type == "cpu":
        # vector_norm with a dtype is ten times slower on a CPU (docs/optimizer.md).
        return torch.stack([_square_sum_on_cpu(tensor) for tensor in tensors])
    return _square_sums_on_device(tensors)


def _square_sums_on_device(tensors: Sequence[Tensor]) -> Tensor:
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        # A list of one dtype: CUDA then adds in fp64 in one kernel, without an fp64 copy.
        numbers = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
        found = torch._foreach_norm([tensors[n] for n in numbers], 2, dtype=torch.float64)
        norms.update(zip(numbers, found, strict=True))
    return torch.stack([norms[n] for n in range(len(tensors))]).square_()


def _square_sum_on_cpu(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(tensor.reshape(-1), _NORM_BLOCK):
        block = block.double()
        total += torch.dot(block, block)
    return total

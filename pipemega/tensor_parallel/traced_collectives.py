"""Collectives within a compiled layer: one operator of its graph."""

from collections.abc import Sequence

from torch import Tensor, library

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import COLLECTIVES, traced_collective

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

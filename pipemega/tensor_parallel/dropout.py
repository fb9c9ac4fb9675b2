"""Dropout with the same mask on every mesh."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM


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

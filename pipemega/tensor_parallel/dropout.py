"""Dropout that drops the same elements on every mesh."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.mesh import Axis
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM


class Dropout(nn.Module):
    """`nn.Dropout` for activations that are whole on every tensor rank, or a slice of the sequence.

    The mask comes from the default generator, which must stand alike on all tensor ranks
    (`random.seed_layer`).  For a slice of the sequence the mask of the whole is drawn, and the
    slice of it kept: T times the drawing, for the bits of the unsplit model.  Activations that are
    cut otherwise (attention by heads) take a plain dropout inside `random.sharded_rng`.

    Args:
        p: the share of elements that become 0.
        axis: the tensor axis of the mesh.
        sequence_parallel: x is this rank's slice of the sequence.

    Shape:
        x [...]  ->  the same;  sequence_parallel: x [batch, seq / T, ...]  ->  the same
    """

    def __init__(self, p: float, *, axis: Axis, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.p, self.axis, self.sequence_parallel = p, axis, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1 or not self.sequence_parallel or not self.training or self.p == 0:
            return F.dropout(x, self.p, self.training)
        length = x.shape[SEQUENCE_DIM]
        whole = list(x.shape)
        whole[SEQUENCE_DIM] *= self.axis.size
        with torch.no_grad():
            mask = F.dropout(x.new_ones(whole), self.p)  # 0 or 1 / (1 - p)
            # A copy: a view would keep the whole mask alive until the backward.
            mask = mask.narrow(SEQUENCE_DIM, self.axis.rank * length, length).clone()
        return x * mask

    def extra_repr(self) -> str:
        return f"p={self.p}"

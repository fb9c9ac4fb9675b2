"""Stochastic depth: a sample skips a residual branch.

Source: Huang et al. 2016, arXiv:1603.09382.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class DropPath(nn.Module):
    """Sets the branch of a sample to 0 with probability `p`, and scales the others by 1 / (1 - p).

    The random numbers come from the default generator, whose state is equal on all tensor ranks.

    Shape:
        branch [batch, ...]  ->  the same
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return branch
        ones = branch.new_ones(branch.shape[0], *(1,) * (branch.dim() - 1))
        return branch * F.dropout(ones, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


def drop_path_rate(last: float, block: int, num_blocks: int) -> float:
    """Return the rate of a block: 0 for the first block of the model, `last` for the last.

    Args:
        block: its number in the whole model, not in the stage.
    """
    return last * block / (num_blocks - 1) if num_blocks > 1 else last

"""Rotary positions: a token's place as an angle between its query and the keys.

Source: Su et al. 2021, arXiv:2104.09864.
"""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns pairs of channels by an angle that grows with the position.

    Args:
        dim: channels of a head that are turned, the first ones; the others stay.
        base: the wave length of the slowest pair, over 2 pi.
    """

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self._dim, self._base = dim, base

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """q, k [batch, heads, sequence, head] turned; positions [batch, sequence], or 0, 1, 2 .."""
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device).unsqueeze(0)
        # In fp64: a large position times a small frequency loses its last bits in less.
        exponents = torch.arange(0, self._dim, 2, dtype=torch.float64, device=q.device) / self._dim
        angles = positions.unsqueeze(-1) * self._base**-exponents  # [batch, sequence, dim / 2]
        cos = angles.cos().repeat(1, 1, 2).unsqueeze(1).to(q.dtype)
        sin = angles.sin().repeat(1, 1, 2).unsqueeze(1).to(q.dtype)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self._dim], x[..., self._dim :]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)

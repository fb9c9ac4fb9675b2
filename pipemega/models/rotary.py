"""Rotary position embeddings (RoPE): rotate queries and keys by angles of their positions.

Source: Su et al. 2021, arXiv:2104.09864.
"""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle proportional to the position.

    Args:
        dim: number of leading channels of a head to rotate; the others are unchanged.
        base: wavelength of the slowest pair, divided by 2 pi.
    """

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self._dim, self._base = dim, base

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotate q and k.

        Shape:
            q, k [batch, heads, sequence, head]; positions [batch, sequence], None for 0, 1, 2 ..
        """
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device).unsqueeze(0)
        # In fp64: large positions times small frequencies lose precision in fp32.
        exponents = torch.arange(0, self._dim, 2, dtype=torch.float64, device=q.device) / self._dim
        angles = positions.unsqueeze(-1) * self._base**-exponents  # [batch, sequence, dim / 2]
        cos = angles.cos().repeat(1, 1, 2).unsqueeze(1).to(q.dtype)
        sin = angles.sin().repeat(1, 1, 2).unsqueeze(1).to(q.dtype)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x[..., : self._dim], x[..., self._dim :]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)

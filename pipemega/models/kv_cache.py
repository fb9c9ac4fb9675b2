"""Keys and values of the positions that attention has seen, for generation.

With a cache, a new token costs the forward of one position instead of the whole sequence.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of one attention layer, on the ranks that hold its heads.

    Args:
        capacity: largest number of positions.

    Attributes:
        length: number of positions in the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions; return keys and values of all positions, as views.

        Shape:
            [batch, groups / T, new, head]  ->  [batch, groups / T, length, head]
        """
        if self._keys is None or self._values is None:
            batch, groups, _, head = keys.shape
            self._keys = keys.new_empty(batch, groups, self._capacity, head)
            self._values = torch.empty_like(self._keys)
        start, self.length = self.length, self.length + keys.shape[2]
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

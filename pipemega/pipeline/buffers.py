"""Copies of module buffers, which a forward may change."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class BufferCopies:
    """Copies of the current buffers of modules, for example running statistics.

    Args:
        modules: the root modules; submodules are included.
    """

    @torch.no_grad()
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._copies: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, buffer.clone())
            for tree in modules
            for module in tree.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffer tensors, also where they were replaced, and their values."""
        for module, name, buffer, value in self._copies:
            module._buffers[name] = buffer.copy_(value)

"""What a forward may change beside its output: the buffers of modules."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class BufferCopies:
    """The buffers of some modules as they are now: running statistics, and whatever else.

    Args:
        modules: with all modules in them.
    """

    @torch.no_grad()
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, buffer.clone())
            for tree in modules
            for module in tree.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the values back, and the tensors where others have taken their place."""
        for module, name, buffer, value in self._kept:
            module._buffers[name] = buffer.copy_(value)

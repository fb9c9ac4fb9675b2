"""Copies of module buffers, which a forward may change."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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


@contextmanager
def keep_buffers(root: nn.Module) -> Iterator[None]:
    """Let forwards in this block change copies of the buffers of `root`.

    The buffers themselves are not restored but never changed: autograd may have saved them in the
    forwards of other micro-batches.
    """
    kept = [
        (module, name, buffer)
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer

"""A copy of all that an optimizer step changes, to take the step back to the last bit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Backup:
    """What an optimizer, and some tensors beside its state, were before a step.

    Room for the copies is made once, and again only when the optimizer's state has other tensors
    than before: after its first step, or after a checkpoint was loaded.

    Args:
        optimizer: its state tensors and the settings of its groups are kept.
        tensors: others that the step changes: what it works on, and the gradients.
    """

    def __init__(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._others = [tensor.detach() for tensor in tensors]
        self._kept: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._state: dict[Any, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []

    @property
    def bytes(self) -> int:
        """Of the copies."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)

    @torch.no_grad()
    def keep(self) -> None:
        """Takes the copy, in place of the one before."""
        optimizer = self._optimizer
        self._state = {parameter: dict(entry) for parameter, entry in optimizer.state.items()}
        self._settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        state = [v for entry in self._state.values() for v in entry.values()]
        kept = [*self._others, *(value for value in state if isinstance(value, Tensor))]
        if [id(tensor) for tensor in kept] != [id(tensor) for tensor in self._kept]:
            self._copies = [torch.empty_like(tensor) for tensor in kept]
        self._kept = kept
        if kept:
            torch._foreach_copy_(self._copies, kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what the last `keep` saw, in the same tensors."""
        if self._kept:
            torch._foreach_copy_(self._kept, self._copies)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)

"""A backup of everything that an optimizer step changes, to undo the step bit for bit."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipemega.optimizer.param_groups import options_of


class Backup:
    """Copies of an optimizer's state and of other tensors, as they are before a step.

    The copies are allocated once, and again only if the optimizer's state has other tensors: after
    its first step and after a checkpoint was loaded.

    Args:
        optimizer: its state tensors and the settings of its parameter groups are saved.
        tensors: other tensors that the step changes: its parameters and the gradients.
    """

    def __init__(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._others = [tensor.detach() for tensor in tensors]
        self._saved: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._state: dict[Any, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)

    @torch.no_grad()
    def save(self) -> None:
        """Copy everything; replaces the previous copies."""
        optimizer = self._optimizer
        self._state = {p: _copied(entry) for p, entry in optimizer.state.items()}
        self._settings = [_copied(options_of(group)) for group in optimizer.param_groups]
        leaves = pytree.tree_leaves([*self._state.values(), *self._settings])
        saved = [*self._others, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if [id(tensor) for tensor in saved] != [id(tensor) for tensor in self._saved]:
            self._copies = [torch.empty_like(tensor) for tensor in saved]
        self._saved = saved
        if saved:
            torch._foreach_copy_(self._copies, saved)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies of the last `save` back into the same tensors."""
        if self._saved:
            torch._foreach_copy_(self._saved, self._copies)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    """Copy lists, dicts and other values, which a step may change; keep the tensors."""
    copied: dict[str, Any] = pytree.tree_map(
        lambda leaf: leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf), tree
    )
    return copied

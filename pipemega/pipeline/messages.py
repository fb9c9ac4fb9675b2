"""What a message between stages looks like, apart from its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TensorMeta:
    """What must be known of a tensor before it can be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}" + (" with gradient" if self.requires_grad else "")


@dataclass(frozen=True)
class Header:
    """A message without its numbers: the same tree, with a `TensorMeta` in place of each tensor."""

    tree: Any

    @classmethod
    def of(cls, message: Any) -> "Header":
        # A message is mostly one tensor, and to walk a tree takes longer than all else here.
        if isinstance(message, Tensor):
            return cls(TensorMeta.of(message))
        return cls(pytree.tree_map_only(Tensor, TensorMeta.of, message))

    @property
    def tensors(self) -> list[TensorMeta]:
        if isinstance(self.tree, TensorMeta):
            return [self.tree]
        return [leaf for leaf in pytree.tree_leaves(self.tree) if isinstance(leaf, TensorMeta)]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The message with these tensors in it."""
        if isinstance(self.tree, TensorMeta):
            (tensor,) = tensors
            return tensor
        rest = iter(tensors)
        return pytree.tree_map_only(TensorMeta, lambda _: next(rest), self.tree)

    def difference(self, other: "Header") -> str | None:
        """The first thing that is different in `other`, in words."""
        if isinstance(self.tree, TensorMeta) and self.tree == other.tree:
            return None
        old, old_tree = pytree.tree_flatten_with_path(self.tree)
        new, new_tree = pytree.tree_flatten_with_path(other.tree)
        if old_tree != new_tree:
            return f"the structure was {_shape(self.tree)} and is now {_shape(other.tree)}"
        for (path, was), (_, now) in zip(old, new, strict=True):
            if type(was) is not type(now) or was != now:
                return f"output{pytree.keystr(path)} was {was} and is now {now}"
        return None


def tensors_of(message: Any) -> list[Tensor]:
    """The tensors of a message, in the order in which they are sent."""
    if isinstance(message, Tensor):
        return [message]
    return [leaf for leaf in pytree.tree_leaves(message) if isinstance(leaf, Tensor)]


def _shape(tree: Any) -> str:
    """The tree as Python writes it, with a star for each leaf."""
    return repr(pytree.tree_map(lambda _: _STAR, tree))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()

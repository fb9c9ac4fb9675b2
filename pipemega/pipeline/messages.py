"""Structure of the messages between stages: tree, shapes and dtypes."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and requires_grad of a tensor; the receiver needs them to allocate it.

    `number` is the index of the tensor in the message; equal if one tensor is there twice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    number: int = 0

    @classmethod
    def of(cls, tensor: Tensor, number: int = 0) -> "TensorMeta":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}" + (" with gradient" if self.requires_grad else "")


@dataclass(frozen=True)
class Header:
    """The tree of a message with a `TensorMeta` in place of each tensor."""

    tree: Any

    @classmethod
    def of(cls, message: Any) -> "Header":
        # Most messages are one tensor; a tree walk would take most of the time of a small message.
        if isinstance(message, Tensor):
            return cls(TensorMeta.of(message))
        numbers = {id(tensor): number for number, tensor in enumerate(tensors_of(message))}
        return cls(
            pytree.tree_map_only(Tensor, lambda t: TensorMeta.of(t, numbers[id(t)]), message)
        )

    @property
    def tensors(self) -> list[TensorMeta]:
        if isinstance(self.tree, TensorMeta):
            return [self.tree]
        leaves = pytree.tree_leaves(self.tree)
        metas = {leaf.number: leaf for leaf in leaves if isinstance(leaf, TensorMeta)}
        return list(metas.values())

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the message with these tensors in place of the metas; set their requires_grad."""
        if isinstance(self.tree, TensorMeta):
            (tensor,) = tensors
            return tensor.requires_grad_() if self.tree.requires_grad else tensor
        for tensor, meta in zip(tensors, self.tensors, strict=True):
            if meta.requires_grad:
                tensor.requires_grad_()
        return pytree.tree_map_only(TensorMeta, lambda meta: tensors[meta.number], self.tree)

    def matches(self, message: Any) -> bool:
        """Return whether this is the header of `message`."""
        tree = self.tree
        # Most messages are one tensor.
        if isinstance(tree, TensorMeta) and isinstance(message, Tensor):
            return (
                message.shape == tree.shape
                and message.dtype == tree.dtype
                and message.requires_grad == tree.requires_grad
            )
        return self.difference(Header.of(message)) is None

    def difference(self, other: "Header", before: str = "was", after: str = "is now") -> str | None:
        """Describe the first difference of `other`; None if there is none.

        Args:
            before, after: introduce this header and `other`.
        """
        if isinstance(self.tree, TensorMeta) and self.tree == other.tree:
            return None
        old, old_tree = pytree.tree_flatten_with_path(self.tree)
        new, new_tree = pytree.tree_flatten_with_path(other.tree)
        if old_tree != new_tree:
            old_text, new_text = _structure(self.tree), _structure(other.tree)
            return f"the structure {before} {old_text} and {after} {new_text}"
        for (path, was), (_, now) in zip(old, new, strict=True):
            if type(was) is not type(now) or was != now:
                # Only the places of a tensor that is in the message several times differ.
                places = isinstance(was, TensorMeta) and str(was) == str(now)
                repeated = ", but at other places of the message" if places else ""
                return f"output{pytree.keystr(path)} {before} {was} and {after} {now}{repeated}"
        return None


def tensors_of(message: Any) -> list[Tensor]:
    """Return the tensors of a message in the order in which they are sent, each once."""
    if isinstance(message, Tensor):
        return [message]
    leaves = pytree.tree_leaves(message)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


class Packed:
    """The layout of several tensors in one buffer, which is sent as one message.

    The first byte of each tensor has the alignment that its own memory would have, so that kernels
    give the same results.

    Args:
        metas: of the tensors.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas, self._offsets, end = metas, [], 0
        for meta in metas:
            self._offsets.append(end)
            size = math.prod(meta.shape) * meta.dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in `buffer`; a change in place of one is no change of another."""
        storage = buffer.untyped_storage()
        return [
            torch.empty(0, dtype=meta.dtype, device=buffer.device).set_(
                storage, offset // meta.dtype.itemsize, meta.shape, _strides(meta.shape)
            )
            for meta, offset in zip(self._metas, self._offsets, strict=True)
        ]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = tuple(accumulate(reversed(shape), operator.mul, initial=1))
    return strides[-2::-1]


# Bytes; at least that of the allocators of torch, and of the loads of the GPU's kernels.
_ALIGNMENT = 256


def _structure(tree: Any) -> str:
    """Return the repr of the tree with a star for each leaf."""
    return repr(pytree.tree_map(lambda _: _STAR, tree))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def wire_format(tensor: Tensor) -> Tensor:
    """Return `tensor` contiguous, and bool viewed as bytes, which every backend supports.

    A tensor that torch conjugates or negates only when it is read, as `z.conj()` and the gradient
    of one, is copied: a message has the bytes of the memory.
    """
    return as_bytes(tensor.contiguous().resolve_conj().resolve_neg())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a bool tensor viewed as bytes; any other as it is."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor

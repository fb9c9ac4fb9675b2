"""Structure of the messages between stages: tree, shapes and dtypes.

The input of a stage: layers may change it in place, and its gradient is collected.

received tensor      a leaf that requires a gradient cannot be changed in place, so the layers
                     get a tensor with the same memory that is the output of an autograd node
output of a stage    the same, if the next stage is on this rank; the tensors share a version
on the same rank     counter, so autograd reports a change of what the first stage has saved
data of the caller,  must not change: used again by the caller, by a rerun of the step or by the
input of a           recomputation; copied, but only if the layers change it in place
checkpoint
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.errors import PipelineError


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and requires_grad of a tensor; the receiver needs them to allocate it.

    `number` is the index of the tensor in the message; equal if one tensor is there twice.
    `is_view` says that it shares its memory with another tensor of the message.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    number: int = 0
    is_view: bool = False

    @classmethod
    def of(cls, tensor: Tensor, number: int = 0, is_view: bool = False) -> "TensorMeta":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number, is_view)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        gradient = " with gradient" if self.requires_grad else ""
        view = " that shares its memory with another tensor" if self.is_view else ""
        return f"{kind} {list(self.shape)}{gradient}{view}"


@dataclass(frozen=True)
class Header:
    """The tree of a message with a `TensorMeta` in place of each tensor."""

    tree: Any

    @classmethod
    def of(cls, message: Any) -> "Header":
        # Most messages are one tensor; a tree walk would take most of the time of a small message.
        if isinstance(message, Tensor):
            return cls(TensorMeta.of(message))
        refuse_objects(message)
        tensors = tensors_of(message)
        views = sharing_memory(tensors)
        metas = {id(t): TensorMeta.of(t, at, at in views) for at, t in enumerate(tensors)}
        return cls(map_tensors(lambda tensor: metas[id(tensor)], message))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The rank that receives a dataclass may not have seen one of its kind.
        _leaves(state["tree"])
        self.__dict__.update(state)

    @property
    def views(self) -> list[int]:
        """The indices of the tensors that share their memory with another one."""
        return [meta.number for meta in self.tensors if meta.is_view]

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
    return list({id(leaf): leaf for leaf in _leaves(message) if isinstance(leaf, Tensor)}.values())


def map_tensors(function: Callable[[Tensor], Any], message: Any) -> Any:
    """Return the message with `function(tensor)` in place of each tensor, of dataclasses too."""
    if isinstance(message, Tensor):
        return function(message)
    _leaves(message)
    return pytree.tree_map_only(Tensor, function, message)


def sharing_memory(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of the tensors whose memory may overlap with another of them."""
    if len(tensors) < 2:
        return []
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    if len(set(storages)) == len(storages):
        return []
    spans = [_span(tensor) for tensor in tensors]
    return [
        at
        for at, (start, stop) in enumerate(spans)
        if any(
            storages[at] == storages[other] and start < spans[other][1] and spans[other][0] < stop
            for other in range(len(tensors))
            if other != at
        )
    ]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after the last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (1 + last) * tensor.itemsize


def refuse_objects(message: Any) -> None:
    """Raise PipelineError if a message contains an object with tensors that torch cannot see."""
    for leaf in _leaves(message):
        if type(leaf) not in _LEAVES and _has_tensors(leaf, set()):
            raise PipelineError(
                f"a message between stages contains an object with tensors, {type(leaf).__name__}, "
                "which cannot be sent: return a tuple, dict or dataclass, or register the class "
                "with torch.utils._pytree.register_pytree_node"
            )


def _leaves(message: Any) -> list[Any]:
    """Return the leaves of a message; register the dataclasses with tensors in torch's pytree."""
    leaves = pytree.tree_leaves(message)
    unknown = {
        type(leaf)
        for leaf in leaves
        if type(leaf) not in _LEAVES
        and dataclasses.is_dataclass(type(leaf))
        and _has_tensors(leaf, set())
    }
    for kind in unknown:
        pytree.register_pytree_node(
            kind,
            _flatten_dataclass,
            _unflatten_dataclass,
            flatten_with_keys_fn=_flatten_dataclass_with_keys,
        )
    return _leaves(message) if unknown else leaves


# The types of most leaves; none of them has tensors in it.
_LEAVES = {Tensor, TensorMeta, torch.nn.Parameter, int, float, bool, str, type(None)}


def _has_tensors(value: Any, seen: set[int]) -> bool:
    """Return whether `value` has a tensor in its attributes, or in their attributes."""
    if isinstance(value, type | ModuleType | Tensor | TensorMeta) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(
        isinstance(leaf, Tensor | TensorMeta) or _has_tensors(leaf, seen)
        for leaf in pytree.tree_leaves(_attributes(value))
    )


def _attributes(value: Any) -> dict[str, Any]:
    slots: Iterable[str] = getattr(value, "__slots__", ())
    names = [*getattr(value, "__dict__", ()), *([slots] if isinstance(slots, str) else slots)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _flatten_dataclass(value: Any) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    attributes = _attributes(value)
    return list(attributes.values()), (type(value), tuple(attributes))


def _flatten_dataclass_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten_dataclass(value)
    return [(pytree.GetAttrKey(n), v) for n, v in zip(context[1], leaves, strict=True)], context


def _unflatten_dataclass(leaves: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    # Not by its constructor, which may check or change what it gets.
    value: Any = object.__new__(kind)
    for name, leaf in zip(names, leaves, strict=True):
        object.__setattr__(value, name, leaf)
    return value


class Packed:
    """The layout of several tensors in one buffer, which is sent as one message.

    The first byte of each tensor has the alignment that its own memory would have, so that kernels
    give the same results.

    Args:
        metas: dtype and shape of each tensor.
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


# Bytes; at least the alignment of torch's allocators, and of the loads of the GPU's kernels.
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


@dataclass(eq=False, slots=True)
class InputGradient:
    """The gradient of one tensor of a stage's input."""

    like: tuple[tuple[int, ...], torch.dtype, torch.device]
    value: Tensor | None = None

    def take(self) -> Tensor:
        """Return the gradient; zeros if the output did not depend on the input."""
        shape, dtype, device = self.like
        if self.value is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return self.value


# Makes the node require a gradient; gets none itself.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


class _CollectGradient(torch.autograd.Function):
    """Returns a tensor with the memory of `x`; its backward stores the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: InputGradient, anchor: Tensor) -> Tensor:
        ctx.into = into
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        # Contiguous, as a gradient that another rank sends.
        ctx.into.value = gradients[0].contiguous()
        return None, None, None


def collect_gradients(tree: Any) -> tuple[Any, list[InputGradient]]:
    """Return `tree` without its graph, and where backward stores the gradients of its tensors.

    Only the tensors that require a gradient get one; all tensors share their memory with `tree`. A
    tensor that is in the tree twice stays one tensor: a change in place is seen at both places.
    """
    collected: list[InputGradient] = []
    # Most messages are one tensor; a tree walk takes longer.
    if isinstance(tree, Tensor):
        return _enter(tree, collected), collected
    refuse_objects(tree)
    entered = {id(tensor): _enter(tensor, collected) for tensor in tensors_of(tree)}
    return map_tensors(lambda tensor: entered[id(tensor)], tree), collected


def _enter(tensor: Tensor, collected: list[InputGradient]) -> Tensor:
    detached = tensor.detach()
    if not tensor.requires_grad:
        return detached
    collected.append(InputGradient((tuple(tensor.shape), tensor.dtype, tensor.device)))
    result: Tensor = _CollectGradient.apply(detached, collected[-1], _ANCHOR)  # type: ignore[no-untyped-call]
    return result


class ViewGuard:
    """Watches the tensors of an input that shared their memory before they were passed on.

    Such a tensor has its own memory or its own graph now, so that another one would not follow a
    change in place.

    Args:
        x: the input.
        views: the indices of these tensors in `tensors_of(x)`.
    """

    def __init__(self, x: Any, views: Sequence[int]) -> None:
        tensors = tensors_of(x) if views else []
        self._tensors = [tensors[at] for at in views]
        self._versions = versions_of(self._tensors)

    def check(self) -> None:
        """Raise PipelineError if one of them was changed in place since."""
        if versions_of(self._tensors) != self._versions:
            raise PipelineError(
                "a layer changes in place an input that shares its memory with another tensor of "
                "the message (a view), which would not follow: return a clone() of one of them "
                "from the layer before, or use inplace=False"
            )


class InputGuard:
    """Calls functions so that they do not change their input in place.

    The first call of each function gets a copy, to find out whether it changes its input; the
    following calls get a copy only if it does. On the meta device there is nothing to keep.
    """

    def __init__(self) -> None:
        self._changes: dict[Hashable, bool] = {}

    def bind(self, key: Hashable) -> Callable[[Callable[[Any], Any], Any], Any]:
        """Return what calls a function with an input, the same way each time.

        A recomputation has to get a copy if the forward got one: a copy may have other strides,
        and torch saves tensors in an order that depends on strides.

        Args:
            key: identifies the function.
        """
        return partial(self._call, key, self._changes.get(key))

    def _call(
        self, key: Hashable, changes: bool | None, function: Callable[[Any], Any], x: Any
    ) -> Any:
        """Return `function(x)`.

        Args:
            changes: whether the function changes its input; None: not known.

        Raises:
            PipelineError: the function changed its input in place, but not in its first call.
        """
        tensors = tensors_of(x)
        # torch does not count the changes of inference tensors.
        untracked = any(map(Tensor.is_inference, tensors))
        changes = True if untracked else changes
        views: list[int] = []
        if changes or (changes is None and not all(tensor.is_meta for tensor in tensors)):
            views = sharing_memory(tensors)
            clones = {id(tensor): tensor.clone() for tensor in tensors}
            x = map_tensors(lambda tensor: clones[id(tensor)], x)
            tensors = list(clones.values())
        before, guard = versions_of(tensors), ViewGuard(x, views)
        result = function(x)
        guard.check()
        changed = versions_of(tensors) != before
        if changed and changes is False:
            raise PipelineError(
                "a layer changed its input in place, which it did not do in the first micro-batch: "
                "use inplace=False, or change the input in all micro-batches"
            )
        if changes is None:
            self._changes[key] = changed
        return result

    @property
    def copies(self) -> bool:
        """Whether a function changes its input, so that it gets a copy."""
        return any(self._changes.values())


def check_unchanged(message: Any, versions: list[int], name: str) -> None:
    """Raise PipelineError if a tensor of `message`, called `name`, was changed in place since."""
    if versions_of(tensors_of(message)) != versions:
        raise changed_in_place(name)


def changed_in_place(name: str) -> PipelineError:
    """Return the error about a message, called `name`, that was changed in place."""
    return PipelineError(
        f"{name} was changed in place after the stage had returned it, and the stage that uses "
        f"it may have got other values: return a new tensor in each call, or a clone()"
    )


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return list(map(version_of, tensors))


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version

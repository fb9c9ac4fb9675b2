"""The input of a stage: layers may change it in place, and its gradient is collected.

received tensor      a leaf that requires a gradient cannot be changed in place, so the layers
                     get a tensor with the same memory that is the output of an autograd node
output of a stage    the same, if the next stage is on this rank; the tensors share a version
on the same rank     counter, so autograd reports a change of what the first stage has saved
data of the caller,  must not change: used again by the caller, by a rerun of the step or by the
input of a           recomputation; copied, but only if the layers change it in place
checkpoint
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipemega.errors import PipelineError
from pipemega.pipeline.messages import map_tensors, refuse_objects, sharing_memory, tensors_of


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

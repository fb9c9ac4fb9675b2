"""Modules in the place of those that a part of a model does not have.

LayerPlaceholder    in place of a layer: calls a function with the arguments of the layer
ModuleStub          in place of another module with parameters: returns a tensor of the right shape
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.hf.parameter_memory import allocate


class Placeholder(nn.Module):
    """Stands in place of `replaced`, whose attributes it shows; has no parameters."""

    # The profile of modules omits it.
    is_placeholder = True

    def __init__(self, index: int, replaced: nn.Module, on_call: Callable[..., Any] | None) -> None:
        super().__init__()
        # Not a submodule.
        vars(self)["replaced"], self.index, self.on_call = replaced, index, on_call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["replaced"], name)


class LayerPlaceholder(Placeholder):
    """Returns `on_call(index, args, kwargs)`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.on_call is not None
        return self.on_call(self.index, args, kwargs)


class ModuleStub(Placeholder):
    """Runs the replaced module on the meta device; returns zeros that use no memory.

    Outputs in floating point require a gradient, so that what is computed from them is known not to
    be a constant. `on_call(index)` is called first. `dtype`, if set, is that of these outputs.
    """

    dtype: torch.dtype | None = None

    def __init__(self, index: int, replaced: nn.Module, on_call: Callable[..., Any] | None) -> None:
        super().__init__(index, without_values(replaced), on_call)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.on_call is not None:
            self.on_call(self.index)
        return zeros_like_output(vars(self)["replaced"], args, kwargs, self.dtype)


def without_values(module: nn.Module) -> nn.Module:
    """Return a copy with parameters and buffers on the meta device."""
    return allocate(copy.deepcopy(module), "meta")


def zeros_like_output(
    module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype | None = None
) -> Any:
    """Return zeros with the shapes of `module(*args, **kwargs)`; the module is on meta.

    Args:
        dtype: of the outputs in floating point; None: that of the module.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not tensors:
        raise TypeError(f"{type(module).__name__} gets no tensors")
    device = tensors[0].device
    # In half precision the module still has the dtype in which the model was described.
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.to(own) if t.is_floating_point() else t, on_meta((args, kwargs))
    )
    with torch.device("meta"):
        output = module(*args, **kwargs)

    def zeros(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return torch.zeros((), dtype=t.dtype, device=device).expand(t.shape)
        zero = torch.zeros((), dtype=dtype or t.dtype, device=device).expand(t.shape)
        return zero.requires_grad_()

    return pytree.tree_map_only(Tensor, zeros, output)


def on_meta(tree: Any) -> Any:
    """Return the tree with its tensors detached and on the meta device."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), tree)


def set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` (with dots) of `root`."""
    path, _, last = name.rpartition(".")
    setattr(root.get_submodule(path), last, module)

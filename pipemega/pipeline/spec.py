"""What a layer will be, before anybody builds it.

A model is described by a list of `LayerSpec`s; each pipeline rank builds only the layers of its
own stages.  Whatever depends on the mesh, which the description cannot know, is written as
`TENSOR_AXIS` and filled in at that time.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn

from pipemega.errors import ConfigError, PipemegaError
from pipemega.mesh import Axis


class _TensorAxis:
    """The type of `TENSOR_AXIS`."""

    def __repr__(self) -> str:
        return "TENSOR_AXIS"


TENSOR_AXIS: Final = _TensorAxis()
"""In the arguments of a `LayerSpec`: the tensor axis of the mesh that the model will run on."""

Forward = Callable[[nn.Module, Any], Any]


class LayerSpec:
    """A layer to be built later: `LayerSpec(nn.Linear, 16, 64)` for `nn.Linear(16, 64)`.

    Args:
        typename: the class of the layer, or any callable that returns an `nn.Module`.
        args, kwargs: what it is called with; `TENSOR_AXIS` among them becomes the tensor axis.

    Raises:
        ConfigError: `typename` cannot be called, or is a module that was already built.
    """

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if isinstance(typename, nn.Module) or not callable(typename):
            raise ConfigError(
                f"LayerSpec takes the class of a layer and its arguments, not {typename!r}: write "
                f"LayerSpec({type(typename).__name__}, ...), or put the module itself in the list"
            )
        self.typename, self.args, self.kwargs = typename, args, kwargs

    # Whether its parameters were set before pipemega saw them, so that ranks may differ in them.
    already_built = False

    @property
    def name(self) -> str:
        """The name of the class, which `partition: "type:REGEX"` is matched with."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        """The layer itself, on `device` (default: torch's).

        Raises:
            ConfigError: the constructor failed, or returned something else than a module.
        """
        args = [tensor if arg is TENSOR_AXIS else arg for arg in self.args]
        kwargs = {key: tensor if arg is TENSOR_AXIS else arg for key, arg in self.kwargs.items()}
        try:
            with torch.device(device) if device is not None else nullcontext():
                layer = self.typename(*args, **kwargs)
        except PipemegaError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self!r} could not be built: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"{self!r} built {type(layer).__name__}, which is no nn.Module")
        return layer

    def __repr__(self) -> str:
        arguments = [repr(arg) for arg in self.args]
        arguments += [f"{key}={arg!r}" for key, arg in self.kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.name, *arguments])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with every other one of the same `key`.

        TiedLayerSpec("embedding", nn.Embedding, 1000, 64),
        ...
        TiedLayerSpec("embedding", nn.Embedding, 1000, 64, forward_fn=lambda e, x: x @ e.weight.T)

    Each stage that holds one of them has a copy; their gradients are added up before anything
    else is done with them, so that the copies stay equal.

    Args:
        key: the layers with this key are tied.
        forward_fn: called as forward_fn(layer, x) in place of layer(x).
        tied_weight_attr: the parameters that are shared, by name; the others are the layer's own.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Forward | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr: tuple[str, ...] = (
            (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)
        )


class Function(nn.Module):
    """A plain function as a layer without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


Layer = LayerSpec | nn.Module | Callable[[Any], Any]
"""What may stand in the list of a `PipelineModule`."""


def as_spec(layer: Layer, position: int) -> LayerSpec:
    """`layer` as a LayerSpec: modules are taken as they are, functions are wrapped.

    Raises:
        ConfigError: it is none of the three.
    """
    if isinstance(layer, LayerSpec):
        return layer
    if isinstance(layer, nn.Module):
        return _Built(layer)
    if callable(layer):
        return _Wrapped(layer)
    raise ConfigError(
        f"layers[{position}] is {layer!r}; a layer is a LayerSpec, an nn.Module or a function"
    )


class _Built(LayerSpec):
    """A module that the user has built; it is used as it is, not copied."""

    already_built = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module))
        self.module = module

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        if device is not None and torch.device(device).type == "meta":
            return self.module
        return self.module if device is None else self.module.to(device)


class _Wrapped(LayerSpec):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(Function, function)

    @property
    def name(self) -> str:
        return getattr(self.args[0], "__name__", "function")

"""LayerSpec: the class and arguments of a layer that is built later.

A model is a list of `LayerSpec`s; each pipeline rank builds only the layers of its stages. An
argument that depends on the mesh is written as `TENSOR_AXIS` or `EXPERT_AXIS` and replaced when the
layer is built.

Finds trainable modules and parameters that a plain function uses.

No stage owns them: they would not be trained, moved to the device of the rank, or saved.

    lambda x: model.head(x)                 a global or an enclosing variable
    def layer(x, weight=weight): ..         a default
    partial(attend, module)                 an argument
    [function, {"norm": module}]            a container in one of these
"""

import copy
import dis
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipemegaError, code_of_user
from pipemega.parameters import attach_shard, shard_of

_SIZES = ("size", "dim", "numel")


def captured_names(value: Any) -> dict[str, str]:
    """Return name in the code -> class of each trainable module or tensor that `value` uses.

    Args:
        value: a function, a module, or a container of them.
    """
    found: dict[str, str] = {}
    _collect("", value, found, {})
    return found


def _collect(name: str, value: Any, found: dict[str, str], seen: dict[int, Any]) -> None:
    if isinstance(value, nn.Module):
        if any(p.requires_grad for p in value.parameters()):
            found[name] = type(value).__name__
    elif isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            found[name] = type(value).__name__
    elif id(value) not in seen:
        # Keep the value, so that no other one gets its id.
        seen[id(value)] = value
        for part_name, part in _parts(name, value):
            _collect(part_name, part, found, seen)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what a function or a container uses."""
    if isinstance(value, partial):
        yield name, value.func
        yield from _parts(name or "an argument of partial", [*value.args, *value.keywords.values()])
    elif isinstance(value, MethodType):
        if isinstance(value.__self__, nn.Module):
            yield name, value.__self__
        elif isinstance(value.__func__, FunctionType):
            yield from _used_values(value.__func__, bound_to=value.__self__)
    elif isinstance(value, FunctionType):
        yield from _used_values(value)
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((name, part) for part in value)
    elif isinstance(call := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004
        yield name, MethodType(call, value)


def _used_values(function: FunctionType, bound_to: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield each variable from outside of `function` that it uses, with its attributes."""
    variables: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            variables[name] = cell.cell_contents
    for chain, value in _loads(function.__code__, variables, function.__globals__, bound_to):
        # Do not search the functions of other files, such as torch's.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            yield chain, value
    defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
    yield "a default argument", defaults


def _loads(
    code: CodeType, variables: Mapping[str, Any], namespace: Mapping[str, Any], bound_to: Any
) -> Iterator[tuple[str, Any]]:
    """Yield (a.b.c, value) for each chain of attributes that `code` loads."""
    chain, value = "", None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            with suppress(Exception):
                below = getattr(value, step.argval)
                # weight.T and weight.t() use the weight, weight.shape does not.
                uses = isinstance(below, Tensor) or callable(below)
                if not (isinstance(value, Tensor) and uses) or step.argval in _SIZES:
                    chain, value = f"{chain}.{step.argval}", below
                continue
        if chain:
            yield chain, value
        chain, value = "", None
        if step.opname == "LOAD_GLOBAL" and step.argval in namespace:
            chain, value = step.argval, namespace[step.argval]
        elif step.opname == "LOAD_DEREF" and step.argval in variables:
            chain, value = step.argval, variables[step.argval]
        elif (
            bound_to is not None
            and step.opname.startswith("LOAD_FAST")
            and step.argval == code.co_varnames[0]
        ):
            chain, value = step.argval, bound_to
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loads(constant, variables, namespace, None)


class _AxisOfMesh:
    """The type of `TENSOR_AXIS` and `EXPERT_AXIS`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __deepcopy__(self, memo: object) -> "_AxisOfMesh":
        return self


TENSOR_AXIS: Final = _AxisOfMesh("TENSOR_AXIS")
"""Placeholder in the arguments of a `LayerSpec` for the tensor axis of the mesh."""

EXPERT_AXIS: Final = _AxisOfMesh("EXPERT_AXIS")
"""Placeholder for the expert axis: the data ranks that share the experts of a layer."""

Forward = Callable[[nn.Module, Any], Any]


class LayerSpec:
    """A layer to be built later: `LayerSpec(nn.Linear, 16, 64)` for `nn.Linear(16, 64)`.

    Args:
        typename: the class of the layer, or a callable that returns an `nn.Module`.
        args, kwargs: the arguments of `typename`; `TENSOR_AXIS` and `EXPERT_AXIS` are replaced by
            axes of the mesh.
        device: "cpu" or "cuda": the layer is in a stage on such a device; None: on any. It is not
            an argument of the layer, which is built on the device of its stage.

    Raises:
        ConfigError: `typename` is not callable, or is a built module; `device` is another one.
    """

    def __init__(
        self,
        typename: Callable[..., nn.Module],
        *args: Any,
        device: str | torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(typename, nn.Module):
            name = type(typename).__name__
            raise ConfigError(
                f"{type(self).__name__} takes the class of a layer and its arguments, not a built "
                f"{name}: write {type(self).__name__}({name}, ...), or put the module itself in "
                f"the list",
                on_every_rank=True,
            )
        if not callable(typename):
            raise ConfigError(
                f"{type(self).__name__} takes the class of a layer and its arguments, such as "
                f"LayerSpec(nn.Linear, 16, 64), not {_described(typename)}",
                on_every_rank=True,
            )
        self.typename, self.args, self.kwargs = typename, args, kwargs
        self.device = _device_name(device, self)

    # Specs with equal keys are known to build equal layers; None: the arguments decide.
    equality_key: object = None
    # True for a module that the user built.
    already_built = False
    # Called as forward_fn(layer, x) instead of layer(x).
    forward_fn: Forward | None = None

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        """Parameter name -> (key, name under this key); equal pairs of two layers are tied."""
        return {}

    @property
    def name(self) -> str:
        """The name of the class; `partition: "type:REGEX"` matches it."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        """Build the layer on `device` (default: torch's default device).

        Raises:
            ConfigError: the constructor failed, or returned no module.
        """
        whole = self._replaced({TENSOR_AXIS: tensor, EXPERT_AXIS: Axis("expert")})
        args, kwargs = whole.args, whole.kwargs
        try:
            with torch.device(device) if device is not None else nullcontext():
                layer = self.typename(*args, **kwargs)
        except PipemegaError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self!r} could not be built: {type(error).__name__}: {error}{self._advice}"
            ) from error
        if not isinstance(layer, nn.Module):
            raise ConfigError(
                f"{self!r} built {type(layer).__name__}, which is not an nn.Module{self._advice}",
                on_every_rank=True,
            )
        return layer

    def on_expert_axis(self, expert: Axis) -> "LayerSpec":
        """Return the spec of the layer for this rank of the expert axis."""
        given = (*self.args, *self.kwargs.values())
        has_experts = any(arg is EXPERT_AXIS for arg in given)
        return self._replaced({EXPERT_AXIS: expert}) if has_experts else self

    def _replaced(self, axes: Mapping[Any, Axis]) -> "LayerSpec":
        """Return a copy with axes in place of the placeholders."""
        by_id = {id(placeholder): axis for placeholder, axis in axes.items()}
        copied = copy.copy(self)
        copied.args = tuple(by_id.get(id(arg), arg) for arg in self.args)
        copied.kwargs = {key: by_id.get(id(arg), arg) for key, arg in self.kwargs.items()}
        return copied

    @property
    def _advice(self) -> str:
        """Advice for a LayerSpec around a function that is a layer itself."""
        if isinstance(self.typename, type) or self.args or self.kwargs:
            return ""
        return f"; if {self.name} is itself the layer, put it in the list without LayerSpec"

    def on_meta(self) -> "LayerSpec":
        """Return a spec that builds the same layer on the meta device, without using this one."""
        return self

    def __repr__(self) -> str:
        arguments = [repr(arg) for arg in self.args]
        arguments += [f"{key}={arg!r}" for key, arg in self.kwargs.items()]
        arguments += [f"device={self.device!r}"] * (self.device is not None)
        return f"{type(self).__name__}({', '.join([self.name, *arguments])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with all other layers of the same `key`.

        TiedLayerSpec("embedding", nn.Embedding, 1000, 64),
        ...
        TiedLayerSpec("embedding", nn.Embedding, 1000, 64, forward_fn=lambda e, x: x @ e.weight.T)

    Each stage with such a layer has a copy of the weights. The gradients of all copies are
    summed before any other reduction, so the copies stay equal.

    Args:
        key: layers with the same key are tied.
        forward_fn: called as forward_fn(layer, x) instead of layer(x).
        tied_weight_attr: names of the shared parameters; the other parameters are not shared.
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

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        return {name: (self.key, name) for name in self.tied_weight_attr}


def _device_name(device: Any, spec: LayerSpec) -> str | None:
    """Return the `device` of a spec as a name.

    Raises:
        ConfigError: it is neither "cpu" nor "cuda".
    """
    if isinstance(device, torch.device):
        device = str(device)
    if device in (None, "cpu", "cuda"):
        name: str | None = device
        return name
    raise ConfigError(
        f"{type(spec).__name__}({spec.name}, device={device!r}): device is 'cpu' or 'cuda', the "
        f"kind of device of the layer's stage; which GPU it is depends on the rank of the stage",
        on_every_rank=True,
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
"""An entry in the list of a `PipelineModule`."""


def as_specs(layers: Any) -> tuple[LayerSpec, ...]:
    """Return the list of layers of a `PipelineModule` as LayerSpecs.

    Raises:
        ConfigError: it is not a list, is empty, or an entry is not a layer; the same on every rank.
    """
    is_list = isinstance(layers, Iterable) and not isinstance(layers, str | bytes | dict)
    if not is_list or isinstance(layers, nn.ModuleDict):
        raise ConfigError(
            f"PipelineModule takes a list of layers, not {_described(layers)}: write "
            f"PipelineModule([layer, layer, ...], loss_fn=...); an nn.Sequential is a list too",
            on_every_rank=True,
        )
    specs = tuple(_as_spec(layer, position) for position, layer in enumerate(layers))
    if not specs:
        raise ConfigError("a PipelineModule needs at least one layer", on_every_rank=True)
    return specs


def _as_spec(layer: Any, position: int) -> LayerSpec:
    where = f"layers[{position}]"
    if isinstance(layer, LayerSpec):
        if layer.forward_fn is not None:
            _refuse_captured(layer.forward_fn, f"{where} ({layer.name}): its forward_fn")
        return layer
    if isinstance(layer, nn.Module):
        return _BuiltModuleSpec(layer)
    if callable(layer) and not isinstance(layer, type):
        method = layer.func if isinstance(layer, partial) else layer
        owner = getattr(method, "__self__", None)
        if isinstance(owner, nn.Module):
            if isinstance(layer, partial):
                _refuse_captured([*layer.args, layer.keywords], f"{where} (partial)")
            return _MethodSpec(owner, layer, method.__name__)
        _refuse_captured(layer, f"{where} ({getattr(layer, '__name__', 'a function')})")
        return _FunctionSpec(layer)
    advice = ""
    if isinstance(layer, type) and issubclass(layer, nn.Module):
        name = layer.__name__
        advice = f": write {name}(...) for a built module, or LayerSpec({name}, ...)"
    elif isinstance(layer, list | tuple):
        advice = ": write *layers to put its entries in the list"
    raise ConfigError(
        f"{where} is {_described(layer)}{advice}; a layer is a LayerSpec, an nn.Module or a "
        f"function",
        on_every_rank=True,
    )


def _refuse_captured(function: Any, what: str) -> None:
    """Raise ConfigError if `function`, called `what`, uses trainable modules or parameters."""
    captured = captured_names(function)
    if captured:
        names = ", ".join(f"{name} ({kind})" for name, kind in captured.items())
        raise ConfigError(
            f"{what} is a function that uses {names}, whose parameters no layer contains, so they "
            f"would not be trained: put the module itself, or a method of it, in the list; or "
            f"write an nn.Module that contains it. For shared weights use TiedLayerSpec",
            on_every_rank=True,
        )


def _described(value: Any) -> str:
    """Return a short description of a value that is not a layer."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    return f"of type {type(value).__name__}"


class _BuiltModuleSpec(LayerSpec):
    """A module that the user has built; it is used directly, not copied."""

    already_built = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module))
        self.module = module

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        if device is not None and torch.device(device).type == "meta":
            return self.module
        return self.module if device is None else self.module.to(device)

    def on_meta(self) -> LayerSpec:
        memo: dict[int, Any] = {}
        for p in self.module.parameters():
            empty = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            memo[id(p)] = attach_shard(empty, shard_of(p))
        for b in self.module.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
        with code_of_user(f"{self.name} cannot be copied to the meta device"):
            return _BuiltModuleSpec(copy.deepcopy(self.module, memo))


class _MethodSpec(_BuiltModuleSpec):
    """A method of a module that the user has built; the layer is the module."""

    def __init__(self, module: nn.Module, method: Callable[[Any], Any], name: str) -> None:
        super().__init__(module)
        self._name = f"{type(module).__name__}.{name}"
        self.forward_fn = lambda _, x: method(x)

    @property
    def name(self) -> str:
        return self._name

    def on_meta(self) -> LayerSpec:
        raise ConfigError(f"{self._name} is a method of a built module")


class _FunctionSpec(LayerSpec):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(Function, function)

    @property
    def name(self) -> str:
        return getattr(self.args[0], "__name__", "function")


def remedy(layer: nn.Module, position: int, x: Any, error: Exception) -> str:
    """Return what to do about the error of the layer at `position`, if it is a known one."""
    if "more than 1 value per channel" in str(error):
        joined = any(getattr(m, "sync", isinstance(m, nn.SyncBatchNorm)) for m in layer.modules())
        join = "join the statistics over data ranks (deferred_batch_norm='sync'), "
        return (
            "; BatchNorm needs at least 2 values per channel in each micro-batch: raise "
            "train_micro_batch_size_per_gpu, set dataloader_drop_last if only the last "
            f"micro-batch of an epoch is smaller, {'' if joined else join}or use GroupNorm"
        )
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), None)
    if dtype is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return ""
    if x.dtype == dtype:
        floats = ((n, b.dtype) for n, b in layer.named_buffers() if b.is_floating_point())
        name, other = next((pair for pair in floats if pair[1] != dtype), ("", dtype))
        if not name or "dtype" not in str(error):
            return ""
        return f"; its parameters are {dtype} and its buffer {name!r} is {other}: cast the buffer"
    cast = ", or set fp16.auto_cast" if dtype == torch.float16 else ""
    remedy = f"cast the data{cast}"
    if position:
        remedy = "cast the output of the layer before, which may have a buffer of that dtype"
    return f"; its parameters are {dtype} and its input is {x.dtype}: {remedy}"

"""Modules in the place of those that a part of a model does not have.

LayerPlaceholder    in place of a layer: calls a function with the arguments of the layer
ModuleStub          in place of another module with parameters: returns a tensor of the right shape

Memory of parameters: a model without it, and modules that get it later.

parameters    on the meta device in the description; allocated when a rank builds its part
buffers       real in the description: some are computed only by the constructor (rotary
              frequencies, masks), and would be lost on the meta device

Runs of a transformers model on the meta device, for plans.

transformers reads values to choose masks, such as whether the positions contain several documents.
Tensors on the meta device have none. So the model is run on the CPU first, without its layers and
with zeros as inputs; the run on the meta device then gets the values that the first one has read.

The unsplit model of transformers on the meta device: names, shapes and ties of its tensors.

Imports transformers, or says which version to install.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipemega.errors import ConfigError


class _EmptyOnMeta(TorchFunctionMode):
    """Creates tensors of `torch.empty` on the meta device.

    The experts of one layer may be larger than the memory of a machine.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a constructor registers it."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            attributes = vars(parameter)
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(parameter).update(attributes)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Give parameters memory on `device`, without values; move the buffers there.

    Unlike `nn.Module.to_empty`, this keeps the attributes of parameters, such as their `Shard`.
    """
    allocated: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in allocated:
                allocated[id(parameter)] = _empty_like(parameter, device)
            part._parameters[name] = allocated[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module


def _empty_like(parameter: nn.Parameter, device: Any) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    vars(empty).update(vars(parameter))
    return empty


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
    be a constant. `on_call(index)` is called first. These outputs have the dtype `dtype`, if set.
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
        dtype: the dtype of the outputs in floating point; None: keep the dtype that the module
            returns.
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


# Functions that return a value of a tensor to Python.
_READS = (
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__,
    Tensor.item, Tensor.tolist, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose,
)  # fmt: skip


class _RecordReads(TorchFunctionMode):
    """Keeps the values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.values: deque[Any] = deque()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _READS:
            self.values.append(result)
        return result


class _ReplayReads(TorchFunctionMode):
    """Returns these values, in order, to those who read meta tensors."""

    def __init__(self, values: deque[Any]) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and args[0].is_meta and self._values:
            return self._values.popleft()
        return func(*args, **(kwargs or {}))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run on the CPU, unseen by the meters of a plan."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


def zeros_on_cpu(tree: Any) -> Any:
    """Return the tree with zeros on the CPU, which use no memory; masks are ones."""

    def values(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_mask = "mask" in pytree.keystr(path)
        fill = torch.ones if is_mask else torch.zeros
        return fill((), dtype=leaf.dtype, device="cpu").expand(leaf.shape)

    return pytree.tree_map_with_path(values, tree)


def run_on_meta(run: Callable[[], Any], run_on_cpu: Callable[[], Any]) -> Any:
    """Return `run()` with the values that `run_on_cpu` reads."""
    with on_cpu(), _RecordReads() as record:
        run_on_cpu()
    with _ReplayReads(record.values):
        return run()


def whole_model(config: Any, class_name: str) -> Any:
    """Return the model of transformers without memory, with all its layers.

    Args:
        config: a `PretrainedConfig`; copied.
        class_name: a class of transformers, such as "LlamaForCausalLM".
    """
    import transformers

    with torch.device("meta"):
        return getattr(transformers, class_name)._from_config(copy.deepcopy(config))


MINIMUM, BELOW = (5, 9), (6, 0)


def import_transformers() -> Any:
    """Return the module `transformers`.

    Raises:
        ConfigError: it is not installed, or its version is not supported.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"Hugging Face models need transformers ({error}): pip install 'pipemega[hf]'"
        ) from error
    version = transformers.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not MINIMUM <= numbers < BELOW:
        raise ConfigError(
            f"transformers {version} is installed; pipemega needs "
            f">= {MINIMUM[0]}.{MINIMUM[1]}, < {BELOW[0]}: pip install 'pipemega[hf]'"
        )
    return transformers


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which loads and saves small models for a command."""
    logging = import_transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

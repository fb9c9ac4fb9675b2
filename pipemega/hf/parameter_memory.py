"""Memory of parameters: a model without it, and modules that get it later.

parameters    on the meta device in the description; allocated when a rank builds its part
buffers       real in the description: some are computed only by the constructor (rotary
              frequencies, masks), and would be lost on the meta device
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


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

"""Keeps float64: models of transformers cast norms, softmax, positions and losses to float32."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CASTS = ("to", "type")


class KeepFloat64(TorchFunctionMode):
    """Within this mode, no operation casts a float64 tensor to float32.

    In float64 the results of a model that is split over ranks and of the unsplit model differ
    only by the order of sums, about 1e-15. A cast to float32 in between would raise this to 1e-7,
    which hides errors.

        with KeepFloat64():
            loss = model(input_ids=ids, labels=labels).loss
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not (args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "float":
            return args[0]
        if name in _CASTS:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

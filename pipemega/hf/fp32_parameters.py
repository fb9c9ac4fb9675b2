"""Parameters that transformers keeps in fp32 in a model of half precision."""

import re
from typing import Any

import torch
from torch import nn

from pipemega.parameters import is_kept_fp32, keep_fp32_in


def keep_in_fp32(module: nn.Module, model: Any, path: str) -> None:
    """Mark the parameters of `module` that the model keeps in fp32.

    Args:
        model: the transformers model.
        path: name of `module` in the model.
    """
    for name, parameter in module.named_parameters():
        full = f"{path}.{name}"
        dtypes = (torch.float16, torch.bfloat16)
        kept = tuple(dtype for dtype in dtypes if stays_fp32(model, full, dtype))
        if kept:
            keep_fp32_in(parameter, kept)


def stays_fp32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether transformers keeps a tensor in fp32 in a model of `dtype`.

    `_keep_in_fp32_modules` applies to fp16, `_keep_in_fp32_modules_strict` to bf16 too. As in
    transformers, they are searched for in the whole name.
    """
    patterns: set[str] = set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def cast_parameter(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return (owner, name) of a parameter that has the dtype of the run; None if all are fp32."""
    cast = (
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and not is_kept_fp32(parameter, torch.float16)
    )
    return next(cast, None)

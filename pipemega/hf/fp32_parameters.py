"""Parameters that transformers keeps in fp32 in a model of half precision."""

from typing import Any

import torch
from torch import nn

from pipemega.parameters import keep_fp32_in


def keep_in_fp32(module: nn.Module, model: Any, path: str) -> None:
    """Mark the parameters of `module` that the model keeps in fp32.

    `_keep_in_fp32_modules` applies to fp16, `_keep_in_fp32_modules_strict` to bf16 too.

    Args:
        model: the transformers model.
        path: name of `module` in the model.
    """
    for names, dtypes in (
        (model._keep_in_fp32_modules, (torch.float16,)),
        (model._keep_in_fp32_modules_strict, (torch.float16, torch.bfloat16)),
    ):
        for name, parameter in module.named_parameters():
            if set(f"{path}.{name}".split(".")) & set(names or ()):
                keep_fp32_in(parameter, dtypes)

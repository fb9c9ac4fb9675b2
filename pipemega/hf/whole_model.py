"""The unsplit model of transformers on the meta device: names, shapes and ties of its tensors."""

import copy
import re
from typing import Any

import torch


def whole_model(config: Any, class_name: str) -> Any:
    """Return the model of transformers without memory, with all its layers.

    Args:
        config: a `PretrainedConfig`; copied.
        class_name: a class of transformers, such as "LlamaForCausalLM".
    """
    import transformers

    with torch.device("meta"):
        return getattr(transformers, class_name)._from_config(copy.deepcopy(config))


def keeps_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether transformers keeps a tensor in fp32 in a model of dtype `dtype`."""
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)

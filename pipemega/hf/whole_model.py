"""The unsplit model of transformers on the meta device: names, shapes and ties of its tensors."""

import copy
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

"""The transformers model of layers that one process has built; it shares their parameters."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.errors import ConfigError
from pipemega.hf.families import family_of
from pipemega.hf.hf_module import HFPipelineModule
from pipemega.hf.parameter_memory import parameters_on_meta
from pipemega.hf.weight_source import is_transposed
from pipemega.lora.merging import is_adapter, with_adapter


def unsplit_model(net: HFPipelineModule, layers: Mapping[int, nn.Module]) -> Any:
    """Return the transformers model with the parameters of `layers`, in evaluation mode.

    No parameter is copied, so what changes them changes both; except weights with an adapter, which
    is merged into the copy.

    Args:
        layers: of all positions of `net`, built without tensor ranks.

    Raises:
        ConfigError: layers lack a parameter of the model, or have others.
    """
    tensors: dict[str, Tensor] = {}
    for position, layer in layers.items():
        for inner, tensor in layer.state_dict(keep_vars=True).items():
            if is_adapter(inner):
                continue
            value = with_adapter(layer, inner, tensor.detach())
            value = value.T if is_transposed(tensor) else value
            # Tied parameters have the same name.
            tensors.setdefault(net.hf_name(f"layers.{position}.{inner}"), value)
    described = net.description
    with parameters_on_meta():
        model: Any = type(described.model)._from_config(
            copy.deepcopy(described.config), dtype=torch.get_default_dtype()
        )
    _, others = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    # Each layer has its own copy of what only the first one has in the model.
    shared = tuple(f".{name}" for name in family_of(described.config).shared)
    unexpected = [name for name in others if not name.endswith(shared)]
    if unexpected or missing:
        raise ConfigError(
            f"{described.class_name} of transformers cannot be made of the layers: they lack "
            f"{', '.join(missing) or 'nothing'}, and have {', '.join(unexpected) or 'nothing'} "
            f"besides",
            on_every_rank=True,
        )
    # The parameters have it; the buffers were computed on the CPU.
    device = next(iter(tensors.values())).device
    return model.to(device).eval().requires_grad_(False)

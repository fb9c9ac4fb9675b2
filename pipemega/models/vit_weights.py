"""Weights of a ViT with the names of torchvision's `VisionTransformer`, in both directions.

    torchvision                                     here
    conv_proj                                       layers.0.projection
    class_token                                     layers.0.class_token
    encoder.pos_embedding                           layers.0.positions
    encoder.layers.encoder_layer_<i>.ln_1           layers.<1 + i>.attention_norm
      .self_attention.in_proj_weight, _bias           .attention.qkv.weight, .bias
      .self_attention.out_proj                        .attention.output
      .ln_2, .mlp.0, .mlp.3                           .mlp_norm, .mlp.up, .mlp.down
    encoder.ln                                      layers.<1 + L>.norm
    heads.head                                      layers.<1 + L>.linear

All tensors have the same layout. Files of torchvision's first version name the linear layers
mlp.linear_1 and mlp.linear_2.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from pipemega.errors import ConfigError
from pipemega.models.loaded_values import with_values
from pipemega.models.vit_config import ViTConfig
from pipemega.pipeline.module import PipelineModule

_EMBEDDING = {
    "conv_proj.": "projection.",
    "class_token": "class_token",
    "encoder.pos_embedding": "positions",
}
_BLOCK = {
    "ln_1.": "attention_norm.",
    "self_attention.in_proj_": "attention.qkv.",
    "self_attention.out_proj.": "attention.output.",
    "ln_2.": "mlp_norm.",
    "mlp.0.": "mlp.up.",
    "mlp.3.": "mlp.down.",
}
_HEAD = {"encoder.ln.": "norm.", "heads.head.": "linear."}
_OLD_NAMES = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
_BLOCK_PREFIX = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.")


def vit_from_torchvision(
    net: PipelineModule, state: Mapping[str, Tensor], *, new_head: bool = False
) -> PipelineModule:
    """Return the ViT with the weights of torchvision's `state_dict()`.

        weights = torchvision.models.vit_b_16(weights="DEFAULT").state_dict()
        net = vit_from_torchvision(pipemega.build_model(config, mesh), weights, new_head=True)

    Args:
        net: of `build_model` or `vit`.
        new_head: initialize the head, for another number of classes.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape; the same on every rank.
    """
    head = len(net) - 1
    values = {_our_name(name, head): tensor for name, tensor in state.items()}
    if not new_head:
        return with_values(net, values)
    new = {f"layers.{head}.linear.{name}" for name in ("weight", "bias")}
    return with_values(net, {n: v for n, v in values.items() if n not in new}, new)


def vit_to_torchvision(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with torchvision's names.

        torch.save(vit_to_torchvision(engine.parameter_state()), "vit.pth")

    Args:
        parameters: logical name -> unsharded parameter of a ViT.

    Raises:
        ConfigError: the ViT has no class token, which torchvision's has; or it is no ViT.
    """
    if "layers.0.projection.weight" not in parameters:
        raise ConfigError("these are not the parameters of a ViT: they have no patch embedding")
    if "layers.0.class_token" not in parameters:
        raise ConfigError(
            "torchvision's VisionTransformer has a class token, and this ViT has none "
            "(model.pool 'mean'): torchvision cannot load its weights"
        )
    head = max(int(name.split(".")[1]) for name in parameters)
    return {_their_name(name, head): tensor for name, tensor in parameters.items()}


def _our_name(name: str, head: int) -> str:
    found = _BLOCK_PREFIX.match(name)
    if found is None:
        ours = _renamed(name, _EMBEDDING)
        if ours is not None:
            return f"layers.0.{ours}"
        ours = _renamed(name, _HEAD)
        return name if ours is None else f"layers.{head}.{ours}"
    inner = name[found.end() :]
    inner = _renamed(inner, _OLD_NAMES) or inner
    first = ViTConfig.first_block
    return f"layers.{first + int(found[1])}.{_renamed(inner, _BLOCK) or inner}"


def _their_name(name: str, head: int) -> str:
    _, position, inner = name.split(".", 2)
    number = int(position)
    table = _EMBEDDING if number == 0 else _HEAD if number == head else _BLOCK
    theirs = _renamed(inner, {ours: theirs for theirs, ours in table.items()}) or inner
    if table is not _BLOCK:
        return theirs
    return f"encoder.layers.encoder_layer_{number - ViTConfig.first_block}.{theirs}"


def _renamed(name: str, table: Mapping[str, str]) -> str | None:
    """Return the name with another start; None: the table has no start of it."""
    for start, other in table.items():
        if name.startswith(start):
            return other + name[len(start) :]
    return None

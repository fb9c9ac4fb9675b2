"""Models as lists of LayerSpecs, and the model of a config."""

from pipemega.models.build_model import ModelContext, build_model
from pipemega.models.gpt import GPTConfig, gpt, layer_inputs
from pipemega.models.vit import ViTConfig, vit

__all__ = [
    "GPTConfig",
    "ModelContext",
    "ViTConfig",
    "build_model",
    "gpt",
    "layer_inputs",
    "vit",
]

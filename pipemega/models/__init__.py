"""Models as lists of LayerSpecs, and the model of a config."""

from pipemega.models.build_model import ModelContext, build_model
from pipemega.models.gpt import gpt
from pipemega.models.gpt_config import GPTConfig
from pipemega.models.layer_inputs import layer_inputs
from pipemega.models.vit import vit
from pipemega.models.vit_config import ViTConfig

__all__ = [
    "GPTConfig",
    "ModelContext",
    "ViTConfig",
    "build_model",
    "gpt",
    "layer_inputs",
    "vit",
]

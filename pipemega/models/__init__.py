"""Models as lists of LayerSpecs."""

from pipemega.models.gpt import gpt
from pipemega.models.gpt_config import GPTConfig
from pipemega.models.layer_inputs import layer_inputs

__all__ = ["GPTConfig", "gpt", "layer_inputs"]

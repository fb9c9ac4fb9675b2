"""Models as lists of LayerSpecs."""

from pipemega.models.gpt import GPTConfig, gpt
from pipemega.models.layer_inputs import layer_inputs

__all__ = ["GPTConfig", "gpt", "layer_inputs"]

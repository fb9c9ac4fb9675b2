"""Models as lists of LayerSpecs."""

from pipemega.models.gpt import GPTConfig, gpt

__all__ = ["GPTConfig", "gpt"]

"""WeightSource: where the parameters of a Hugging Face model get their first values from."""

from typing import Protocol

from torch import Tensor, nn


class WeightSource(Protocol):
    """Reads parameters and buffers by their names in the state_dict of the transformers model."""

    def has(self, name: str) -> bool:
        """Return whether there is a value; without one, HF initialises the parameter."""

    def load(self, name: str, tensor: Tensor) -> None:
        """Fill `tensor`, this rank's shard (`parameters.shard_of`) of HF's tensor `name`.

        If `is_transposed(tensor)`, HF stores the transpose of the logical tensor.
        """


def mark_transposed(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that HF stores transposed (transformers' Conv1D); return it."""
    parameter._pipemega_transposed = True  # type: ignore[attr-defined]
    return parameter


def is_transposed(tensor: Tensor) -> bool:
    """Return whether HF stores the transpose of this parameter."""
    return getattr(tensor, "_pipemega_transposed", False)

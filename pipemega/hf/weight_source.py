"""WeightSource: where the parameters of a Hugging Face model get their first values from."""

from typing import Protocol

from torch import Tensor

from pipemega.parameters import is_transposed, mark_transposed

__all__ = ["WeightSource", "is_transposed", "mark_transposed"]


class WeightSource(Protocol):
    """Reads parameters and buffers by their names in the state_dict of the transformers model."""

    def has(self, name: str) -> bool:
        """Return whether there is a value; without one, HF initialises the parameter."""

    def load(self, name: str, tensor: Tensor) -> None:
        """Fill `tensor`, this rank's shard (`parameters.shard_of`) of HF's tensor `name`.

        If `is_transposed(tensor)`, HF stores the transpose of the logical tensor.
        """

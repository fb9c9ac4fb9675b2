"""Which layers of a transformers model are equal, so that a plan measures only one of them."""

from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

from pipemega.hf.description import ModelDescription

# Attributes in which equal layers differ: their position.
_POSITIONS = ("layer_idx", "layer_id", "layer_number")


def equality_key(description: ModelDescription, index: int) -> Hashable:
    """Return a key that is equal for layers with the same structure, sizes and settings."""
    d = description
    stack, _ = d.places[index]
    number, length = index - d.first_of_stack[stack], sum(s == stack for s, _ in d.places)
    # The model may choose the mask of a layer by these lists of its config.
    lists = {
        name: value[number]
        for name, value in vars(d.config.get_text_config()).items()
        if isinstance(value, list | tuple) and len(value) == length
    }
    return repr((stack, sorted(lists.items()), tuple(_settings(d.layers[index]))))


def _settings(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    for name, module in layer.named_modules():
        values = sorted(
            (key, value)
            for key, value in vars(module).items()
            if key not in _POSITIONS and isinstance(value, bool | int | float | str | None)
        )
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        yield name, type(module).__qualname__, values, tensors

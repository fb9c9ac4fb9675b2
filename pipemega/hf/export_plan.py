"""ExportPlan: the tensors of an exported folder, and which tensors are converted together."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor


class ExportPlan:
    """What the tensors of a model become in the folder; all without values.

    Args:
        model: of transformers, whole, on the meta device.
        tensors: name in the model -> meta tensor in the dtype of the export.

    Attributes:
        hub: name in the folder -> meta tensor, in HF's order.
        groups: names in the model that are converted together, in HF's order.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        # New tensors: those of transformers can be views of larger ones.
        self.hub = {
            name: torch.empty(made.shape, dtype=made.dtype, device="meta")
            for name, made in self.convert(tensors).items()
        }
        self._separable: dict[str, bool] = {}
        self.groups = list(self._groups(tensors))

    @property
    def size(self) -> int:
        """Bytes of all tensors in the folder."""
        return sum(tensor.nbytes for tensor in self.hub.values())

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names and in the shapes of the hub."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return converted

    def _groups(self, tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Yield groups: single tensors where possible, else tensors of one layer."""
        layers: dict[str, list[str]] = defaultdict(list)
        numbers = count()
        for name in tensors:
            # A tensor outside of the layers is never converted with others.
            layer = re.match(r".*?\.\d+\.", name)
            layers[layer.group() if layer else f"{next(numbers)}"].append(name)
        for names in layers.values():
            together = [name for name in names if not self._is_separable(name, tensors[name])]
            if together:
                yield together
            for name in names:
                if name not in together:
                    yield [name]

    def _is_separable(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor that is converted alone becomes what it should."""
        # Layers of one kind have the same rules.
        kind = re.sub(r"\d+", "0", name) + str(tuple(tensor.shape))
        if kind not in self._separable:
            try:
                alone = self.convert({name: tensor})
            # An operation that needs several tensors fails with any exception.
            except Exception:
                alone = {}
            self._separable[kind] = bool(alone) and all(
                key in self.hub and self.hub[key].shape == made.shape for key, made in alone.items()
            )
        return self._separable[kind]

"""A whole batch (inputs, labels) of a data rank: its samples, and its micro-batches."""

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.errors import ConfigError
from pipemega.pipeline.messages import map_tensors, tensors_of


def count_samples(batch: Any) -> int | None:
    """Return the samples along dim 0 of the tensors of a batch; None if it has no tensor.

    Raises:
        ConfigError: it is not a pair, a tensor has no dim 0, or two have different lengths.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        members = f" of {len(batch)} members" if isinstance(batch, tuple | list) else ""
        raise ConfigError(
            f"batch is a {type(batch).__name__}{members}, and must be a pair (inputs, labels); "
            "each of them may be any pytree of tensors"
        )
    first: tuple[str, int] | None = None
    tensors_of(batch)  # makes the fields of a dataclass visible
    leaves = [
        (part + pytree.keystr(path), leaf)
        for part, tree in zip(("inputs", "labels"), batch, strict=True)
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]
    ]
    for name, leaf in leaves:
        if isinstance(leaf, np.ndarray):
            raise ConfigError(f"batch: {name} is a numpy array: pass torch.from_numpy({name})")
        if not isinstance(leaf, Tensor):
            continue
        if leaf.dim() == 0:
            raise ConfigError(
                f"batch: {name} is a tensor without dims, and a batch is cut along dim 0 of its "
                "tensors: give it a dim 0 with one entry per sample, or pass a number"
            )
        if first is None:
            first = name, len(leaf)
        elif len(leaf) != first[1]:
            raise ConfigError(
                f"batch: {first[0]} has {first[1]} samples along dim 0, and {name} has "
                f"{len(leaf)}: all tensors of a batch need the same number"
            )
    return None if first is None else first[1]


def split_batch(batch: Any, num_samples: int, size: int) -> list[tuple[Any, Any]]:
    """Cut the tensors of a batch into micro-batches of `size` along dim 0; the last may be smaller.

    Other values, such as numbers, are in every micro-batch.
    """

    def part(start: int) -> tuple[Any, Any]:
        def cut(tensor: Tensor) -> Tensor:
            return tensor[start : start + size]

        inputs, labels = map_tensors(cut, list(batch))
        return inputs, labels

    return [part(start) for start in range(0, num_samples, size)]

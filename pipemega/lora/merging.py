"""Merging: the weight of a linear with its adapter, W + scale * B A."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from pipemega.lora.low_rank import SCALE, A, B

Rows = tuple[int, int] | None


def is_adapter(name: str) -> bool:
    """Return whether `name` is that of a tensor of an adapter."""
    return f".{name}".endswith((f".{A}.weight", f".{B}.weight"))


def adapter_of(name: str) -> tuple[str, str]:
    """Return the names of A and B of the weight `name`."""
    module = name.removesuffix("weight")
    return f"{module}{A}.weight", f"{module}{B}.weight"


def merged(
    name: str,
    weight: Tensor,
    rows: Rows,
    scale: float,
    names: Collection[str],
    read: Callable[[str, Rows], Tensor],
) -> Tensor:
    """Return rows of a weight with the adapter, computed in fp32 or better.

    Args:
        name: of the weight; without an adapter it is returned as it is.
        weight: [rows, in], of the unsharded weight.
        rows: [start, stop); None: all.
        scale: `LoraSection.scale`.
        names: of all tensors.
        read: returns rows of a tensor.
    """
    a, b = adapter_of(name)
    if not name.endswith("weight") or a not in names:
        return weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    product = read(b, rows).to(dtype) @ read(a, None).to(dtype)
    return torch.add(weight.to(dtype), product, alpha=scale)


def with_adapter(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a built, unsharded layer; a weight with an adapter merged, as a copy.

    Args:
        name: in the state_dict of the layer.
    """
    path, _, last = name.rpartition(".")
    linear = layer.get_submodule(path)
    if last != "weight" or not hasattr(linear, A):
        return tensor
    names = {f"{child}.weight": linear.get_parameter(f"{child}.weight") for child in (A, B)}
    with torch.no_grad():
        scale = getattr(linear, SCALE)
        whole = merged("weight", tensor, None, scale, names, lambda read, _: names[read])
        return whole.to(tensor.dtype)

"""Whole tensors from what the ranks hold of them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.mesh import Mesh
from pipemega.parameters import shard_of
from pipemega.pipeline.build import LocalModel


def whole_tensors(values: Mapping[str, Tensor], model: LocalModel, mesh: Mesh) -> dict[str, Tensor]:
    """Logical name -> the whole tensor, on the CPU of every rank; collective.

    Args:
        values: logical name -> what this rank has of it: of the parameters of its stages, or of
            something of their shapes.
    """
    owned = model.owned
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (shard_of(owned[name]).shape, values[name].dtype) for name in owned
    }
    if mesh.world.size > 1:
        gathered: list[Any] = [None] * mesh.world.size
        dist.all_gather_object(gathered, shapes, group=mesh.world.group)
        shapes = {name: entry for part in gathered for name, entry in part.items()}
    wholes = {}
    for name in sorted(shapes, key=_by_position):
        shape, dtype = shapes[name]
        whole = torch.zeros(shape, dtype=dtype, device=mesh.device)
        if name in owned and mesh.data.rank == 0:
            shard = shard_of(owned[name])
            if shard.dim is not None or mesh.tensor.rank == 0:
                shard.put(values[name], whole)
        if mesh.world.size > 1:
            # Everybody else adds zeros, which changes no bit.
            dist.all_reduce(whole, group=mesh.world.group)
        wholes[name] = whole.cpu()
    return wholes


def _by_position(name: str) -> tuple[int, str]:
    _, position, rest = name.split(".", 2)
    return int(position), rest

"""Gathers full tensors from the shards on all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.parameters import shard_of
from pipemega.pipeline.local_model import LocalModel


def gather_full_tensors(
    values: Mapping[str, Tensor], model: LocalModel, mesh: Mesh
) -> dict[str, Tensor]:
    """Return logical name -> full tensor, on the CPU of every rank; collective.

    Args:
        values: logical name -> local tensor, with the shape of the local parameter.
    """
    owned = model.owned
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (shard_of(owned[name]).shape, values[name].dtype) for name in owned
    }
    for part in gather_objects(shapes, mesh.world):
        shapes |= part
    full_tensors = {}
    for name in sorted(shapes, key=_by_position):
        shape, dtype = shapes[name]
        full = torch.zeros(shape, dtype=dtype, device=mesh.device)
        if name in owned and mesh.data.rank == 0:
            shard = shard_of(owned[name])
            if shard.dim is not None or mesh.tensor.rank == 0:
                shard.copy_to_full(values[name], full)
        if mesh.world.size > 1:
            # The other ranks add zeros, so the result is exact.
            dist.all_reduce(full, group=mesh.world.group)
        full_tensors[name] = full.cpu()
    return full_tensors


def _by_position(name: str) -> tuple[int, str]:
    _, position, rest = name.split(".", 2)
    return int(position), rest

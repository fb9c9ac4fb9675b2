"""Gathers full tensors from the shards on all ranks."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pipemega.distributed.device_collectives import all_reduce
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.parameters import shard_of
from pipemega.pipeline.local_model import LocalModel

# A larger all-reduce is not faster, and needs more memory.
_BUCKET_ELEMENTS = 1 << 24

_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def gather_full_tensors(
    values: Mapping[str, Tensor], model: LocalModel, mesh: Mesh
) -> dict[str, Tensor]:
    """Return logical name -> full tensor, on the CPU of every rank; collective.

    Args:
        values: logical name -> local tensor, with the shape of the local parameter; may be a part
            of the parameters, the same on all ranks that hold them.
    """
    owned = {name: parameter for name, parameter in model.owned.items() if name in values}
    shapes = {name: (shard_of(owned[name]).shape, values[name].dtype) for name in owned}
    for part in gather_objects(shapes, mesh.world):
        shapes |= part
    full_tensors = {}
    for names in _in_buckets(shapes):
        sizes = [math.prod(shapes[name][0]) for name in names]
        bucket = torch.zeros(sum(sizes), dtype=shapes[names[0]][1], device=mesh.device)
        for name, full in zip(names, bucket.split_with_sizes(sizes), strict=True):
            if name in owned and mesh.data.rank == 0:
                shard = shard_of(owned[name])
                if shard.dim is not None or mesh.tensor.rank == 0:
                    shard.copy_to_full(values[name], full.view(shard.shape))
        if mesh.world.size > 1:
            # The other ranks add zeros, so the result is exact.
            all_reduce(bucket, mesh.world)
        synchronize()
        for name, full in zip(names, bucket.cpu().split_with_sizes(sizes), strict=True):
            # A copy: a view would keep the whole bucket in memory.
            full_tensors[name] = full.view(shapes[name][0]).clone()
    return full_tensors


def _in_buckets(shapes: _Shapes) -> Iterator[list[str]]:
    """Yield the names in the order of the layers, in buckets of one dtype."""
    bucket, elements = list[str](), 0
    for name in sorted(shapes, key=_by_position):
        shape, dtype = shapes[name]
        size = math.prod(shape)
        if bucket and (elements + size > _BUCKET_ELEMENTS or dtype != shapes[bucket[0]][1]):
            yield bucket
            bucket, elements = [], 0
        bucket.append(name)
        elements += size
    if bucket:
        yield bucket


def _by_position(name: str) -> tuple[int, str]:
    _, position, rest = name.split(".", 2)
    return int(position), rest

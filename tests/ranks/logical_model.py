"""A model of a few parameters, sharded, replicated and tied by hand, and the unsplit model.

name              stage        over tensor ranks
layers.0.table    0 and last   rows [7, 3], padded to a multiple of the ranks; tied
layers.0.norm     0            replicated; each rank has a part of its gradient
layers.1.weight   0            rows, two ranges (as a fused query-key-value weight has)
layers.2.weight   last         columns
layers.2.bias     last         replicated
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis, Mesh, build_mesh
from pipemega.distributed.topology import Topology
from pipemega.parameters import Shard, attach_shard, derive_seed, shard_of

SHAPES = {
    "layers.0.table": (7, 3),
    "layers.0.norm": (3,),
    "layers.1.weight": (8, 3),
    "layers.2.weight": (3, 4),
    "layers.2.bias": (3,),
}
TIED = "layers.0.table"
PARTIAL = "layers.0.norm"


def random_tensor(*key: object, shape: tuple[int, ...]) -> Tensor:
    """Return random fp64 numbers that depend on `key` only."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(derive_seed(*key))
    )


def whole_parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(random_tensor(name, shape=shape)) for name, shape in SHAPES.items()}


def whole_gradient(name: str, data_rank: int, step: int) -> Tensor:
    return random_tensor("gradient", name, data_rank, step, shape=SHAPES[name])


def mesh_of(pipeline: int, data: int, tensor: int) -> Mesh:
    return build_mesh(Topology(pipeline, data, tensor), torch.device("cpu"))


@dataclass
class LocalModel:
    """The part of the model that one rank of the mesh holds."""

    mesh: Mesh
    named: list[tuple[str, nn.Parameter]]
    tied: dict[str, Axis]

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of `whole`."""
        parameter = dict(self.named)[name]
        into = torch.empty(parameter.shape, dtype=whole.dtype)
        shard_of(parameter).copy_from_full(whole, into)
        return into

    def contribution(self, name: str, gradient: Tensor) -> Tensor:
        """Return this rank's part of a whole gradient; the parts of all ranks sum to the shard."""
        local = self.local(name, gradient)
        if name == PARTIAL:
            local = _part(local, self.mesh.tensor)
        return _part(local, self.tied[name]) if name in self.tied else local


def _part(gradient: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part: unequal parts over the axis that sum to the gradient."""
    weights = torch.arange(1, axis.size + 1, dtype=torch.float64)
    return gradient * float(weights[axis.rank] / weights.sum())


def local_model(mesh: Mesh, dtype: torch.dtype = torch.float64) -> LocalModel:
    size, rank = mesh.tensor.size, mesh.tensor.rank
    first, last = mesh.pipeline.rank == 0, mesh.pipeline.rank == mesh.pipeline.size - 1
    rows = -(-7 // size)
    shards = {
        "layers.0.table": Shard((7, 3), 0, ((rows * rank, min(7, rows * (rank + 1))),)),
        "layers.0.norm": Shard((3,), partial_gradient=True),
        "layers.1.weight": Shard(
            (8, 3), 0, tuple((a + 4 // size * rank, a + 4 // size * (rank + 1)) for a in (0, 4))
        ),
        "layers.2.weight": Shard((3, 4), 1, ((4 // size * rank, 4 // size * (rank + 1)),)),
        "layers.2.bias": Shard((3,)),
    }
    local_shapes = {
        "layers.0.table": (rows, 3),
        "layers.1.weight": (8 // size, 3),
        "layers.2.weight": (3, 4 // size),
    }
    held = [
        name
        for name in SHAPES
        if (first and name[7] in "01") or (last and name[7] == "2") or (last and name == TIED)
    ]
    named = []
    for name in held:
        shard = shards[name]
        if size == 1 and shard.dim is not None:
            shard = Shard(shard.shape)
        value = torch.empty(local_shapes.get(name, SHAPES[name]), dtype=torch.float64)
        shard.copy_from_full(whole_parameters()[name].detach(), value)
        named.append((name, attach_shard(nn.Parameter(value.to(dtype)), shard)))
    # With more than two stages the first and the last one would need a separate group.
    tied = {TIED: mesh.pipeline} if mesh.pipeline.size == 2 else {}
    return LocalModel(mesh, named, tied)

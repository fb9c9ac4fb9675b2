"""A model of a few parameters, cut, copied and tied by hand, beside its unsplit self.

name              stage        over tensor ranks
layers.0.table    0 and last   rows [7, 3], padded to a multiple of the ranks; tied
layers.0.norm     0            whole, each rank sees a part of its gradient
layers.1.weight   0            rows, two ranges (as a fused query-key-value weight has)
layers.2.weight   last         columns
layers.2.bias     last         whole
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipemega.mesh import Axis, Mesh, build_mesh
from pipemega.parameters import Shard, derive_seed, describe, shard_of
from pipemega.topology import Topology

SHAPES = {
    "layers.0.table": (7, 3),
    "layers.0.norm": (3,),
    "layers.1.weight": (8, 3),
    "layers.2.weight": (3, 4),
    "layers.2.bias": (3,),
}
TIED = "layers.0.table"
PARTIAL = "layers.0.norm"


def draw(*what: object, shape: tuple[int, ...]) -> Tensor:
    """fp64 numbers that depend on `what` only."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(derive_seed(*what))
    )


def whole_parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(draw(name, shape=shape)) for name, shape in SHAPES.items()}


def whole_gradient(name: str, data_rank: int, step: int) -> Tensor:
    return draw("gradient", name, data_rank, step, shape=SHAPES[name])


def mesh_of(pipeline: int, data: int, tensor: int) -> Mesh:
    return build_mesh(Topology(pipeline, data, tensor), torch.device("cpu"))


@dataclass
class LocalModel:
    """What one rank of the mesh holds of the model."""

    mesh: Mesh
    named: list[tuple[str, nn.Parameter]]
    tied: dict[str, Axis]

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of `whole`."""
        parameter = dict(self.named)[name]
        into = torch.empty(parameter.shape, dtype=whole.dtype)
        shard_of(parameter).take(whole, into)
        return into

    def contribution(self, name: str, gradient: Tensor) -> Tensor:
        """What this rank's backward would see of a whole gradient: parts add up to the shard."""
        local = self.local(name, gradient)
        if name == PARTIAL:
            local = _part(local, self.mesh.tensor)
        return _part(local, self.tied[name]) if name in self.tied else local


def _part(gradient: Tensor, axis: Axis) -> Tensor:
    """Unequal parts over the ranks of the axis that sum to the gradient."""
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
        shard.take(whole_parameters()[name].detach(), value)
        named.append((name, describe(nn.Parameter(value.to(dtype)), shard)))
    # With more than two stages the first and the last would need a group of their own.
    tied = {TIED: mesh.pipeline} if mesh.pipeline.size == 2 else {}
    return LocalModel(mesh, named, tied)

"""Where each rank stands in the mesh, as arithmetic.  Floor 1: knows no torch and no processes.

world = pipeline x data x tensor, the last axis fastest:

    pipeline=2, data=1, tensor=2     rank 0  (0, 0, 0)     rank 2  (1, 0, 0)
                                     rank 1  (0, 0, 1)     rank 3  (1, 0, 1)
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipemega.errors import MeshError

AxisName = Literal["pipeline", "data", "tensor"]

# Tensor innermost: it talks once per layer and must stay inside the node; the pipeline talks
# once per micro-batch and can cross.
AXES: tuple[AxisName, ...] = ("pipeline", "data", "tensor")


class Coordinate(NamedTuple):
    """The position of one rank on each axis, 0 first."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The sizes of the three axes, and which rank stands where."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @classmethod
    def fit(
        cls,
        world_size: int,
        pipeline: int = 1,
        tensor: int = 1,
        data: int | Literal["auto"] = "auto",
    ) -> "Topology":
        """The topology of `world_size` ranks; `data="auto"` takes what the others leave.

        Raises:
            MeshError: the product of the axes is not, or cannot be, the world size.
        """
        per_copy = pipeline * tensor
        if data == "auto":
            if world_size % per_copy or world_size < per_copy:
                raise MeshError(
                    f"{world_size} ranks were started, and one copy of the model takes "
                    f"mesh.pipeline * mesh.tensor = {pipeline} * {tensor} = {per_copy}: start a "
                    f"multiple of {per_copy} ranks (torchrun --nproc_per_node), or change the mesh"
                )
            return cls(pipeline, world_size // per_copy, tensor)
        if per_copy * data != world_size:
            raise MeshError(
                f"{world_size} ranks were started, and the mesh takes mesh.pipeline * mesh.data * "
                f"mesh.tensor = {pipeline} * {data} * {tensor} = {per_copy * data}: start "
                f"{per_copy * data} ranks (torchrun --nproc_per_node), or set mesh.data to 'auto'"
            )
        return cls(pipeline, data, tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def size(self, axis: AxisName) -> int:
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is not one of the {self.world_size} ranks of {self}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinate(pipeline, data, tensor)

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        return (pipeline * self.data + data) * self.tensor + tensor

    def along(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` only, itself among them, in order."""
        here = self.coordinate(rank)._asdict()
        return tuple(self.rank(**{**here, axis: i}) for i in range(self.size(axis)))

    def groups(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """Every line of ranks along `axis`; together they hold each rank once."""
        return tuple(
            self.along(axis, rank)
            for rank in range(self.world_size)
            if getattr(self.coordinate(rank), axis) == 0
        )

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"

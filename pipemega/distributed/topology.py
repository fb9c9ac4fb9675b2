"""Rank arithmetic of the mesh: which rank has which index on each axis. Imports no torch.

world = pipeline x data x tensor, the last axis fastest:

    pipeline=2, data=1, tensor=2     rank 0  (0, 0, 0)     rank 2  (1, 0, 0)
                                     rank 1  (0, 0, 1)     rank 3  (1, 0, 1)
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipemega.errors import MeshError

AxisName = Literal["pipeline", "data", "tensor"]

# Tensor innermost: it communicates in every layer and must stay inside the node; the pipeline
# communicates once per micro-batch and can cross nodes.
AXES: tuple[AxisName, ...] = ("pipeline", "data", "tensor")


class Coordinate(NamedTuple):
    """The index of one rank on each axis, from 0."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The sizes of the three axes, and the mapping between ranks and coordinates."""

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
        """Return the topology of `world_size` ranks.

        Args:
            data: "auto" for world_size / (pipeline * tensor).

        Raises:
            MeshError: the product of the axes is not the world size.
        """
        per_copy = pipeline * tensor
        if data == "auto":
            if world_size % per_copy or world_size < per_copy:
                raise MeshError(
                    f"{started(world_size)}, and one copy of the model takes "
                    f"mesh.pipeline * mesh.tensor = {pipeline} * {tensor} = {per_copy}: start a "
                    f"multiple of {per_copy} ranks (torchrun --nproc_per_node), or change the mesh"
                )
            return cls(pipeline, world_size // per_copy, tensor)
        if per_copy * data != world_size:
            raise MeshError(
                f"{started(world_size)}, and the mesh takes mesh.pipeline * mesh.data * "
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
        """Return, in order, `rank` and all ranks that differ from it on `axis` only."""
        here = self.coordinate(rank)._asdict()
        return tuple(self.rank(**{**here, axis: i}) for i in range(self.size(axis)))

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"

    @classmethod
    def from_text(cls, text: str) -> "Topology":
        """Return the topology whose `str` is `text`."""
        sizes = dict(part.split(" ") for part in text.split(" x "))
        return cls(**{axis: int(sizes[axis]) for axis in AXES})


def started(world_size: int) -> str:
    """Return "1 rank was started", or "4 ranks were started"."""
    return "1 rank was started" if world_size == 1 else f"{world_size} ranks were started"

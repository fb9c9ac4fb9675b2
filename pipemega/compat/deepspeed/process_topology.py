"""DeepSpeed's topologies: which rank has which index on the axes pipe, data and model."""

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError

# DeepSpeed's name of each axis of the mesh, in the order of the mesh.
_AXES = ("pipe", "data", "model")


class ProcessTopology:
    """Ranks in row-major order of some axes: the last axis is the fastest.

    Args:
        axes: their names; a pipeline has "pipe", "data" and "model".
        dims: the size of each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        coordinates = product(*map(range, dims))
        # Any: a named tuple with the fields `axes`.
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*c): rank  # type: ignore[arg-type]
            for rank, c in enumerate(coordinates)
        }

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank with an index on every axis.

        Raises:
            ValueError: an axis is missing.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank() needs the index on each of the axes {self.axes}, and got "
                f"{sorted(coord_kwargs)}: give all, or use filter_match()"
            )
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ValueError(f"{key} is outside of the topology {self.axes} = {self.dims}")
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the indices of a rank as text, as in names of checkpoint files."""
        coord = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if there is none of this name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the indices of a rank, as a named tuple."""
        for coord, other in self.mapping.items():
            if other == rank:
                return coord
        raise ValueError(f"rank {rank} is not one of the {self.world_size()} of the topology")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on `axis` only."""
        if axis not in self.axes:
            return []
        groups: dict[Any, list[int]] = {}
        for coord, rank in self.mapping.items():
            groups.setdefault(coord._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these indices."""
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose index on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallelism."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor ("model") parallelism."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def mesh_topology(topology: ProcessTopology) -> Topology:
    """Return the topology of the mesh with the same ranks.

    Raises:
        ConfigError: it has another axis, or another order; on every rank.
    """
    sizes = {axis: topology.get_dim(axis) for axis in topology.axes}
    used = [axis for axis in topology.axes if sizes[axis] > 1]
    if others := [axis for axis in used if axis not in _AXES]:
        raise ConfigError(
            f"topology has the axis {others[0]!r} of size {sizes[others[0]]}; the axes of a "
            f"pipeline are {', '.join(_AXES)}",
            on_every_rank=True,
        )
    if used != [axis for axis in _AXES if axis in used]:
        raise ConfigError(
            f"topology orders the axes {', '.join(used)}, and the ranks of the mesh have the order "
            f"{', '.join(_AXES)}, the last axis fastest: write them in this order",
            on_every_rank=True,
        )
    pipeline, data, tensor = (max(1, topology.get_dim(axis)) for axis in _AXES)
    return Topology(pipeline, data, tensor)

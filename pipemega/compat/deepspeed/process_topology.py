"""DeepSpeed's topologies: which rank has which index on the axes pipe, data and model.

DeepSpeed's PipelineParallelGrid, which scripts know as `engine.grid` and `engine.mpu`.

What a DeepSpeed script calls before it builds a model: arguments, and the process group.
"""

import argparse
import os
from collections import namedtuple
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pipemega.distributed.mesh import (
    DEFAULT_TIMEOUT,
    Axis,
    Mesh,
    build_mesh,
    launched_world_size,
    new_group,
    pick_device,
)
from pipemega.distributed.process_groups import checked_launch, connect_ranks
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger

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


# What scripts compare: the version whose interface this package has.
DEEPSPEED_VERSION: Final = "0.19.8"
# `--set` of `python -m pipemega.compat.deepspeed`: KEY=VALUE, for each config of the script.
CONFIG_CHANGES: Final[list[str]] = []


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of DeepSpeed's launch lines; `initialize(args=...)` reads deepspeed_config.

    Options that the parser has already are kept.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    known = parser._option_string_actions

    def add(name: str, **options: Any) -> None:
        if name not in known:
            group.add_argument(name, **options)

    add("--deepspeed", action="store_true", help="a flag for the script; no effect on the engine")
    add("--deepspeed_config", type=str, default=None, help="the JSON file")
    add("--deepscale", action="store_true", help=argparse.SUPPRESS)
    add("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Connect the launched ranks, unless torch.distributed is initialized.  Collective.

    Works under torchrun, srun and mpirun, and in one process. As DeepSpeed does, it sets RANK,
    LOCAL_RANK and torchrun's other variables if srun or mpirun has started the ranks.

    Args:
        dist_backend: ignored but for a warning: the ranks use NCCL and gloo on GPUs, gloo on CPUs.
        timeout: limit of each wait; None: 10 minutes, the default of `mesh.timeout_seconds`.
        init_method, rank, world_size: as for torch.distributed.init_process_group.
        dist_init_required: False: the caller has initialized torch.distributed.
        auto_mpi_discovery, distributed_port, verbose, config: have no effect here.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    device = pick_device("auto")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = DEFAULT_TIMEOUT if timeout is None else timeout
    given: dict[str, Any] = {"init_method": init_method, "rank": rank, "world_size": world_size}
    if init_method is None and rank < 0:
        os.environ |= checked_launch().values
        if launched_world_size() > 1:
            connect_ranks(backend, wait)
        given = {"store": HashStore(), "rank": 0, "world_size": 1}
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=wait, **given)
    if dist_backend not in (None, "gloo", "nccl"):
        text = f"dist_backend {dist_backend!r} is not used: the backend is {backend}"
        get_logger(dist.get_rank()).info(text)


class PipelineParallelGrid:
    """The place of this rank in a topology, and the process groups of its axes.  Collective.

    Args:
        topology: None: all ranks are stages.
        process_group: is not used: a grid has all ranks.

    Attributes:
        mesh: the mesh of the same ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        init_distributed()
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if topology is None:
            topology = PipeDataParallelTopology(num_pp=self.world_size, num_dp=1)
        self._topo = topology
        self.mesh = mesh = build_mesh(mesh_topology(topology), pick_device())
        place = mesh.topology
        self.pipe_parallel_size, self.data_parallel_size = place.pipeline, place.data
        self.model_parallel_size = self.slice_parallel_size = place.tensor
        self.stage_id, self.data_parallel_id = mesh.pipeline.rank, mesh.data.rank
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.dp_group = list(mesh.pipeline.ranks), list(mesh.data.ranks)
        self.slice_group = list(mesh.tensor.ranks)
        self.pipe_groups = self._groups("pipe")
        self.dp_groups = self._groups("data")
        self.p2p_groups = self._p2p_groups(place)
        self.pp_proc_group = _process_group(mesh.pipeline, mesh)
        self.dp_proc_group = _process_group(mesh.data, mesh)
        self.slice_proc_group = _process_group(mesh.tensor, mesh)
        # The ranks that hold one copy of the model.
        copy = [
            rank
            for rank in range(self.world_size)
            if place.coordinate(rank).data == self.data_parallel_id
        ]
        self.ds_model_world_size, self.ds_model_rank = len(copy), copy.index(self.global_rank)
        self.ds_model_proc_group = new_group(copy, mesh.device, mesh.timeout, "model")

    def _groups(self, axis: str) -> list[list[int]]:
        single = [[rank] for rank in range(self.world_size)]
        return self._topo.get_axis_comm_lists(axis) or single

    def _p2p_groups(self, place: Topology) -> list[list[int]]:
        """Return [rank, rank of the next stage] of each rank; stage 0 follows the last."""
        pairs = []
        for rank in range(self.world_size):
            ranks = place.along("pipeline", rank)
            pairs.append([rank, ranks[(ranks.index(rank) + 1) % len(ranks)]])
        return pairs

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage; `kwargs` replace this rank's indices on the other axes."""
        here = self._topo.get_coord(self.global_rank)._asdict()
        here |= {"pipe": stage_id} if "pipe" in here else {}
        return self._topo.get_rank(**(here | kwargs))

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_global_rank(self) -> int:
        return self.global_rank

    # Pipeline

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return self.pp_proc_group

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    # Data

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    # All ranks of one copy of the model

    def get_model_parallel_rank(self) -> int:
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.ds_model_proc_group

    # Tensor

    def get_slice_parallel_rank(self) -> int:
        return self.mesh.tensor.rank

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def _process_group(axis: Axis, mesh: Mesh) -> dist.ProcessGroup:
    """Return the group of an axis; one rank gets a group too, as scripts reduce over it."""
    if axis.group is not None:
        return axis.group
    return new_group(list(axis.ranks), mesh.device, mesh.timeout, axis.name)

"""DeepSpeed's PipelineParallelGrid, which scripts know as `engine.grid` and `engine.mpu`."""

from typing import Any

import torch.distributed as dist

from pipemega.compat.deepspeed.launch_calls import init_distributed
from pipemega.compat.deepspeed.process_topology import (
    PipeDataParallelTopology,
    ProcessTopology,
    mesh_topology,
)
from pipemega.distributed.mesh import Axis, Mesh, build_mesh, new_group, pick_device
from pipemega.distributed.topology import Topology


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
        """Return the rank of a stage with the other indices of this rank, or those of `kwargs`."""
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

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    # Data

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

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

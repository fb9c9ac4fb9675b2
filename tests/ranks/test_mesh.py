"""The mesh made real: each rank's axes, and that they talk to whom they should."""

import pytest
import torch
import torch.distributed as dist

from pipemega.errors import MeshError
from pipemega.mesh import Mesh, build_mesh, pick_device
from pipemega.topology import AXES, Topology

CPU = torch.device("cpu")


def who_talks_to_whom(topology):
    """Each axis's ranks as the topology says, and as a gather over its group finds them."""
    mesh = build_mesh(topology, CPU)
    found = {}
    for name in (*AXES, "world"):
        axis = getattr(mesh, name)
        heard = [mesh.rank]
        if axis.size > 1:
            heard = [None] * axis.size
            dist.all_gather_object(heard, mesh.rank, group=axis.group)
        assert axis.ranks[axis.rank] == mesh.rank
        assert (axis.group is None) == (axis.size == 1)
        found[name] = (axis.ranks, tuple(heard))
    return found


@pytest.mark.parametrize(
    "topology",
    [Topology(2, 1, 2), Topology(1, 2, 2), Topology(2, 2, 1), Topology(4, 1, 1), Topology(1, 1, 4)],
    ids=str,
)
def test_every_axis_talks_to_the_ranks_that_the_topology_says(pool, topology):
    for rank, found in enumerate(pool.run(4, who_talks_to_whom, topology)):
        for name in AXES:
            line = topology.along(name, rank)
            assert found[name] == (line, line)
        assert found["world"] == ((0, 1, 2, 3), (0, 1, 2, 3))


def torchs_view(topology):
    mesh = build_mesh(topology, CPU)
    assert mesh.device_mesh is not None
    return {
        name: mesh.device_mesh.get_local_rank(name)
        for name in mesh.device_mesh.mesh_dim_names or ()
    }, {name: getattr(mesh, name).rank for name in AXES}


def test_torchs_device_mesh_agrees(pool):
    for device_mesh, ours in pool.run(4, torchs_view, Topology(2, 1, 2)):
        assert device_mesh == {name: ours[name] for name in ("pipeline", "tensor")}
    for device_mesh, ours in pool.run(4, torchs_view, Topology(data=4)):
        assert device_mesh == {"data": ours["data"]}


def refusal():
    with pytest.raises(MeshError) as error:
        build_mesh(Topology(2, 1, 2), CPU)
    return str(error.value)


def test_a_world_of_another_size_is_refused_on_every_rank(pool):
    message = "2 ranks were started, and the mesh pipeline 2 x data 1 x tensor 2 takes 4"
    assert pool.run(2, refusal) == [message] * 2


def test_one_process_needs_no_torch_distributed():
    mesh = build_mesh(Topology(), CPU)
    assert not dist.is_initialized()
    assert (mesh.rank, mesh.world.size, mesh.tensor.group, mesh.device_mesh) == (0, 1, None, None)
    assert Mesh.single().device == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_way_out():
    assert pick_device("auto") == CPU
    with pytest.raises(MeshError) as error:
        pick_device("cuda")
    assert (
        str(error.value) == "mesh.device is 'cuda', and torch sees no CUDA device: set it to 'cpu'"
    )

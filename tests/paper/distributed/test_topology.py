"""Rank arithmetic of the mesh."""

from itertools import product

import pytest

from pipemega.distributed.topology import AXES, Coordinate, Topology
from pipemega.errors import MeshError

BIG = Topology(pipeline=16, data=32, tensor=8)  # 4,096 ranks


def test_rank_and_coordinate_are_inverse_on_4096_ranks():
    seen = set()
    for rank in range(BIG.world_size):
        here = BIG.coordinate(rank)
        assert BIG.rank(*here) == rank
        assert all(0 <= here[i] < BIG.size(axis) for i, axis in enumerate(AXES))
        seen.add(here)
    assert len(seen) == BIG.world_size == 4096


def test_the_last_axis_is_the_fastest():
    assert [Topology(2, 1, 2).coordinate(rank) for rank in range(4)] == [
        Coordinate(0, 0, 0),
        Coordinate(0, 0, 1),
        Coordinate(1, 0, 0),
        Coordinate(1, 0, 1),
    ]
    wanted = [Coordinate(*c) for c in product(range(2), range(3), range(4))]
    assert [Topology(2, 3, 4).coordinate(rank) for rank in range(24)] == wanted


@pytest.mark.parametrize("axis", AXES)
def test_the_groups_of_an_axis_contain_each_of_4096_ranks_once(axis):
    lines = {BIG.along(axis, rank) for rank in range(BIG.world_size)}
    assert len(lines) == BIG.world_size // BIG.size(axis)
    assert sorted(rank for line in lines for rank in line) == list(range(BIG.world_size))


@pytest.mark.parametrize("axis", AXES)
def test_every_rank_of_a_group_gets_the_same_ordered_group(axis):
    topology = Topology(3, 2, 4)
    for rank in range(topology.world_size):
        line = topology.along(axis, rank)
        assert line[getattr(topology.coordinate(rank), axis)] == rank
        assert list(line) == sorted(line)
        assert all(topology.along(axis, other) == line for other in line)


def test_tensor_ranks_are_consecutive():
    assert BIG.along("tensor", 0) == tuple(range(8))


def test_data_auto_is_the_world_size_over_pipeline_times_tensor():
    assert Topology.fit(16, pipeline=2, tensor=4) == Topology(2, 2, 4)
    assert Topology.fit(1) == Topology(1, 1, 1)


def test_a_fully_specified_mesh_that_fits_is_used_unchanged():
    assert Topology.fit(8, pipeline=2, tensor=2, data=2) == Topology(2, 2, 2)


@pytest.mark.parametrize(
    ("world_size", "mesh", "message"),
    [
        (
            6,
            {"pipeline": 2, "tensor": 2},
            "6 ranks were started, and one copy of the model takes mesh.pipeline * mesh.tensor = "
            "2 * 2 = 4: start a multiple of 4 ranks (torchrun --nproc_per_node), or change the "
            "mesh",
        ),
        (
            2,
            {"pipeline": 4},
            "2 ranks were started, and one copy of the model takes mesh.pipeline * mesh.tensor = "
            "4 * 1 = 4: start a multiple of 4 ranks (torchrun --nproc_per_node), or change the "
            "mesh",
        ),
        (
            4,
            {"pipeline": 2, "tensor": 2, "data": 2},
            "4 ranks were started, and the mesh takes mesh.pipeline * mesh.data * mesh.tensor = "
            "2 * 2 * 2 = 8: start 8 ranks (torchrun --nproc_per_node), or set mesh.data to 'auto'",
        ),
    ],
)
def test_a_world_that_does_not_fit_is_refused_with_both_numbers(world_size, mesh, message):
    with pytest.raises(MeshError) as error:
        Topology.fit(world_size, **mesh)
    assert str(error.value) == message


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_mesh_has_no_coordinate(rank):
    with pytest.raises(MeshError) as error:
        Topology(2, 2, 2).coordinate(rank)
    assert str(error.value) == (
        f"rank {rank} is not one of the 8 ranks of pipeline 2 x data 2 x tensor 2"
    )


def test_experts_are_divided_over_consecutive_data_ranks():
    topology = Topology(pipeline=2, data=4, tensor=2, expert=2)
    assert topology.along("expert", 0) == (0, 2)
    assert topology.along("replica", 0) == (0, 4)
    # Data rank 3 of the second stage, second tensor rank.
    assert topology.along("expert", 15) == (13, 15)
    assert topology.along("replica", 15) == (11, 15)
    for axis, size in (("expert", 2), ("replica", 2)):
        lines = {topology.along(axis, rank) for rank in range(16)}
        assert sorted(rank for line in lines for rank in line) == list(range(16))
        assert {len(line) for line in lines} == {size} == {topology.size(axis)}
    assert Topology.from_text(str(topology)) == topology
    assert str(topology) == "pipeline 2 x data 4 x tensor 2, expert 2"


def test_data_ranks_that_are_no_multiple_of_the_expert_ranks_are_refused_with_both_numbers():
    with pytest.raises(MeshError) as error:
        Topology.fit(12, pipeline=2, expert=4)
    assert (
        "12 ranks were started, so there are 6 data ranks (mesh.data), which is not a multiple of "
        "mesh.expert (4): start a multiple of 8 ranks, or set mesh.expert to a divisor of 6"
    ) in str(error.value)

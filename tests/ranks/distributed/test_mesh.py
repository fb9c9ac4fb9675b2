"""The axes of each rank have the process groups that the topology defines."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipemega.distributed.mesh import (
    Mesh,
    _world,
    build_mesh,
    first_message,
    new_axis,
    new_group,
    pick_device,
    refuse_shared_gpus,
)
from pipemega.distributed.topology import AXES, Topology
from pipemega.errors import MeshError

CPU = torch.device("cpu")


def groups_of_this_rank(topology):
    """Each axis's ranks by the mesh, and by a gather over its group."""
    mesh = build_mesh(topology, CPU)
    found = {}
    for name in (*AXES, "world"):
        axis = getattr(mesh, name)
        gathered = [mesh.rank]
        if axis.size > 1:
            gathered = [None] * axis.size
            dist.all_gather_object(gathered, mesh.rank, group=axis.group)
        assert axis.ranks[axis.rank] == mesh.rank
        assert (axis.group is None) == (axis.size == 1)
        found[name] = (axis.ranks, tuple(gathered))
    return found


@pytest.mark.parametrize(
    "topology",
    [Topology(2, 1, 2), Topology(1, 2, 2), Topology(2, 2, 1), Topology(4, 1, 1), Topology(1, 1, 4)],
    ids=str,
)
def test_every_group_has_the_ranks_that_the_topology_defines(pool, topology):
    for rank, found in enumerate(pool.run(4, groups_of_this_rank, topology)):
        for name in AXES:
            line = topology.along(name, rank)
            assert found[name] == (line, line)
        assert found["world"] == ((0, 1, 2, 3), (0, 1, 2, 3))


def first_operations(topology):
    """The axes of this rank's groups and the collectives on them, in the order of build_mesh."""
    called = []
    names = ("all_reduce", "barrier", "isend", "irecv", "batch_isend_irecv")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            original = getattr(dist, name)

            def record(*args, name=name, original=original, **options):
                called.append((name, options.get("group")))
                return original(*args, **options)

            patch.setattr(dist, name, record)
        mesh = build_mesh(topology, CPU)
    axes = {name: getattr(mesh, name) for name in (*AXES, "world")}
    groups = {axis.group: name for name, axis in axes.items() if axis.size > 1}
    return [(name, groups.get(group)) for name, group in called]


@pytest.mark.parametrize("topology", [Topology(4), Topology(2, 1, 2)], ids=str)
def test_the_first_operation_of_every_group_is_one_that_all_its_ranks_join(pool, topology):
    axes = [name for name in AXES if topology.size(name) > 1] + ["world"]
    first = [("all_reduce", "world")]  # of the number of groups of each rank
    expected = first + [("all_reduce", name) for name in axes] + [("barrier", "world")]
    assert pool.run(4, first_operations, topology) == [expected] * 4


def mesh_beside_own_groups(ranks):
    dist.new_group(ranks)
    try:
        build_mesh(Topology(2, 2, 1), CPU)
    except MeshError as error:
        return str(error), error.on_every_rank
    return None


def test_groups_of_some_ranks_before_the_mesh_are_refused(pool):
    """Their ranks would give the groups of the mesh other names, and wait for ever."""
    refused = [
        (
            f"rank {rank} is in {count} process groups, and other ranks are in 1 to 2, with "
            "which torch cannot create the groups of the mesh: if a process group has only some of "
            "the ranks, create it after pipemega.initialize()",
            True,
        )
        for rank, count in enumerate((2, 2, 1, 1))
    ]
    assert pool.run(4, mesh_beside_own_groups, [0, 1]) == refused
    assert pool.run(4, mesh_beside_own_groups, [0, 1, 2, 3]) == [None] * 4


def refused_mesh():
    with pytest.raises(MeshError) as error:
        build_mesh(Topology(2, 1, 2), CPU)
    return str(error.value)


def test_a_world_size_that_does_not_fit_is_refused_on_every_rank(pool):
    message = (
        "2 ranks were started, and the mesh pipeline 2 x data 1 x tensor 2 takes 4: start 4 ranks, "
        "or change the mesh"
    )
    assert pool.run(2, refused_mesh) == [message] * 2


def test_one_process_needs_no_torch_distributed():
    mesh = build_mesh(Topology(), CPU)
    assert not dist.is_initialized()
    assert (mesh.rank, mesh.world.size, mesh.tensor.group) == (0, 1, None)
    assert Mesh.single().device == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused_with_the_remedy():
    assert pick_device("auto") == CPU
    with pytest.raises(MeshError) as error:
        pick_device("cuda")
    assert str(error.value) == (
        "mesh.device is 'cuda', and torch sees no CUDA device: set it to 'cpu', or run pipemega "
        "doctor on this machine"
    )


@pytest.mark.parametrize(
    ("variables", "found", "index"),
    [
        ({"LOCAL_RANK": "2", "SLURM_LOCALID": "1"}, 4, 2),
        ({"SLURM_LOCALID": "3"}, 4, 3),
        ({}, 4, 0),
        # One visible GPU for each task.
        ({"LOCAL_RANK": "2"}, 1, 0),
        ({"SLURM_LOCALID": "7"}, 1, 0),
    ],
)
def test_a_rank_uses_the_gpu_of_its_place_on_the_node(monkeypatch, variables, found, index):
    set_gpus(monkeypatch, variables, found)
    assert pick_device("auto") == torch.device("cuda", index)


def set_gpus(monkeypatch, variables, found):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)


def test_more_ranks_than_gpus_on_a_node_are_refused(monkeypatch):
    set_gpus(monkeypatch, {"SLURM_LOCALID": "4"}, 4)
    with pytest.raises(MeshError) as error:
        pick_device("cuda")
    assert str(error.value) == (
        "there is no GPU for local rank 4: this node has 4; start at most 4 ranks here "
        "(torchrun --nproc_per_node=4)"
    )


def test_two_ranks_on_one_gpu_are_refused_by_their_numbers():
    # Two nodes may number their GPUs alike.
    refuse_shared_gpus([("node0", "a"), ("node0", "b"), ("node1", "a"), ("node1", "b")])
    with pytest.raises(MeshError) as error:
        refuse_shared_gpus([("node0", "a"), ("node0", "b"), ("node1", "c"), ("node1", "c")])
    assert str(error.value) == (
        "ranks 2 and 3 on node1 use the same GPU (c): start at most as many ranks per node as it "
        "has GPUs; a launcher other than torchrun must set LOCAL_RANK to the index of the rank on "
        "its node, or give each rank its own GPU (srun --gpus-per-task=1)"
    )
    assert error.value.on_every_rank


class Nccl:
    """A backend that stores its timeout."""

    def _set_default_timeout(self, timeout):
        self.timeout = timeout


class NcclModule:
    """The options of torch's ProcessGroupNCCL, which a torch for CPUs does not have."""

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)


def test_collectives_of_the_tensor_axis_start_before_waiting_kernels(monkeypatch):
    calls = {}

    def record(ranks, device, timeout, name, **options):
        calls[name] = options

    monkeypatch.setattr("pipemega.distributed.mesh.new_group", record)
    topology = Topology(data=2, tensor=2)
    for name in ("data", "tensor"):
        new_axis(name, topology, 0, torch.device("cuda"), timedelta(seconds=60))
    assert calls == {"data": {"urgent": False}, "tensor": {"urgent": True}}


def test_the_first_message_of_a_group_of_gpus_is_large():
    """Some transports of NCCL set up further channels at the first large message."""
    assert first_message(CPU).nbytes == 4
    assert first_message(torch.device("meta")).nbytes == 64 << 20


@pytest.mark.parametrize(
    ("device", "host", "backend", "seconds"),
    [
        ("cpu", True, None, None),
        ("cuda", True, "cpu:gloo,cuda:nccl", 105.0),
        ("cuda", False, "nccl", 105.0),
    ],
)
def test_a_group_of_gpus_also_has_gloo_and_a_longer_timeout_of_nccl(
    monkeypatch, device, host, backend, seconds
):
    calls, nccl = [], Nccl() if device == "cuda" else None
    group = dist.ProcessGroup(0, 2)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: calls.append(options) or group)
    monkeypatch.setattr("pipemega.distributed.mesh.nccl_backend", lambda group: nccl)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclModule, raising=False)
    made = new_group(
        (0, 1), torch.device(device), timedelta(seconds=60), "data", host=host, max_ctas=4
    )
    assert made is group
    if device == "cuda":
        options = calls[0]["pg_options"]
        assert (options.config.min_ctas, options.config.max_ctas) == (1, 4)
        assert options._timeout == timedelta(seconds=60)
        assert not options.is_high_priority_stream
    assert (calls[0]["backend"], calls[0]["timeout"]) == (backend, timedelta(seconds=60))
    assert nccl is None or nccl.timeout.total_seconds() == seconds


@pytest.mark.parametrize(
    ("backends", "is_shared"),
    [
        ("cpu:gloo,cuda:nccl", True),
        ("cuda:nccl", False),
        # With it, the host would wait for the GPU in the all-reduce of each step.
        ("cpu:gloo,cuda:gloo", False),
    ],
)
def test_on_gpus_the_world_has_both_backends(monkeypatch, backends, is_shared):
    default, made = object(), object()
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=default))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr("pipemega.distributed.mesh.new_group", lambda *arguments: made)
    monkeypatch.setattr("pipemega.distributed.mesh.nccl_backend", lambda group: None)
    world = _world(0, torch.device("cuda"), timedelta(seconds=60))
    assert world.group is (default if is_shared else made)

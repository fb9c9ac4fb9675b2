"""Process groups of the pipeline messages, with torch's fake backend: one process, no messages."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipemega.distributed.mesh import Axis, build_mesh
from pipemega.distributed.topology import Topology
from pipemega.errors import MeshError
from pipemega.pipeline.connections import message_order, nccl_communicators
from pipemega.pipeline.plan.channels import connections, connections_per_rank
from pipemega.pipeline.schedules.building_blocks import loop, v
from pipemega.pipeline.transport import Transport

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@contextmanager
def one_rank_of(topology, rank):
    """The mesh of `rank`; no other rank exists."""
    dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    try:
        yield build_mesh(topology, CPU)
    finally:
        dist.destroy_process_group()


class _Ended:
    """The work of a message that is not sent."""

    def wait(self):
        return True


def _opened(monkeypatch, topology, rank, rank_of_stage):
    """The groups that the transport of `rank` makes, and all communicators of the rank in order."""
    groups, communicators = [], []
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def make(ranks, **options):
        groups.append((tuple(ranks), options["group_desc"]))
        return new_group(ranks, **options)

    def sum_up(tensor, group, **options):
        communicators.append((group.group_desc, "all", None, None))
        return all_reduce(tensor, group=group, **options)

    def operation(kind):
        def start(tensor, peer, group, tag=0):
            communicators.append((group.group_desc, kind, peer, tag))
            return _Ended()

        return start

    with monkeypatch.context() as patched:
        patched.setattr(dist, "all_reduce", sum_up)
        patched.setattr(dist, "isend", operation("send"))
        patched.setattr(dist, "irecv", operation("receive"))
        with one_rank_of(topology, rank) as mesh:
            patched.setattr(dist, "new_group", make)
            Transport(mesh.pipeline, rank_of_stage, CPU)
    return groups, communicators


@pytest.mark.parametrize("rank_of_stage", [loop(4), loop(4, 2), v(4, 2), loop(2, 3)], ids=str)
def test_every_connection_is_opened_before_the_first_step_in_one_order(monkeypatch, rank_of_stage):
    """Two pipelines: each makes the groups of its own ranks only, and both the same ones."""
    size = max(rank_of_stage) + 1
    links, counts = connections(rank_of_stage), connections_per_rank(rank_of_stage)
    for rank in range(2 * size):
        topology, place = Topology(size, 2, 1), rank // 2
        groups, communicators = _opened(monkeypatch, topology, rank, rank_of_stage)
        operations = [made for made in communicators if made[1] != "all"]
        ranks = topology.along("pipeline", rank)
        assert groups == [
            (ranks, f"pipeline messages {number}")
            for number in range(1 + max(link.group for link in links))
        ]
        assert operations == [
            (f"pipeline messages {link.group}", "send", ranks[link.target], 0)
            if link.source == place
            else (f"pipeline messages {link.group}", "receive", ranks[link.source], 0)
            for link in links
            if place in (link.source, link.target)
        ]
        assert len(operations) == counts[place]


@pytest.mark.parametrize(
    ("topology", "rank_of_stage", "count"),
    [
        (Topology(4, 2, 2), loop(4), 8),
        (Topology(4, 1, 1), v(4, 2), 10),
        (Topology(2, 1, 1), loop(2, 3), 12),
        (Topology(3, 2, 1), (0, 1, 2, 0, 1), 9),
        (Topology(1, 1, 1), (0,), 0),
    ],
)
def test_the_number_of_communicators_is_that_of_the_busiest_rank(
    monkeypatch, topology, rank_of_stage, count
):
    """A group has one for its collectives, and one for each peer of its messages."""
    made = [
        len({entry[::2] for entry in _opened(monkeypatch, topology, rank, rank_of_stage)[1]})
        for rank in range(topology.world_size)
    ]
    assert nccl_communicators(topology, rank_of_stage) == max(made) == count
    stages = max(rank_of_stage.count(rank) for rank in set(rank_of_stage))
    assert count <= 4 + 4 * stages


def test_groups_of_the_ranks_of_a_pipeline_have_equal_names():
    """torch names a group by its ranks and by how many groups the process is in."""
    names = []
    for rank in (0, 2):
        with one_rank_of(Topology(2, 2, 1), rank) as mesh:
            transport = Transport(mesh.pipeline, loop(2, 2), CPU)
            names.append([route.group.group_name for route in transport._routes.values()])
    assert names[0] == names[1]
    assert len(set(names[0])) == 6


@pytest.mark.parametrize(
    ("config", "device", "order"),
    [
        ("cpu:gloo", CPU, "tags"),
        ("cpu:gloo,cuda:gloo", CUDA, "tags"),
        ("cpu:gloo,cuda:nccl", CPU, "tags"),
        ("cpu:gloo,cuda:nccl", CUDA, "queues"),
        ("cuda:nccl", CUDA, "queues"),
        ("cpu:other", CPU, "queues"),
    ],
)
def test_only_gloo_separates_messages_by_tag(monkeypatch, config, device, order):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert message_order(Axis("pipeline", (0, 1), group=object()), device) == order
    assert message_order(Axis("pipeline"), device) == "tags"  # no messages


def test_a_process_group_that_is_bound_to_a_device_is_refused():
    with one_rank_of(Topology(2, 1, 1), 0) as mesh:
        mesh.pipeline.group.bound_device_id = torch.device("cuda", 0)
        with pytest.raises(MeshError) as refused:
            Transport(mesh.pipeline, loop(2), CPU, timeout=timedelta(seconds=5))
    assert str(refused.value) == (
        "torch.distributed was initialized with device_id=cuda:0: then one queue of each process "
        "group runs the messages to all ranks, and a receive that is posted early blocks the sends "
        "after it, so a pipeline would hang; call init_process_group without device_id, or let "
        "pipemega call it"
    )

"""Process groups and tags of the channels of one pipeline, opened before the first step."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.device_waits import synchronize, wait
from pipemega.distributed.local_sockets import Receiver, Sender, open_streams
from pipemega.distributed.mesh import Axis, first_message, new_group
from pipemega.distributed.process_groups import backend_names
from pipemega.distributed.topology import AXES, Topology
from pipemega.errors import MeshError
from pipemega.pipeline.plan.channels import (
    Channel,
    Connection,
    MessageOrder,
    channels,
    connections,
    connections_per_rank,
)
from pipemega.pipeline.plan.instructions import BETWEEN_STAGES, Transfer


class Route(NamedTuple):
    """How the messages of a channel travel.

    Args:
        peer: the global rank at the other end.
        local: this rank's end of a stream for small messages, if both ranks are on one host.
        on_host: gloo transfers the messages from and to host memory, so the host waits for them.
    """

    peer: int
    group: dist.ProcessGroup
    tag: int
    local: Sender | Receiver | None = None
    on_host: bool = False


def message_order(pipeline: Axis, device: torch.device) -> MessageOrder:
    """Return how the backend of the pipeline separates the messages of tensors on `device`.

    Only gloo matches tags. Every other backend is taken to order messages as NCCL does.
    """
    if pipeline.group is None:
        return "tags"  # no messages
    if pipeline.devices:
        # Proven for queues, a plan also runs where some of the channels have tags.
        return "queues" if pipeline.devices.count("cuda") > 1 else "tags"
    return "tags" if backend_names(pipeline.group).get(device.type) == "gloo" else "queues"


def nccl_communicators(topology: Topology, rank_of_stage: Sequence[int]) -> int:
    """Return how many NCCL communicators the rank with the most has; each has its own buffers.

    One for the world, one for each axis of several ranks, and one for each pipeline connection: at
    most four per stage of the rank.

    Args:
        rank_of_stage: the pipeline rank of each stage.
    """
    if topology.world_size == 1:
        return 0
    axes = sum(topology.size(axis) > 1 for axis in AXES)
    # The axes of experts, unless they are the data axis.
    axes += sum(1 < size < topology.data for size in (topology.expert, topology.replica))
    return 1 + axes + max(connections_per_rank(rank_of_stage))


def connect(
    pipeline: Axis,
    rank_of_stage: Sequence[int],
    device: torch.device,
    timeout: timedelta,
    transfers: Sequence[Transfer] = BETWEEN_STAGES,
    groups: list[dist.ProcessGroup] | None = None,
    max_ctas: int = 0,
) -> dict[Channel, Route]:
    """Return the route of each channel; collective over the pipeline.

    Args:
        rank_of_stage: the pipeline rank of each stage.
        device: the device of the messages.
        timeout: the limit of each wait.
        transfers: the transfers of the plan (`Plan.transfers`).
        groups: groups of an earlier placement of the stages; used again, and extended.
        max_ctas: see `nccl_options`.

    Raises:
        MeshError: the caller has initialized torch.distributed with a device_id.
        PipelineError: a rank did not open its connections; names both ranks.
    """
    if (group := pipeline.group) is None:
        return {}
    ends = {c: c.ranks(rank_of_stage) for c in channels(rank_of_stage, transfers)}
    # Of a channel without this rank, the sender.
    peers = {c: pipeline.ranks[ends[c][ends[c][0] == pipeline.rank]] for c in ends}
    routes: dict[Channel, Route] = {}
    tagged = _tagged_channels(pipeline, device, ends)
    on_host = device.type == "cpu" or bool(pipeline.devices)
    streams: Sequence[Sender | Receiver | None] = [None] * len(tagged)
    if on_host and tagged:
        streams = open_streams(pipeline, [ends[channel] for channel in tagged])
    for tag, (c, local) in enumerate(zip(tagged, streams, strict=True)):
        routes[c] = Route(peers[c], group, tag, local, on_host)
    links = [c for c in connections(rank_of_stage, transfers) if c.channel not in routes]
    if links:
        _refuse_bound_device(group)
        groups = [] if groups is None else groups
        missing = range(len(groups), 1 + max(link.group for link in links))
        groups += _make_groups(pipeline, missing, device, timeout, max_ctas)
        _open(pipeline, links, groups, device)
        for link in links:
            routes[link.channel] = Route(peers[link.channel], groups[link.group], 0)
    return routes


def _tagged_channels(
    pipeline: Axis, device: torch.device, ends: Mapping[Channel, tuple[int, int]]
) -> list[Channel]:
    """Return the channels whose messages gloo transfers, which separates them by tag."""
    if not pipeline.devices:
        return list(ends) if message_order(pipeline, device) == "tags" else []
    on_gpus = {rank for rank, name in enumerate(pipeline.devices) if name == "cuda"}
    return [channel for channel, ranks in ends.items() if not on_gpus.issuperset(ranks)]


def _refuse_bound_device(group: dist.ProcessGroup) -> None:
    if (bound := group.bound_device_id) is not None:
        raise MeshError(
            f"torch.distributed was initialized with device_id={bound}: then one queue of each "
            f"process group runs the messages to all ranks, and a receive that is posted early "
            f"blocks the sends after it, so a pipeline would hang; call init_process_group without "
            f"device_id, or let pipemega call it",
            on_every_rank=True,
        )


def _make_groups(
    pipeline: Axis, numbers: range, device: torch.device, timeout: timedelta, max_ctas: int
) -> list[dist.ProcessGroup]:
    """Make a group of the ranks of the pipeline for each of `numbers`.

    With local synchronization only these ranks take part. torch then names a group by its ranks and
    by the number of groups that a process is in. All ranks are in equally many: `build_mesh` checks
    it, and every rank is in one group of each axis of the mesh and in one pipeline. If only some
    ranks have GPUs, each of the others is in as many groups, of itself alone.
    """
    ranks = pipeline.ranks
    if pipeline.devices:
        pairs = zip(ranks, pipeline.devices, strict=True)
        ranks = tuple(rank for rank, name in pairs if name == "cuda")
        if pipeline.devices[pipeline.rank] != "cuda":
            ranks = (pipeline.ranks[pipeline.rank],)
    return [
        new_group(
            ranks,
            device,
            timeout,
            f"pipeline messages {number}",
            host=False,
            max_ctas=max_ctas,
        )
        for number in numbers
    ]


def _open(
    pipeline: Axis,
    links: Sequence[Connection],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Send a message over each connection, in the same order on all ranks.

    NCCL creates the communicator of a group and two ranks in its first operation, which blocks the
    host until both ranks are in it. In a step, the ranks come to these operations in different
    orders, and could wait for each other for ever.
    """
    message = first_message(device)
    for link in links:
        if pipeline.rank not in (link.source, link.target):
            continue
        source, target = pipeline.ranks[link.source], pipeline.ranks[link.target]
        name = "the first message of a pipeline connection"
        with named_collective(name, (source, target)):
            if pipeline.rank == link.source:
                work = dist.isend(message, target, group=groups[link.group])
            else:
                work = dist.irecv(message, source, group=groups[link.group])
        assert work is not None
        wait(work, name, (source, target))
    name = "the end of opening the pipeline connections"
    with named_collective(name, pipeline.ranks):
        # A barrier that works on every device, once the host has waited for it.
        token = torch.zeros_like(message[:1], device="cpu" if pipeline.devices else device)
        work = dist.all_reduce(token, group=pipeline.group, async_op=True)
    assert work is not None
    wait(work, name, pipeline.ranks)
    synchronize()

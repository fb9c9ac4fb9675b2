"""Sends one element over every connection that a run uses, and checks what arrives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipemega.config import Config
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.errors import PipelineError
from pipemega.pipeline.messages import TensorMeta
from pipemega.pipeline.plan_selection import training_plan
from pipemega.pipeline.transport import Channel, Direction, Transport

# What the steps below wait for, told to the caller: it is in the error if one does not end.
Tell = Callable[[str], None]

_DIRECTIONS: tuple[Direction, ...] = ("activation", "gradient")
# More layers than any plan has stages: without the section `model` the number is unknown.
_MANY_LAYERS = 1 << 20


def check_axes(mesh: Mesh, tell: Tell) -> list[str]:
    """All-reduce one element over every axis; return the names of the axes.

    Raises:
        PipelineError: a sum is wrong.
    """
    names = []
    for axis in _axes(mesh):
        tell(f"the all-reduce over {axis.name} ranks {axis.ranks}")
        element = torch.full((1,), float(axis.rank + 1), device=mesh.device)
        dist.all_reduce(element, group=axis.group)
        expected = axis.size * (axis.size + 1) / 2
        _compare(f"the sum over {axis.name} ranks {axis.ranks}", element, expected)
        names.append(axis.name)
    return names


def check_ring(axis: Axis, device: torch.device, tell: Tell) -> int:
    """Send one element to the next rank and receive one from the previous one; all at once.

    Raises:
        PipelineError: the element is not that of the previous rank.
    """
    received = exchange_in_ring(axis, torch.full((1,), float(axis.rank), device=device), tell)
    previous = (axis.rank - 1) % axis.size
    _compare(f"the element from rank {axis.ranks[previous]}", received, float(previous))
    return axis.size


def exchange_in_ring(axis: Axis, tensor: torch.Tensor, tell: Tell) -> torch.Tensor:
    """Send `tensor` to the next rank of the axis; return what the previous one sends."""
    after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    tell(f"a message from rank {before} and one to rank {after} ({axis.name} ranks)")
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, after, axis.group),
        dist.P2POp(dist.irecv, received, before, axis.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def check_pipeline(mesh: Mesh, rank_of_stage: tuple[int, ...], tell: Tell) -> int:
    """Send one element over every pipeline connection, with the transport of a run.

    All ranks go through the connections in the same order, so none waits for a later one.

    Returns:
        the number of messages of this rank.

    Raises:
        PipelineError: a message is not what the peer sent, or the connection is lost.
    """
    tell("the groups of the pipeline")
    transport = Transport(mesh.pipeline, rank_of_stage, mesh.device, timeout=mesh.timeout)
    count = 0
    for boundary in range(len(rank_of_stage) - 1):
        if rank_of_stage[boundary] == rank_of_stage[boundary + 1]:
            continue  # of a V placement: no message
        for direction in _DIRECTIONS:
            channel = Channel(direction, boundary)
            count += _check_channel(mesh, transport, channel, rank_of_stage, tell)
    transport.flush()
    return count


def _check_channel(
    mesh: Mesh,
    transport: Transport,
    channel: Channel,
    rank_of_stage: tuple[int, ...],
    tell: Tell,
) -> bool:
    """Send or receive one element; return whether this rank takes part."""
    source, target = (rank_of_stage[stage] for stage in (channel.source, channel.target))
    own, ranks = mesh.pipeline.rank, mesh.pipeline.ranks
    if own not in (source, target):
        return False
    name = f"the {channel.direction} of stage {channel.source} for stage {channel.target}"
    tell(f"{name}, from rank {ranks[source]} to rank {ranks[target]}")
    element = torch.full((1,), float(channel.source), device=mesh.device)
    if own == source:
        transport.send(channel, 0, element if channel.direction == "activation" else [element])
        return True
    metas = [TensorMeta.of(element)] if channel.direction == "gradient" else None
    received: Any = transport.wait(transport.receive(channel, 0, lambda: metas))
    tensor = received[0] if isinstance(received, list) else received
    _compare(name, tensor.detach(), float(channel.source))
    return True


def rank_of_stages(config: Config, topology: Topology) -> tuple[int, ...]:
    """Return the pipeline rank of each stage of the first plan of a run.

    Raises:
        ConfigError, ScheduleError: there is no plan for these sizes.
    """
    count = config.batch(topology.data).num_microbatches
    layers = _MANY_LAYERS if config.model is None else config.model.pipeline_layers
    return tuple(training_plan(config.pipeline, topology.pipeline, count, layers).rank_of_stage)


def _axes(mesh: Mesh) -> list[Axis]:
    axes = (mesh.world, mesh.pipeline, mesh.data, mesh.tensor)
    return [axis for axis in axes if axis.size > 1]


def _compare(what: str, tensor: torch.Tensor, expected: float) -> None:
    found = float(tensor.item())
    if found != expected:
        raise PipelineError(f"{what} is {found:g} and not {expected:g}: the data is changed")

"""Sends one element over every connection that a run uses, and checks what arrives."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from pipemega.config import Config
from pipemega.distributed.backends import message_device
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.errors import PipelineError
from pipemega.pipeline.messages import TensorMeta
from pipemega.pipeline.plan.channels import Channel, channels
from pipemega.pipeline.plan_selection import training_plan
from pipemega.pipeline.transport import Transport
from pipemega.planning.run_checks import layers_of, planned_order

# What the steps below wait for, told to the caller: it is in the error if one does not end.
Tell = Callable[[str], None]

# More layers than any plan has stages: without the section `model` the number is unknown.
_MANY_LAYERS = 1 << 20


def check_axes(mesh: Mesh, tell: Tell) -> list[str]:
    """All-reduce one element over every axis; return the names of the axes.

    Raises:
        PipelineError: a sum is wrong.
    """
    names = []
    for axis in _axes(mesh):
        devices = {"": message_device(axis.group, mesh.device)}
        if devices[""].type == "cuda":
            # The groups of GPUs transfer host memory, too.
            devices[" (gloo)"] = torch.device("cpu")
        for suffix, device in devices.items():
            name = f"{axis.name} ranks {axis.ranks}{suffix}"
            tell(f"the all-reduce over {name}")
            element = torch.full((1,), float(axis.rank + 1), device=device)
            dist.all_reduce(element, group=axis.group)
            _compare(f"the sum over {name}", element, axis.size * (axis.size + 1) / 2)
            names.append(f"{axis.name}{suffix}")
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
    """Send one element over every channel of the pipeline, with the transport of a run.

    All ranks go through the channels in the same order, so none waits for a later one.

    Returns:
        the number of channels of this rank.

    Raises:
        PipelineError: a message is not what the peer sent, or the connection is lost.
    """
    tell(f"the connections between the pipeline ranks {mesh.pipeline.ranks}")
    transport = Transport(mesh.pipeline, rank_of_stage, mesh.device, timeout=mesh.timeout)
    own = mesh.pipeline.rank
    used = [c for c in channels(rank_of_stage) if own in _ends(c, rank_of_stage)]
    for channel in used:
        source, target = (mesh.pipeline.ranks[rank] for rank in _ends(channel, rank_of_stage))
        name = f"the {channel.direction} of stage {channel.source} for stage {channel.target}"
        tell(f"{name}, from rank {source} to rank {target}")
        element = torch.full((1,), float(channel.source), device=mesh.device)
        is_activation = channel.direction == "activation"
        if own == rank_of_stage[channel.source]:
            transport.send(channel, 0, element if is_activation else [element])
            continue
        metas = None if is_activation else [TensorMeta.of(element)]
        received = transport.wait(transport.receive(channel, 0, partial(_same, metas)))
        tensor = received if is_activation else received[0]
        _compare(name, tensor.detach(), float(channel.source))
    transport.flush()
    return len(used)


def _same(metas: list[TensorMeta] | None) -> list[TensorMeta] | None:
    return metas


def _ends(channel: Channel, rank_of_stage: Sequence[int]) -> tuple[int, int]:
    return rank_of_stage[channel.source], rank_of_stage[channel.target]


def rank_of_stages(config: Config, topology: Topology) -> tuple[int, ...]:
    """Return the pipeline rank of each stage of the first plan of a run.

    Raises:
        ConfigError, ScheduleError: there is no plan for these sizes.
    """
    count = config.batch(topology.data).num_microbatches
    layers = layers_of(config, topology) or _MANY_LAYERS
    order = planned_order(config)
    plan = training_plan(config.pipeline, topology.pipeline, count, layers, order)
    return plan.rank_of_stage


def _axes(mesh: Mesh) -> list[Axis]:
    axes = (mesh.world, mesh.pipeline, mesh.data, mesh.tensor)
    return [axis for axis in axes if axis.size > 1]


def _compare(what: str, tensor: torch.Tensor, expected: float) -> None:
    found = float(tensor.item())
    if found != expected:
        raise PipelineError(f"{what} is {found:g} and not {expected:g}: wrong data arrived")

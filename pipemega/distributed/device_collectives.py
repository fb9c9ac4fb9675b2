"""Collectives over an axis whose results are on the device.

They call torch's functions, and mark the wait of the stream for the errors of `device_waits`. If
some ranks of the axis are on CPUs, the tensors of the others go through host memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.backends import goes_through_host
from pipemega.distributed.comm_errors import collective_error
from pipemega.distributed.comm_recorder import recorded
from pipemega.distributed.device_waits import mark, synchronize
from pipemega.distributed.mesh import Axis


def all_reduce(tensor: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce over the axis, in place."""
    with _in_shared_memory(tensor, axis) as shared:
        run = partial(dist.all_reduce, shared, op, group=axis.group)
        recorded("all_reduce", tensor.nbytes, axis.group, run)
    _mark("all_reduce", tensor, axis)


def all_gather(gathered: Sequence[Tensor], tensor: Tensor, axis: Axis) -> None:
    """Copy the `tensor` of each rank to its place in `gathered`."""
    if goes_through_host(axis.group, tensor.device):
        on_host = [torch.empty_like(each, device="cpu") for each in gathered]
        synchronize()
        all_gather(on_host, tensor.cpu(), axis)
        for target, each in zip(gathered, on_host, strict=True):
            target.copy_(each)
        return
    run = partial(dist.all_gather, list(gathered), tensor, group=axis.group)
    recorded("all_gather", axis.size * tensor.nbytes, axis.group, run)
    _mark("all_gather", tensor, axis)


def broadcast(tensor: Tensor, source: int, axis: Axis) -> None:
    """Copy the tensor of the global rank `source` to all ranks of the axis, in place."""
    with _in_shared_memory(tensor, axis) as shared:
        run = partial(dist.broadcast, shared, src=source, group=axis.group)
        recorded("broadcast", tensor.nbytes, axis.group, run)
    _mark("broadcast", tensor, axis)


@contextmanager
def _in_shared_memory(tensor: Tensor, axis: Axis) -> Iterator[Tensor]:
    """Yield the tensor, or a copy on the host whose new value the tensor gets afterwards."""
    if not goes_through_host(axis.group, tensor.device):
        yield tensor
        return
    synchronize()
    copy = tensor.cpu()
    yield copy
    tensor.copy_(copy)


def _mark(call: str, tensor: Tensor, axis: Axis) -> None:
    assert axis.group is not None, "an axis of one rank does not communicate"
    mark(collective_error(call, tensor, axis.group))

"""Collectives over an axis whose results are on the device.

They call torch's functions, and mark the wait of the stream for the errors of `device_waits`.
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import collective_error
from pipemega.distributed.comm_recorder import recorded
from pipemega.distributed.device_waits import mark
from pipemega.distributed.mesh import Axis


def all_reduce(tensor: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce over the axis, in place."""
    run = partial(dist.all_reduce, tensor, op, group=axis.group)
    recorded("all_reduce", tensor.nbytes, axis.group, run)
    _mark("all_reduce", tensor, axis)


def all_gather(gathered: Sequence[Tensor], tensor: Tensor, axis: Axis) -> None:
    """Copy the `tensor` of each rank to its place in `gathered`."""
    run = partial(dist.all_gather, list(gathered), tensor, group=axis.group)
    recorded("all_gather", axis.size * tensor.nbytes, axis.group, run)
    _mark("all_gather", tensor, axis)


def broadcast(tensor: Tensor, source: int, axis: Axis) -> None:
    """Copy the tensor of the global rank `source` to all ranks of the axis, in place."""
    run = partial(dist.broadcast, tensor, src=source, group=axis.group)
    recorded("broadcast", tensor.nbytes, axis.group, run)
    _mark("broadcast", tensor, axis)


def _mark(call: str, tensor: Tensor, axis: Axis) -> None:
    assert axis.group is not None, "an axis of one rank does not communicate"
    mark(collective_error(call, tensor, axis.group))

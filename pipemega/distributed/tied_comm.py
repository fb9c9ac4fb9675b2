"""Collectives among the ranks that hold a copy of one tied parameter.

These ranks are a subset of a pipeline axis and use point-to-point messages over its group. They
cannot have a separate group: torch names a locally synchronized group by the number of groups that
a rank is in, which differs between ranks with a copy and ranks without one.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.backends import goes_through_host
from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.comm_recorder import recorded
from pipemega.distributed.device_waits import synchronize, wait
from pipemega.distributed.mesh import Axis

# Larger than the tags of the pipeline's channels, which count stages.
_TAG = 1 << 20


def all_reduce_tied(tensor: Tensor, holders: Axis) -> None:
    """Sum over the holders in rank order, in place; the result is bitwise equal on all of them."""
    if holders.size == 1:
        return
    others = [rank for rank in holders.ranks if rank != holders.ranks[holders.rank]]
    if holders.size == 2:
        # Both send, and both add: the sum of two numbers does not depend on their order.
        (received,) = _exchange(holders, send=[tensor], to=others, receive=[tensor], source=others)
        tensor.add_(received)
    elif holders.rank == 0:
        for received in _exchange(holders, receive=[tensor] * len(others), source=others):
            tensor.add_(received)
        _exchange(holders, send=[tensor] * len(others), to=others)
    else:
        first = holders.ranks[:1]
        _exchange(holders, send=[tensor], to=first)
        tensor.copy_(_exchange(holders, receive=[tensor], source=first)[0])


def broadcast_tied(tensor: Tensor, holders: Axis) -> None:
    """Copy the tensor of the first holder to all holders, in place."""
    if holders.rank == 0:
        others = holders.ranks[1:]
        _exchange(holders, send=[tensor] * len(others), to=others)
    else:
        tensor.copy_(_exchange(holders, receive=[tensor], source=holders.ranks[:1])[0])


def _exchange(
    holders: Axis,
    *,
    send: Sequence[Tensor] = (),
    to: Sequence[int] = (),
    receive: Sequence[Tensor] = (),
    source: Sequence[int] = (),
) -> list[Tensor]:
    """Send and receive in one batch; return the received tensors, shaped like `receive`."""
    device = (*send, *receive)[0].device
    if goes_through_host(holders.group, device):
        synchronize()
        host = partial(map, Tensor.cpu)
        on_host = _exchange(
            holders, send=[*host(send)], to=to, receive=[*host(receive)], source=source
        )
        return [tensor.to(device) for tensor in on_host]
    received = [torch.empty_like(like, memory_format=torch.contiguous_format) for like in receive]
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), peer, holders.group, tag=_TAG)
        for tensor, peer in zip(send, to, strict=True)
    ] + [
        dist.P2POp(dist.irecv, tensor, peer, holders.group, tag=_TAG)
        for tensor, peer in zip(received, source, strict=True)
    ]
    what = "the exchange of a tied parameter"
    with named_collective(what, holders.ranks):
        nbytes = sum(tensor.nbytes for tensor in (*send, *received))
        start = partial(dist.batch_isend_irecv, operations)
        works = recorded("send_recv", nbytes, holders.group, start)
    for work in works:
        wait(work, what, holders.ranks)
    return received

"""Talking among the ranks that hold a copy of one tied parameter.

They are some of the ranks of a pipeline axis, and talk over its group, two by two. A group of
their own would need a name that all of them agree on, and torch derives the names of locally
synchronised groups from how many groups a rank is in, which differs between those that hold a
copy and those that do not.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.meetings import meeting
from pipemega.mesh import Axis

# Beyond the tags of the pipeline's channels, which count stages.
_TAG = 1 << 20


def sum_over_holders(tensor: Tensor, holders: Axis) -> None:
    """Sums over the holders, in place, in their order; bit for bit the same on each."""
    if holders.size == 1:
        return
    others = [rank for rank in holders.ranks if rank != holders.ranks[holders.rank]]
    if holders.size == 2:
        # Both send and both add, at once: two numbers have one sum.
        (theirs,) = _exchange(holders, send=[tensor], to=others, receive=[tensor], source=others)
        tensor.add_(theirs)
    elif holders.rank == 0:
        for theirs in _exchange(holders, receive=[tensor] * len(others), source=others):
            tensor.add_(theirs)
        _exchange(holders, send=[tensor] * len(others), to=others)
    else:
        first = holders.ranks[:1]
        _exchange(holders, send=[tensor], to=first)
        tensor.copy_(_exchange(holders, receive=[tensor], source=first)[0])


def copy_from_first(tensor: Tensor, holders: Axis) -> None:
    """Gives every holder the first one's numbers, in place."""
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
    """Sends and receives at once; returns what came, of the shapes of `receive`."""
    landed = [torch.empty_like(like, memory_format=torch.contiguous_format) for like in receive]
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), peer, holders.group, tag=_TAG)
        for tensor, peer in zip(send, to, strict=True)
    ] + [
        dist.P2POp(dist.irecv, tensor, peer, holders.group, tag=_TAG)
        for tensor, peer in zip(landed, source, strict=True)
    ]
    with meeting("the exchange of a tied parameter", holders.ranks):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return landed

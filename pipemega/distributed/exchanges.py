"""Collectives over an axis whose results are on the device.

They call torch's functions, and mark the wait of the stream for the errors of `device_waits`. If
some ranks of the axis are on CPUs, the tensors of the others go through host memory.

Collectives among the ranks that hold a copy of one tied parameter.

These ranks are a subset of a pipeline axis and use point-to-point messages over its group. They
cannot have a separate group: torch names a locally synchronized group by the number of groups that
a rank is in, which differs between ranks with a copy and ranks without one.

Every call of torch.distributed that moves tensors of a step goes through `recorded`, also those of
other modules. Without a recorder it only makes the call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import collective_error, named_collective
from pipemega.distributed.device_waits import mark, synchronize, wait
from pipemega.distributed.mesh import Axis
from pipemega.distributed.process_groups import goes_through_host

_Result = TypeVar("_Result")

_recorder: Callable[..., Any] | None = None


def record_with(recorder: Callable[..., Any] | None) -> None:
    """Record all calls of this process from now on.

    Args:
        recorder: makes and records a call; gets the arguments of `recorded`. None: record none.
    """
    global _recorder
    _recorder = recorder


def recorded(
    name: str,
    nbytes: int,
    group: dist.ProcessGroup | None,
    call: Callable[[], _Result],
    *,
    ranks: int = 0,
    on_host: bool = False,
) -> _Result:
    """Call `call`, which starts or runs a communication of a step, and record it.

    Args:
        name: such as "all_reduce".
        nbytes: bytes of the whole tensor: the gathered one, the one that is scattered.
        group: the process group; None: all ranks.
        call: returns a `dist.Work`, or a list of them, if the communication is asynchronous; the
            result is waited for in the same way as without recording.
        ranks: number of ranks that take part; 0: all ranks of the group.
        on_host: the tensors are on the host.
    """
    # Another thread may end the recording meanwhile.
    recorder = _recorder
    if recorder is None:
        return call()
    result: _Result = recorder(name, nbytes, group, call, ranks=ranks, on_host=on_host)
    return result


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

"""Collectives over an axis whose results are on the device.

They call torch's functions, and mark the wait of the stream for the errors of `device_waits`. If
some ranks of the axis are on CPUs, the tensors of the others go through host memory.

Collectives among the ranks that hold a copy of one tied parameter.

These ranks are a subset of a pipeline axis and use point-to-point messages over its group. They
cannot have a separate group: torch names a locally synchronized group by the number of groups that
a rank is in, which differs between ranks with a copy and ranks without one.

Copies byte ranges of tensors between the ranks of an axis, a bounded number of bytes at a time.

Every rank passes the same list of pieces, so all ranks make the same batches of them.  A batch is
one all-to-all: unlike single sends it needs no new communicator for two ranks, and every rank waits
for it with the deadline of the axis.

Every call of torch.distributed that moves tensors of a step goes through `recorded`, also calls in
other modules. Without a recorder it only makes the call.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import collective_error, named_collective
from pipemega.distributed.device_waits import mark, synchronize, wait
from pipemega.distributed.mesh import Axis
from pipemega.distributed.process_groups import goes_through_host, message_device

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


Key = tuple[str, str]
"""Names a tensor on every rank: the logical name of a parameter, and the kind of its state."""

LARGEST_BATCH = 128 << 20
"""Bytes of a batch, over all ranks: each rank needs at most twice as many in addition."""


class TensorInfo(NamedTuple):
    """What a rank needs to allocate a tensor.

    Args:
        device: "device": the device of each rank, which may differ between them; or "host".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> "TensorInfo":
        """Describe a tensor of a rank on `device`."""
        place = "device" if tensor.device.type == device.type else "host"
        return cls(tuple(tensor.shape), tensor.dtype, place)

    def empty(self, device: torch.device) -> Tensor:
        """Return a new tensor, on `device` or on the host."""
        on = device if self.device == "device" else torch.device("cpu")
        return torch.empty(self.shape, dtype=self.dtype, device=on)


class Piece(NamedTuple):
    """Bytes of the tensor `key` that one rank of the axis has and another one, or itself, wants.

    Args:
        source, target: ranks on the axis.
        read, write: index of the first byte in the source's tensor, and in the target's tensor.
        size: number of bytes.
        device: place of both tensors, as in `TensorInfo`.
    """

    key: Key
    source: int
    target: int
    read: int
    write: int
    size: int
    device: str


def exchange(
    pieces: Iterable[Piece],
    held: dict[Key, Tensor],
    wanted: Mapping[Key, TensorInfo],
    axis: Axis,
    device: torch.device,
    largest: int = LARGEST_BATCH,
) -> dict[Key, Tensor]:
    """Return the wanted tensors, filled with the pieces for this rank; collective.

    Args:
        pieces: the pieces of all ranks; equal on every rank.
        held: key -> tensor, for the pieces that this rank sends; removed once it is sent.
        wanted: key -> the tensors to return.
        axis: the ranks.
        device: the device of the tensors that are not on the host.
        largest: bytes of a batch.

    Raises:
        PipelineError: a rank is lost or does not respond in time.
    """
    ordered = sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.device)
    left = Counter(piece.key for piece in ordered if piece.source == axis.rank)
    received: dict[Key, Tensor] = {}
    for batch in _batches(ordered, largest):
        for piece, part in _received(batch, held, axis, device):
            if piece.key not in received:
                received[piece.key] = wanted[piece.key].empty(device)
            _bytes(received[piece.key])[piece.write : piece.write + piece.size].copy_(part)
        for piece, whole in batch:
            if piece.source == axis.rank and whole:
                left[piece.key] -= 1
                if not left[piece.key]:
                    del held[piece.key]
    for key, info in wanted.items():
        if key not in received:
            received[key] = info.empty(device)
    return received


def _batches(pieces: Iterable[Piece], largest: int) -> Iterator[list[tuple[Piece, bool]]]:
    """Yield batches of (part of a piece, whether it is its last part)."""
    batch: list[tuple[Piece, bool]] = []
    room = largest
    for piece in pieces:
        if batch and batch[0][0].device != piece.device:
            yield batch
            batch, room = [], largest
        done = 0
        while done < piece.size:
            size = min(room, piece.size - done)
            part = piece._replace(read=piece.read + done, write=piece.write + done, size=size)
            done, room = done + size, room - size
            batch.append((part, done == piece.size))
            if not room:
                yield batch
                batch, room = [], largest
    if batch:
        yield batch


def _received(
    batch: list[tuple[Piece, bool]],
    held: Mapping[Key, Tensor],
    axis: Axis,
    device: torch.device,
) -> Iterator[tuple[Piece, Tensor]]:
    """Send the parts of a batch; yield the parts for this rank with their bytes."""

    def of(piece: Piece) -> Tensor:
        return _bytes(held[piece.key])[piece.read : piece.read + piece.size]

    parts = [piece for piece, _ in batch]
    for piece in parts:
        if piece.source == piece.target == axis.rank:
            yield piece, of(piece)
    sent = [piece for piece in parts if piece.source != piece.target]
    if not sent:
        return  # on every rank
    outgoing = sorted((p for p in sent if p.source == axis.rank), key=lambda p: p.target)
    incoming = sorted((p for p in sent if p.target == axis.rank), key=lambda p: p.source)
    in_place = sent[0].device == "device"
    on = message_device(axis.group, device) if in_place else torch.device("cpu")
    empty = torch.empty(0, dtype=torch.uint8, device=on)
    output = torch.cat([empty, *(of(piece).to(on) for piece in outgoing)])
    result = torch.empty(sum(p.size for p in incoming), dtype=torch.uint8, device=on)
    send_sizes, receive_sizes = (
        [sum(p.size for p in part if p[side] == rank) for rank in range(axis.size)]
        for part, side in ((outgoing, _TARGET), (incoming, _SOURCE))
    )
    what = f"the exchange of {sum(p.size for p in sent) / 1e6:.1f} MB of state"
    with named_collective(what, axis.ranks):
        start = partial(
            dist.all_to_all_single,
            result,
            output,
            receive_sizes,
            send_sizes,
            group=axis.group,
            async_op=True,
        )
        work = recorded("all_to_all", output.nbytes, axis.group, start)
    assert work is not None
    wait(work, what, axis.ranks)
    start_at = 0
    for piece in incoming:
        yield piece, result[start_at : start_at + piece.size]
        start_at += piece.size


_SOURCE, _TARGET = Piece._fields.index("source"), Piece._fields.index("target")


def _bytes(tensor: Tensor) -> Tensor:
    """Return the contiguous tensor as bytes [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)

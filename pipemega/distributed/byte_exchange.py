"""Copies byte ranges of tensors between the ranks of an axis, a bounded number of bytes at a time.

Every rank passes the same list of pieces, so all ranks make the same batches of them.  A batch is
one all-to-all: unlike single sends it needs no new communicator for two ranks, and every rank waits
for it with the deadline of the axis.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.device_waits import wait
from pipemega.distributed.exchanges import recorded
from pipemega.distributed.mesh import Axis

Key = tuple[str, str]
"""Names a tensor on every rank: the logical name of a parameter, and the kind of its state."""

LARGEST_BATCH = 128 << 20
"""Bytes of a batch, over all ranks: each rank needs at most twice as many in addition."""


class TensorInfo(NamedTuple):
    """What a rank needs to allocate a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def empty(self, device: torch.device) -> Tensor:
        """Return a new tensor, on `device` or on the host."""
        on = device if device.type == self.device else torch.device(self.device)
        return torch.empty(self.shape, dtype=self.dtype, device=on)


class Piece(NamedTuple):
    """Bytes of the tensor `key` that one rank of the axis has and another one, or itself, wants.

    Args:
        source, target: ranks on the axis.
        read, write: first byte in the tensor of the source, and in that of the target.
        size: in bytes.
        device: type of the device of both tensors.
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
        pieces: of all ranks, equal on all of them.
        held: key -> tensor, for the pieces that this rank sends; removed once it is sent.
        wanted: key -> the tensors to return.
        axis: the ranks.
        device: of the tensors that are not on the host.
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
    """Send the parts of a batch; yield those for this rank with their bytes."""

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
    on = device if device.type == sent[0].device else torch.device(sent[0].device)
    empty = torch.empty(0, dtype=torch.uint8, device=on)
    output = torch.cat([empty, *map(of, outgoing)])
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

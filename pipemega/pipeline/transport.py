"""Point-to-point messages between pipeline ranks: trees of tensors over FIFO channels.

With several stages per rank, the messages between two ranks are not in FIFO order, but the
messages of each channel are (`plan.channels`). A message consists of a header (structure, dtypes,
shapes, constants) and its tensors. `shapes` decides when headers are sent:

    declared    never: both peers have the header from the model; the sender checks each message
    cached      with the first message of a channel; the sender checks that later messages match it
    exchanged   with every message

In evaluation every message has a header, because sizes may differ.
Gradients have no header: the receiver has the shapes of the activation that it sent.

The tensors of a micro-batch are one message: several are copied into one buffer. Small messages
between two processes of one host go through a socket (`distributed.local_sockets`), not gloo.

Between a GPU and a CPU, gloo transfers the messages: the rank on the GPU copies them to the host
before it sends them, and to the device once they have arrived.
"""

import pickle
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import comm_error
from pipemega.distributed.device_waits import mark, synchronize
from pipemega.distributed.exchanges import recorded
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.local_sockets import Receiver, Sender, Work
from pipemega.distributed.mesh import Axis
from pipemega.errors import PipelineError
from pipemega.pipeline.connections import Route, connect
from pipemega.pipeline.messages import (
    Header,
    Packed,
    TensorMeta,
    as_bytes,
    changed_in_place,
    tensors_of,
    version_of,
    wire_format,
)
from pipemega.pipeline.plan.channels import Channel, ShapeMode
from pipemega.pipeline.plan.instructions import TRANSFER_OF_NAME, Instruction

# Largest message that goes through a local socket. Several of them fit in its buffer. Larger ones
# are transferred by gloo in its own thread, while this rank computes.
LOCAL_BYTES = 1 << 16

# A header of up to this size is one message.
_HEADER_BYTES = 1024
_LENGTH = struct.Struct("q")
_HOST = torch.device("cpu")

Metas = Callable[[], list[TensorMeta] | None]


class Receive:
    """A requested receive; it is posted as soon as its shapes are known.

    Args:
        grad_metas: returns the shapes of a gradient; an activation has a header.
    """

    __slots__ = ("channel", "grad_metas", "header", "microbatch", "posted", "tensors", "work")

    def __init__(self, channel: Channel, microbatch: int, grad_metas: Metas) -> None:
        self.channel, self.microbatch, self.grad_metas = channel, microbatch, grad_metas
        self.header: Header | None = None
        self.tensors: list[Tensor] = []
        self.work: Work | None = None  # None also for a message without tensors
        self.posted = False


class _Send(NamedTuple):
    """A message that may still be sent; keeps its tensor alive."""

    tensor: Tensor
    version: int
    work: Work


class Transport:
    """All channels of one pipeline rank. Creating it is collective: it opens the connections.

    Args:
        pipeline: the pipeline axis of the mesh.
        rank_of_stage: the pipeline rank of each stage.
        device: device of received tensors.
        shapes: when headers are sent, see above.
        declared: boundary -> header, for `shapes="declared"`.
        timeout: limit of each wait.
        routes: the route of each channel; None: open the connections of a plan without vocabulary
            parallelism.
    """

    def __init__(
        self,
        pipeline: Axis,
        rank_of_stage: Sequence[int],
        device: torch.device,
        shapes: ShapeMode = "cached",
        declared: Mapping[int, Header] | None = None,
        timeout: timedelta = timedelta(minutes=10),
        routes: Mapping[Channel, Route] | None = None,
    ) -> None:
        self._pipeline, self._rank_of_stage, self._device = pipeline, tuple(rank_of_stage), device
        self._shapes: ShapeMode = shapes
        self._declared, self._timeout = dict(declared or {}), timeout
        self._exchange_all = False
        self._sent_headers: dict[Channel, Header] = {}
        self._received_headers: dict[Channel, Header] = {}
        self._unposted: dict[Channel, deque[Receive]] = defaultdict(deque)
        # Header and tensors of a micro-batch, in the order of the sends.
        self._sends: dict[tuple[Channel, int], list[_Send]] = {}
        self._memory = HostMemory(device)
        self._routes = routes or connect(pipeline, self._rank_of_stage, device, timeout)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each pipeline rank."""
        return self._pipeline.ranks

    def exchange_all(self, enabled: bool) -> None:
        """Send a header with every message, for evaluation."""
        self._exchange_all = enabled

    def forget_headers(self, *, declared: bool = False) -> None:
        """Send and expect a header with the next message of each channel; on every rank.

        Args:
            declared: also forget headers that the model declares; else they stay.
        """
        if declared:
            self._declared.clear()
        self._sent_headers.clear()
        self._received_headers.clear()

    def send(self, channel: Channel, microbatch: int, message: Any) -> None:
        """Start sending `message` (a tree of tensors and constants) without waiting.

        Raises:
            PipelineError: the message does not match the header that the receiver has.
        """
        if channel.direction == "activation":
            known = self._declared.get(channel.boundary) or self._sent_headers.get(channel)
            if self._exchange_all or known is None or self._shapes == "exchanged":
                header = Header.of(message)
                self._send_header(channel, microbatch, header)
                if not self._exchange_all:
                    self._sent_headers[channel] = header
            elif not known.matches(message):
                header = Header.of(message)
                raise PipelineError(self._describe_mismatch(channel, microbatch, known, header))
        # A gradient is a list with one tensor for each input, even if it is the same for several.
        tensors = tensors_of(message) if channel.direction == "activation" else list(message)
        if len(tensors) == 1:
            self._start_send(channel, microbatch, wire_format(tensors[0].detach()))
        elif tensors:
            self._start_send(channel, microbatch, self._pack(tensors))

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the buffer of a message of several tensors."""
        layout = Packed([TensorMeta.of(tensor) for tensor in tensors])
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        with torch.no_grad():
            for view, tensor in zip(layout.views(buffer), tensors, strict=True):
                view.copy_(tensor)
        return buffer

    def receive(
        self,
        channel: Channel,
        microbatch: int,
        grad_metas: Metas = lambda: None,
    ) -> Receive:
        """Request a receive; post it if its shapes are known. `wait` returns the message.

        Args:
            grad_metas: for a gradient, returns its shapes; None while they are not known.
        """
        receive = Receive(channel, microbatch, grad_metas)
        self._unposted[channel].append(receive)
        self._post_known(channel)
        return receive

    def wait(self, receive: Receive) -> Any:
        """Return the received message: a tree for an activation, a list of tensors for a gradient.

        Raises:
            PipelineError: the wait timed out or the peer is lost; names the message and the peer.
        """
        while not receive.posted:
            first = self._unposted[receive.channel][0]
            if first.channel.direction == "activation" and self._header_of(first) is None:
                first.header = self._receive_header(first)
                if not self._exchange_all and self._shapes != "exchanged":
                    self._received_headers[first.channel] = first.header
            assert self._metas(first) is not None, f"no shapes for micro-batch {first.microbatch}"
            self._post_known(receive.channel)
        if receive.work is not None:
            self._finish(receive.work, receive.channel, receive.microbatch)
            if self._routes[receive.channel].on_host:  # no copy on a CPU
                receive.tensors = [t.to(self._device, non_blocking=True) for t in receive.tensors]
        if receive.header is None:
            return receive.tensors
        return receive.header.fill(receive.tensors)

    def release(self, channel: Channel, microbatch: int) -> None:
        """Free a sent message that the receiver has used."""
        for send in self._sends.pop((channel, microbatch), ()):
            self._finish_send(send, channel, microbatch)

    def flush(self, check: bool = True) -> None:
        """Wait until all sends have completed.

        Args:
            check: whether a tensor that was changed while it was sent is an error.

        Raises:
            PipelineError: a sent tensor was changed in place.
        """
        for (channel, microbatch), sends in self._sends.items():
            for send in sends:
                self._finish_send(send, channel, microbatch, check)
        self._sends.clear()

    def _finish_send(
        self, send: _Send, channel: Channel, microbatch: int, check: bool = True
    ) -> None:
        self._finish(send.work, channel, microbatch)
        if check and version_of(send.tensor) != send.version:
            source = "a shard" if channel.has_shard else f"stage {channel.source}"
            name = f"the {channel.direction} of micro-batch {microbatch} of {source}"
            raise changed_in_place(name)

    def _header_of(self, receive: Receive) -> Header | None:
        if receive.header is not None:
            return receive.header
        if self._exchange_all or self._shapes == "exchanged":
            return None
        declared = self._declared.get(receive.channel.boundary)
        return declared or self._received_headers.get(receive.channel)

    def _metas(self, receive: Receive) -> list[TensorMeta] | None:
        if receive.channel.direction != "activation":
            return receive.grad_metas()
        header = self._header_of(receive)
        return None if header is None else header.tensors

    def _post_known(self, channel: Channel) -> None:
        """Post receives in the order of the channel, up to the first with unknown shapes."""
        queue = self._unposted[channel]
        while queue and (metas := self._metas(queue[0])) is not None:
            receive = queue.popleft()
            if channel.direction == "activation":
                receive.header = self._header_of(receive)
            self._post(receive, metas)

    def _post(self, receive: Receive, metas: Sequence[TensorMeta]) -> None:
        if len(metas) == 1:
            (meta,) = metas
            payload = self._empty(receive.channel, meta.shape, meta.dtype)
            receive.tensors = [payload]
            receive.work = self._irecv(receive.channel, as_bytes(payload))
        elif metas:
            layout = Packed(metas)
            buffer = self._empty(receive.channel, (layout.nbytes,), torch.uint8)
            receive.tensors = layout.views(buffer)
            receive.work = self._irecv(receive.channel, buffer)
        receive.posted = True

    def _empty(self, channel: Channel, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a message of `channel`."""
        on_host = self._routes[channel].on_host
        device, pins = (_HOST, self._memory.pins) if on_host else (self._device, False)
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pins)

    def _send_header(self, channel: Channel, microbatch: int, header: Header) -> None:
        pickled = pickle.dumps(header)
        message = bytearray(_LENGTH.pack(len(pickled)) + pickled)
        message += bytes(max(0, _HEADER_BYTES - len(message)))
        for part in (message[:_HEADER_BYTES], message[_HEADER_BYTES:]):
            if part:
                tensor = torch.frombuffer(part, dtype=torch.uint8)
                if not self._routes[channel].on_host:
                    tensor = self._memory.pinned(tensor).to(self._device, non_blocking=True)
                self._start_send(channel, microbatch, tensor)

    def _receive_header(self, receive: Receive) -> Header:
        """Receive the header and copy it to the host: the tensors cannot be posted without it."""
        message = self._receive_bytes(receive, _HEADER_BYTES)
        (length,) = _LENGTH.unpack_from(message)
        if (rest := _LENGTH.size + length - _HEADER_BYTES) > 0:
            message += self._receive_bytes(receive, rest)
        # Safe to unpickle: it comes from a rank of this run, never from a file.
        header = pickle.loads(message[_LENGTH.size : _LENGTH.size + length])
        assert isinstance(header, Header)
        return header

    def _receive_bytes(self, receive: Receive, count: int) -> bytes:
        tensor = self._empty(receive.channel, (count,), torch.uint8)
        work = self._irecv(receive.channel, tensor)
        self._finish(work, receive.channel, receive.microbatch)
        synchronize()
        return bytes(tensor.tolist())

    def _start_send(self, channel: Channel, microbatch: int, tensor: Tensor) -> None:
        peer, group, tag, local, on_host = self._routes[channel]
        if on_host and tensor.device.type != "cpu":
            copy = self._empty(channel, tensor.shape, tensor.dtype)
            self._memory.copy(copy, tensor)
            synchronize(self._memory.record())  # gloo reads the copy from now on
            tensor = copy
        if isinstance(local, Sender) and tensor.nbytes <= LOCAL_BYTES:
            start: Callable[[], Work | None] = partial(local.send, tensor)
        else:
            start = partial(dist.isend, tensor, peer, group=group, tag=tag)
        work = recorded("send", tensor.nbytes, group, start, ranks=2)
        assert work is not None
        send = _Send(tensor, version_of(tensor), work)
        self._sends.setdefault((channel, microbatch), []).append(send)
        if self._device.type == "cuda":
            self._forget_completed()

    def _forget_completed(self) -> None:
        """Free the messages whose transfer has ended."""
        for key, sends in list(self._sends.items()):
            if all(send.work.is_completed() for send in sends):
                del self._sends[key]

    def _irecv(self, channel: Channel, tensor: Tensor) -> Work:
        peer, group, tag, local, _ = self._routes[channel]
        if isinstance(local, Receiver) and tensor.nbytes <= LOCAL_BYTES:
            start: Callable[[], Work | None] = partial(local.receive, tensor)
        else:
            start = partial(dist.irecv, tensor, peer, group=group, tag=tag)
        work = recorded("recv", tensor.nbytes, group, start, ranks=2)
        assert work is not None
        return work

    def _finish(self, work: Work, channel: Channel, microbatch: int) -> None:
        try:
            if self._device.type == "cuda" and not self._routes[channel].on_host:
                # Only the stream waits; with a timeout the host would, too.
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._error(channel, microbatch, error) from error
        mark(partial(self._error, channel, microbatch))

    def _error(self, channel: Channel, microbatch: int, error: RuntimeError) -> PipelineError:
        return comm_error(self._describe_wait(channel, microbatch), error)

    def _describe_mismatch(
        self, channel: Channel, microbatch: int, known: Header, header: Header
    ) -> str:
        """Return the error about an output that is not the one that the receiver expects."""
        if channel.boundary in self._declared:
            difference = known.difference(header, "is declared as", "is")
            return (
                f"the output of stage {channel.source} at micro-batch {microbatch} is not what the "
                f"model declares for the input of stage {channel.target}: {difference}; correct "
                f"PipelineModule(..., boundary=...), or set pipeline.shapes to 'cached'"
            )
        return (
            f"the output of stage {channel.source} changed at micro-batch {microbatch}, and stage "
            f"{channel.target} cannot receive it: {known.difference(header)}; give all "
            f"micro-batches the same shapes, or set pipeline.shapes to 'exchanged'"
        )

    def _describe_wait(self, channel: Channel, microbatch: int) -> str:
        """Return the message and the peer that this rank waits for, for an error."""
        own, name = self._pipeline.rank, f"the {channel.direction} of micro-batch {microbatch}"
        source, target = channel.ranks(self._rank_of_stage)
        sends = own == source
        peer, peer_step = f"rank {self._pipeline.ranks[target if sends else source]}", ""
        if not channel.has_shard:
            stage = channel.target if sends else channel.source
            transfer = TRANSFER_OF_NAME[channel.direction]
            kind = transfer.receive if sends else transfer.send
            peer = f"stage {stage} on {peer}"
            peer_step = f" ({Instruction(kind, stage, microbatch)})"
        waited = f"pipeline rank {own} waited for"
        if sends:
            return f"{waited} {peer} to receive {name}{peer_step}"
        return f"{waited} {name} from {peer}{peer_step}"

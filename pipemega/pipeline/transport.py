"""Point-to-point messages between pipeline ranks: trees of tensors over FIFO channels.

With several stages per rank, the messages between two ranks are not in FIFO order, but those of
each channel are (`plan.channels`). A message consists of a header (structure, dtypes, shapes,
constants) and its tensors. `shapes` decides when headers are sent:

    declared    never: both peers have the header from the model; the sender checks each message
    cached      with the first message of a channel; the sender checks that later messages match it
    exchanged   with every message

In evaluation every message has a header, because sizes may differ.
Gradients have no header: the receiver has the shapes of the activation that it sent.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import comm_error
from pipemega.distributed.comm_recorder import recorded
from pipemega.distributed.device_waits import mark, synchronize
from pipemega.distributed.mesh import Axis
from pipemega.errors import PipelineError
from pipemega.host_memory import HostMemory
from pipemega.pipeline.connections import connect
from pipemega.pipeline.messages import Header, TensorMeta, tensors_of
from pipemega.pipeline.plan.channels import Channel, ShapeMode
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.stage_input import check_unchanged, versions_of


@dataclass(eq=False)
class Receive:
    """A requested receive; it is posted (irecv) as soon as its shapes are known."""

    channel: Channel
    microbatch: int
    grad_metas: Callable[[], list[TensorMeta] | None]  # for a gradient; an activation has a header
    header: Header | None = None
    tensors: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    posted: bool = False


class _Send(NamedTuple):
    """A message whose sends may still be running; keeps its tensors alive."""

    channel: Channel
    microbatch: int
    tensors: list[Tensor]
    versions: list[int]
    works: list[dist.Work]


class Transport:
    """All channels of one pipeline rank. Creating it is collective: it opens the connections.

    Args:
        pipeline: the pipeline axis of the mesh.
        rank_of_stage: the pipeline rank of each stage.
        device: device of received tensors.
        shapes: when headers are sent, see above.
        declared: boundary -> header, for `shapes="declared"`.
        timeout: limit of each wait.
    """

    def __init__(
        self,
        pipeline: Axis,
        rank_of_stage: Sequence[int],
        device: torch.device,
        shapes: ShapeMode = "cached",
        declared: Mapping[int, Header] | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self._pipeline, self._rank_of_stage, self._device = pipeline, tuple(rank_of_stage), device
        self._shapes: ShapeMode = shapes
        self._declared, self._timeout = dict(declared or {}), timeout
        self._exchange_all = False
        self._sent_headers: dict[Channel, Header] = {}
        self._received_headers: dict[Channel, Header] = {}
        self._unposted: dict[Channel, deque[Receive]] = defaultdict(deque)
        self._sends: list[_Send] = []
        self._memory = HostMemory(device)
        self._routes = connect(pipeline, self._rank_of_stage, device, timeout)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each pipeline rank."""
        return self._pipeline.ranks

    def exchange_all(self, enabled: bool) -> None:
        """Send a header with every message, for evaluation."""
        self._exchange_all = enabled

    def forget_headers(self) -> None:
        """Send and expect a header with the next message of each channel; on every rank."""
        self._sent_headers.clear()
        self._received_headers.clear()

    def send(self, channel: Channel, microbatch: int, message: Any) -> None:
        """Start sending `message` (a tree of tensors and constants) without waiting.

        Raises:
            PipelineError: the message does not match the header that the receiver has.
        """
        if channel.direction == "activation":
            header = Header.of(message)
            known = self._declared.get(channel.boundary) or self._sent_headers.get(channel)
            if self._exchange_all or known is None or self._shapes == "exchanged":
                self._send_header(channel, microbatch, header)
                if not self._exchange_all:
                    self._sent_headers[channel] = header
            elif known.difference(header) is not None:
                raise PipelineError(self._describe_mismatch(channel, microbatch, known, header))
        tensors = [_wire_format(tensor.detach()) for tensor in tensors_of(message)]
        self._start_send(channel, microbatch, tensors)

    def receive(
        self,
        channel: Channel,
        microbatch: int,
        grad_metas: Callable[[], list[TensorMeta] | None] = lambda: None,
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
        self._finish(receive.works, receive.channel, receive.microbatch)
        if receive.header is None:
            return receive.tensors
        for tensor, meta in zip(receive.tensors, receive.header.tensors, strict=True):
            tensor.requires_grad_(meta.requires_grad)
        return receive.header.fill(receive.tensors)

    def release(self, channel: Channel, microbatch: int) -> None:
        """Free a sent message that the receiver has used."""
        kept = []
        for send in self._sends:
            # The header and the tensors are two sends.
            if send.channel == channel and send.microbatch == microbatch:
                self._finish_send(send)
            else:
                kept.append(send)
        self._sends = kept

    def flush(self, check: bool = True) -> None:
        """Wait until all sends have completed.

        Args:
            check: whether a tensor that was changed while it was sent is an error.

        Raises:
            PipelineError: a sent tensor was changed in place.
        """
        for send in self._sends:
            self._finish_send(send, check)
        self._sends.clear()

    def _finish_send(self, send: _Send, check: bool = True) -> None:
        channel = send.channel
        self._finish(send.works, channel, send.microbatch)
        if check:
            name = f"the {channel.direction} of micro-batch {send.microbatch} of stage"
            check_unchanged(send.tensors, send.versions, f"{name} {channel.source}")

    def _header_of(self, receive: Receive) -> Header | None:
        if receive.header is not None:
            return receive.header
        if self._exchange_all or self._shapes == "exchanged":
            return None
        declared = self._declared.get(receive.channel.boundary)
        return declared or self._received_headers.get(receive.channel)

    def _metas(self, receive: Receive) -> list[TensorMeta] | None:
        if receive.channel.direction == "gradient":
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
            receive.tensors = [
                torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas
            ]
            receive.works = [self._irecv(channel, _wire_format(t)) for t in receive.tensors]
            receive.posted = True

    def _send_header(self, channel: Channel, microbatch: int, header: Header) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        tensors = [
            self._memory.pinned(tensor).to(self._device, non_blocking=True)
            for tensor in (length, payload)
        ]
        self._start_send(channel, microbatch, tensors)

    def _receive_header(self, receive: Receive) -> Header:
        """Receive the header and copy it to the host: the tensors cannot be posted without it."""
        channel, microbatch = receive.channel, receive.microbatch
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._finish([self._irecv(channel, length)], channel, microbatch)
        synchronize()
        payload = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._finish([self._irecv(channel, payload)], channel, microbatch)
        synchronize()
        # Safe to unpickle: it comes from a rank of this run, never from a file.
        header = pickle.loads(bytes(payload.tolist()))
        assert isinstance(header, Header)
        return header

    def _start_send(self, channel: Channel, microbatch: int, tensors: list[Tensor]) -> None:
        peer, group, tag = self._route(channel, channel.target)
        works = []
        for tensor in tensors:
            start = partial(dist.isend, tensor, peer, group=group, tag=tag)
            work = recorded("send", tensor.nbytes, group, start, ranks=2)
            assert work is not None
            works.append(work)
        self._sends.append(_Send(channel, microbatch, tensors, versions_of(tensors), works))
        if self._device.type == "cuda":
            self._sends = [s for s in self._sends if not all(w.is_completed() for w in s.works)]

    def _irecv(self, channel: Channel, tensor: Tensor) -> dist.Work:
        peer, group, tag = self._route(channel, channel.source)
        start = partial(dist.irecv, tensor, peer, group=group, tag=tag)
        work = recorded("recv", tensor.nbytes, group, start, ranks=2)
        assert work is not None
        return work

    def _route(self, channel: Channel, stage: int) -> tuple[int, dist.ProcessGroup, int]:
        """Return the global rank of `stage`, and the process group and tag of the channel."""
        group, tag = self._routes[channel]
        return self._pipeline.ranks[self._rank_of_stage[stage]], group, tag

    def _finish(self, works: Sequence[dist.Work], channel: Channel, microbatch: int) -> None:
        def describe(error: RuntimeError) -> PipelineError:
            return comm_error(self._describe_wait(channel, microbatch), error)

        for work in works:
            try:
                if self._device.type == "cuda":
                    # Only the stream waits; with a timeout the host would, too.
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                raise describe(error) from error
        mark(describe)

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
        sends = self._rank_of_stage[channel.source] == self._pipeline.rank
        peer_stage = channel.target if sends else channel.source
        peer_rank = self._pipeline.ranks[self._rank_of_stage[peer_stage]]
        peer = f"stage {peer_stage} on rank {peer_rank}"
        name = f"the {channel.direction} of micro-batch {microbatch}"
        kinds = {
            "activation": (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION),
            "gradient": (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT),
        }
        peer_step = Instruction(kinds[channel.direction][sends], peer_stage, microbatch)
        waited = f"pipeline rank {self._pipeline.rank} waited for"
        if sends:
            return f"{waited} {peer} to receive {name} ({peer_step})"
        return f"{waited} {name} from {peer} ({peer_step})"


def _wire_format(tensor: Tensor) -> Tensor:
    """Return `tensor` contiguous, and bool viewed as bytes, which every backend supports."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor

"""Messages between pipeline ranks: trees of tensors over first-in-first-out channels.

A channel belongs to one direction and one stage boundary, because with several stages on a rank
the messages between two ranks are not first-in-first-out any more. A message is a header
(structure, dtypes, shapes, constants) and its tensors; `shapes` says when headers travel:

    declared    never: both sides know it beforehand
    cached      with the first message of a channel; after that the sender checks that it still fits
    exchanged   with every message

Gradients need no header: their receiver knows what it sent forward.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.errors import PipelineError
from pipemega.mesh import Axis
from pipemega.pipeline.instructions import Instruction, Kind
from pipemega.pipeline.messages import Header, TensorMeta, tensors_of

ShapeMode = Literal["declared", "cached", "exchanged"]
Direction = Literal["activation", "gradient"]


class Channel(NamedTuple):
    """The way over the boundary between stage `boundary` and the next one."""

    direction: Direction
    boundary: int

    @property
    def source(self) -> int:
        """The stage that sends."""
        return self.boundary + (self.direction == "gradient")

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.boundary + (self.direction == "activation")


@dataclass(eq=False)
class Receive:
    """A receive that was announced. It is posted at once, or as soon as its shapes are known."""

    channel: Channel
    microbatch: int
    shapes: Callable[[], list[TensorMeta] | None]  # of a gradient; of an activation see the header
    header: Header | None = None
    tensors: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    posted: bool = False


class Transport:
    """The channels of one pipeline rank.

    Args:
        pipeline: the pipeline axis of the mesh.
        rank_of_stage: which pipeline rank holds which stage.
        device: where received tensors are put.
        shapes: when headers travel, see above.
        declared: boundary -> the header that both sides know, for `shapes="declared"`.
        timeout: how long a wait may take.
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
        self._sent: dict[Channel, Header] = {}
        self._known: dict[Channel, Header] = {}
        self._waiting: dict[Channel, deque[Receive]] = defaultdict(deque)
        self._sending: list[tuple[list[dist.Work], list[Tensor], Channel, int]] = []
        self._groups = self._make_groups()

    def _make_groups(self) -> dict[Direction, list[dist.ProcessGroup]]:
        """The process groups that channels share.

        Gloo keeps channels apart by tag, so one group carries all. NCCL knows no tags and keeps
        the messages of a group and a pair of ranks in order: so the two directions, and the
        chunks of a rank, get groups of their own.
        """
        group = self._pipeline.group
        if group is None:
            return {"activation": [], "gradient": []}
        if dist.get_backend(group) == "gloo":
            return {"activation": [group], "gradient": [group]}
        chunks = -(-len(self._rank_of_stage) // self._pipeline.size)
        timeout, ranks = self._timeout, list(self._pipeline.ranks)
        return {
            direction: [
                dist.new_group(
                    ranks,
                    timeout=timeout,
                    use_local_synchronization=True,
                    group_desc=f"pipeline {direction} {chunk}",
                )
                for chunk in range(chunks)
            ]
            for direction in ("activation", "gradient")
        }

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each pipeline rank."""
        return self._pipeline.ranks

    def exchange_all(self, wish: bool) -> None:
        """Sends a header with every message from now on, whatever `shapes` says (evaluation)."""
        self._exchange_all = wish and self._shapes != "declared"

    def forget_shapes(self) -> None:
        """The next message of each channel brings a new header; for a new batch size."""
        self._sent.clear()
        self._known.clear()

    def send(self, channel: Channel, microbatch: int, message: Any) -> None:
        """Starts to send `message` (a tree of tensors and constants), and does not wait.

        Raises:
            PipelineError: it is not the message that the other side is prepared for.
        """
        if channel.direction == "activation":
            header = Header.of(message)
            known = self._declared.get(channel.boundary) or self._sent.get(channel)
            if self._exchange_all or (known is None) or self._shapes == "exchanged":
                self._send_header(channel, microbatch, header)
                if not self._exchange_all:
                    self._sent[channel] = header
            elif (difference := known.difference(header)) is not None:
                raise PipelineError(
                    f"the output of stage {channel.source} changed at micro-batch {microbatch}, "
                    f"and stage {channel.target} cannot receive it: {difference}; make the "
                    f"micro-batches alike, or set pipeline.shapes to 'exchanged'"
                )
        tensors = [_wire(tensor.detach()) for tensor in tensors_of(message)]
        self._start(channel, microbatch, tensors)

    def receive(
        self,
        channel: Channel,
        microbatch: int,
        shapes: Callable[[], list[TensorMeta] | None] = lambda: None,
    ) -> Receive:
        """Announces a receive and posts it if its shapes are known; `wait` finishes it.

        Args:
            shapes: for a gradient, what will come; None as long as that is not known.
        """
        receive = Receive(channel, microbatch, shapes)
        self._waiting[channel].append(receive)
        self._post_known(channel)
        return receive

    def wait(self, receive: Receive) -> Any:
        """What arrived: the message of an activation, the list of tensors of a gradient.

        Raises:
            PipelineError: it did not come in time, or the other side is gone; says what did not
                come, and from whom.
        """
        while not receive.posted:
            first = self._waiting[receive.channel][0]
            if first.channel.direction == "activation" and self._header_of(first) is None:
                first.header = self._receive_header(first)
                if not self._exchange_all and self._shapes != "exchanged":
                    self._known[first.channel] = first.header
            assert self._metas(first) is not None, f"no shapes for micro-batch {first.microbatch}"
            self._post_known(receive.channel)
        self._finish(receive.works, receive.channel, receive.microbatch)
        if receive.header is None:
            return receive.tensors
        for tensor, meta in zip(receive.tensors, receive.header.tensors, strict=True):
            tensor.requires_grad_(meta.requires_grad)
        return receive.header.fill(receive.tensors)

    def release(self, channel: Channel, microbatch: int) -> None:
        """Lets go of a message that the other side must have used by now."""
        for at, (works, _, of, number) in enumerate(self._sending):
            if of == channel and number == microbatch:
                self._finish(works, channel, microbatch)
                del self._sending[at]
                return

    def flush(self) -> None:
        """Waits until everything that was sent has arrived."""
        for works, _, channel, microbatch in self._sending:
            self._finish(works, channel, microbatch)
        self._sending.clear()

    def _header_of(self, receive: Receive) -> Header | None:
        if receive.header is not None:
            return receive.header
        boundary = receive.channel.boundary
        if boundary in self._declared:
            return self._declared[boundary]
        if self._exchange_all or self._shapes == "exchanged":
            return None
        return self._known.get(receive.channel)

    def _metas(self, receive: Receive) -> list[TensorMeta] | None:
        if receive.channel.direction == "gradient":
            return receive.shapes()
        header = self._header_of(receive)
        return None if header is None else header.tensors

    def _post_known(self, channel: Channel) -> None:
        """Posts the receives at the head of the channel whose shapes are known, in order."""
        queue = self._waiting[channel]
        while queue and (metas := self._metas(queue[0])) is not None:
            receive = queue.popleft()
            if channel.direction == "activation":
                receive.header = self._header_of(receive)
            receive.tensors = [
                torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas
            ]
            receive.works = [
                self._receive_one(channel, _wire(tensor)) for tensor in receive.tensors
            ]
            receive.posted = True

    def _send_header(self, channel: Channel, microbatch: int, header: Header) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        self._start(channel, microbatch, [length.to(self._device), payload.to(self._device)])

    def _receive_header(self, receive: Receive) -> Header:
        """Reads it on the host: what the message is must be known before it can be received."""
        channel, microbatch = receive.channel, receive.microbatch
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._finish([self._receive_one(channel, length)], channel, microbatch)
        payload = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._finish([self._receive_one(channel, payload)], channel, microbatch)
        # From a rank of this same run, never from a file.
        header = pickle.loads(bytes(payload.tolist()))
        assert isinstance(header, Header)
        return header

    def _start(self, channel: Channel, microbatch: int, tensors: list[Tensor]) -> None:
        peer, group, tag = self._route(channel, channel.target)
        works = []
        for tensor in tensors:
            work = dist.isend(tensor, peer, group=group, tag=tag)
            assert work is not None
            works.append(work)
        self._sending.append((works, tensors, channel, microbatch))
        if self._device.type == "cuda":
            self._sending = [s for s in self._sending if not all(w.is_completed() for w in s[0])]

    def _receive_one(self, channel: Channel, tensor: Tensor) -> dist.Work:
        peer, group, tag = self._route(channel, channel.source)
        work = dist.irecv(tensor, peer, group=group, tag=tag)
        assert work is not None
        return work

    def _route(self, channel: Channel, stage: int) -> tuple[int, dist.ProcessGroup, int]:
        """The global rank that holds `stage`, and the group and tag of the channel."""
        groups = self._groups[channel.direction]
        group = groups[channel.boundary // self._pipeline.size % len(groups)]
        tag = 2 * channel.boundary + (channel.direction == "gradient")
        return self._pipeline.ranks[self._rank_of_stage[stage]], group, tag

    def _finish(self, works: Sequence[dist.Work], channel: Channel, microbatch: int) -> None:
        for work in works:
            try:
                if self._device.type == "cuda":
                    # Queues the wait on the stream; the deadline is that of NCCL's own watchdog.
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                what = self._awaited(channel, microbatch)
                raise PipelineError(f"{what}: {self._brief(error)}") from error

    def _awaited(self, channel: Channel, microbatch: int) -> str:
        """What this rank waits for, and from whom."""
        sends = self._rank_of_stage[channel.source] == self._pipeline.rank
        there = channel.target if sends else channel.source
        peer = f"stage {there} on rank {self._pipeline.ranks[self._rank_of_stage[there]]}"
        name = f"the {channel.direction} of micro-batch {microbatch}"
        kinds = {
            "activation": (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION),
            "gradient": (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT),
        }
        step = Instruction(kinds[channel.direction][sends], there, microbatch)
        here = f"pipeline rank {self._pipeline.rank} waited for"
        if sends:
            return f"{here} {peer} to take {name} ({step})"
        return f"{here} {name} from {peer} ({step})"

    def _brief(self, error: RuntimeError) -> str:
        """The last part of a backend's message, without the file that it was built from."""
        text = str(error).split("] ", 1)[-1].strip().splitlines()[0]
        if "timed out" in text.lower():
            return f"timed out after mesh.timeout_seconds ({self._timeout.total_seconds():g} s)"
        return text


def _wire(tensor: Tensor) -> Tensor:
    """`tensor` as it can be sent: contiguous, and bool as bytes, which every backend carries."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor

"""What the executor and the transport of one rank do with the messages of its program, in order.

An instruction of a lowered plan is not yet an operation of the backend:

- A receive is posted once its shapes are known: of an activation from its header, of a gradient
  after the forward of the micro-batch. Until then it waits, and the later ones of its channel too.
- A header is a message of its own, sent and received ahead of the tensors. The rank that receives
  it waits for it in the step that uses the first message without a known header.
- A gradient proves that the activation was used; after it, the rank waits for the send of the
  activation. At the end of a step it waits for all sends.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pipemega.pipeline.plan.channels import Channel, ShapeMode
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.kinds import TRANSFER_OF_NAME, TRANSFERS
from pipemega.pipeline.plan.vocabulary_channels import PROVES, vocabulary_channels


class Message(NamedTuple):
    """One message: the tensors of a micro-batch, or their header."""

    channel: Channel
    microbatch: int
    is_header: bool = False


class Operation(NamedTuple):
    """Posts a send or a receive without waiting, or waits until a message has arrived.

    Args:
        at: index of the instruction in the program of the rank.
    """

    at: int
    posts: bool
    message: Message


@dataclass
class _Step:
    """State of one run of a program; a discarded warm-up is a run of its own."""

    unposted: dict[Channel, deque[int]] = field(default_factory=dict)
    # Requested and not yet used.
    receives: dict[tuple[Channel, int], None] = field(default_factory=dict)
    # Not yet known to have arrived.
    sends: dict[Message, None] = field(default_factory=dict)
    forwards: set[tuple[int, int]] = field(default_factory=set)


class MessageOperations:
    """Turns parts of the program of one rank into operations; keeps the known headers.

    Args:
        plan: lowered.
        shapes: of the transport; in evaluation every message has a header.
    """

    def __init__(self, plan: Plan, shapes: ShapeMode) -> None:
        self._plan = plan
        self._shapes: ShapeMode = "exchanged" if plan.forward_only else shapes
        self._sent_headers: set[Channel] = set()
        self._received_headers: set[Channel] = set()
        self._step = _Step()

    def program(self, program: Program) -> Iterator[Operation]:
        """Yield the operations of the first part of a program."""
        for at, (kind, stage, m) in enumerate(program):
            if kind is Kind.FORWARD:
                yield from self._wait(at, Channel("activation", stage - 1), m)
                self._step.forwards.add((stage, m))
            elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
                yield from self._wait(at, Channel("gradient", stage), m)
                yield from self._finish_sends(at, Channel("activation", stage), m)
            elif kind is Kind.SEND_ACTIVATION:
                yield from self._send(at, Channel("activation", stage), m)
            elif kind is Kind.SEND_GRADIENT:
                yield from self._send(at, Channel("gradient", stage - 1), m)
            elif kind is Kind.RECV_ACTIVATION:
                yield from self._receive(at, Channel("activation", stage - 1), m)
            elif kind is Kind.RECV_GRADIENT:
                yield from self._receive(at, Channel("gradient", stage), m)
            if kind.is_vocabulary or (self._plan.has_vocabulary and kind is Kind.FORWARD):
                yield from self._vocabulary(at, program[at])

    def _vocabulary(self, at: int, step: Instruction) -> Iterator[Operation]:
        """Yield the operations of a step of vocabulary parallelism."""
        for transfer in TRANSFERS:
            for channel in vocabulary_channels(self._plan, transfer, step):
                if step.kind is transfer.send:
                    yield from self._send(at, channel, step.microbatch)
                elif step.kind is transfer.receive:
                    yield from self._receive(at, channel, step.microbatch)
                elif step.kind is transfer.user:
                    yield from self._wait(at, channel, step.microbatch)
        # What has arrived proves that the other rank has used what was sent to it before.
        for transfer in TRANSFERS:
            if step.kind is transfer.user and transfer.name in PROVES:
                sent = TRANSFER_OF_NAME[PROVES[transfer.name]]
                for channel in vocabulary_channels(self._plan, transfer, step):
                    proven = Channel(sent.name, channel.boundary)
                    yield from self._finish_sends(at, proven, step.microbatch)

    def step(self, program: Program) -> Iterator[Operation]:
        """Yield the operations of a whole step."""
        yield from self.program(program)
        yield from self._end(len(program))

    def _end(self, at: int) -> Iterator[Operation]:
        """Yield the waits for all sends, at the end of a step."""
        for message in self._step.sends:
            yield Operation(at, False, message)
        assert not self._step.receives, f"never used: {list(self._step.receives)}"
        self._step = _Step()

    def discard(self, at: int, unread: Program) -> Iterator[Operation]:
        """Yield the operations that complete a discarded warm-up.

        Args:
            unread: receives of messages that were sent to this rank, and that it has not requested.
        """
        for step in unread:
            yield from self._receive(at, Channel("activation", step.stage - 1), step.microbatch)
        for channel, m in list(self._step.receives):
            yield from self._wait(at, channel, m)
        yield from self._end(at)

    def _send(self, at: int, channel: Channel, m: int) -> Iterator[Operation]:
        messages = [Message(channel, m)]
        if channel.direction == "activation" and not self._is_known(channel, self._sent_headers):
            messages.insert(0, Message(channel, m, is_header=True))
            self._sent_headers.add(channel)
        for message in messages:
            self._step.sends[message] = None
            yield Operation(at, True, message)

    def _receive(self, at: int, channel: Channel, m: int) -> Iterator[Operation]:
        self._step.receives[channel, m] = None
        self._step.unposted.setdefault(channel, deque()).append(m)
        yield from self._post_known(at, channel)

    def _wait(self, at: int, channel: Channel, m: int) -> Iterator[Operation]:
        """Yield the wait for a message, if the step uses one from another rank."""
        if (channel, m) not in self._step.receives:
            return
        del self._step.receives[channel, m]
        unposted = self._step.unposted[channel]
        while m in unposted:
            first = unposted.popleft()
            if channel.direction == "activation":
                for posts in (True, False):
                    yield Operation(at, posts, Message(channel, first, is_header=True))
                self._received_headers.add(channel)
            else:
                assert self._has_shapes(channel, first), f"{channel} {first}: no forward before"
            yield Operation(at, True, Message(channel, first))
            yield from self._post_known(at, channel)
        yield Operation(at, False, Message(channel, m))

    def _post_known(self, at: int, channel: Channel) -> Iterator[Operation]:
        """Yield the receives with known shapes, up to the first whose shapes are not known."""
        unposted = self._step.unposted[channel]
        while unposted and self._has_shapes(channel, unposted[0]):
            yield Operation(at, True, Message(channel, unposted.popleft()))

    def _has_shapes(self, channel: Channel, m: int) -> bool:
        if channel.direction == "gradient":
            return (channel.boundary, m) in self._step.forwards
        if channel.direction != "activation":
            return True  # the shapes follow from the micro-batch
        return self._is_known(channel, self._received_headers)

    def _is_known(self, channel: Channel, headers: set[Channel]) -> bool:
        return self._shapes == "declared" or (self._shapes == "cached" and channel in headers)

    def _finish_sends(self, at: int, channel: Channel, m: int) -> Iterator[Operation]:
        for is_header in (True, False):
            message = Message(channel, m, is_header)
            if message in self._step.sends:
                del self._step.sends[message]
                yield Operation(at, False, message)

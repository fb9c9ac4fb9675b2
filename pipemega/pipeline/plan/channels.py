"""The channels of a placement, and the process group of each where a backend has no tags.

A channel is one direction across one stage boundary: first in, first out. A backend separates the
channels between two ranks in one of two ways:

    tags     gloo: messages are matched by tag, so one process group carries all channels
    queues   NCCL: tags are ignored, and the sends and receives of one group between two ranks run
             in one queue for both ways, in the order in which each rank posted them. Nothing is
             buffered. Where one rank has a send next and the other has no receive next, both wait
             for ever

With queues, each channel between two ranks therefore has a group of its own:

    loop, two ranks, two chunks         pair 0-1   A0 A1 A2 G0 G1 G2       6 groups
    loop, four ranks, two chunks        pair 0-1   A0 A4 G0 G4             4 groups, for all pairs
                                        pair 1-2   A1 A5 G1 G5
                                        pair 2-3   A2 A6 G2 G6
                                        pair 0-3   A3 G3

No smaller number fits every plan: two channels of opposite ways block each other as above, and two
channels of the same way need sends and receives in one common order, which plans do not have.

What the executor and the transport of one rank do with the messages of its program, in order.

An instruction of a lowered plan is not yet an operation of the backend:

- A receive is posted once its shapes are known: of an activation from its header, of a gradient
  after the forward of the micro-batch. Until then it waits, and the later ones of its channel too.
- A header is a message of its own, sent and received ahead of the tensors. The rank that receives
  it waits for it in the step that uses the first message without a known header.
- A gradient proves that the activation was used; after it, the rank waits for the send of the
  activation. At the end of a step it waits for all sends.

Runs the message operations of a plan through the queues of a transport, or reports who waits.

A queue is between two ranks. Its operations start in the order in which each rank posted them, and
nothing is buffered: a message arrives once its send is the next operation on one rank and its
receive the next on the other. With tags each channel is a queue; without, all channels of one
process group between two ranks share one.

Each rank is executed in order. On a GPU the host posts operations ahead of the computation, but an
operation starts only after the computation that was enqueued before it. So what this order cannot
run, a GPU cannot run either, and the other way round.

The channels of the instructions of vocabulary parallelism.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

from pipemega.cuda_settings import CONNECTIONS, DEFAULTS, LOADING
from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import (
    BETWEEN_STAGES,
    TRANSFER_OF_NAME,
    Instruction,
    Kind,
    Plan,
    Program,
    Transfer,
)
from pipemega.pipeline.plan.instructions import Direction as Direction
from pipemega.pipeline.plan.lowering import cycle_of, excerpt

MessageOrder = Literal["tags", "queues"]
# When headers are sent; see `pipeline.transport`.
ShapeMode = Literal["declared", "cached", "exchanged"]


class Channel(NamedTuple):
    """One direction across the boundary between stage `boundary` and the next stage.

    In vocabulary parallelism: a transfer between a stage and the shard of rank `boundary`.
    """

    direction: Direction
    boundary: int

    @property
    def has_shard(self) -> bool:
        """Whether it belongs to vocabulary parallelism."""
        return not TRANSFER_OF_NAME[self.direction].offset

    @property
    def source(self) -> int:
        """The stage that sends."""
        assert not self.has_shard, f"{self} has a shard"
        return self.boundary + (self.direction == "gradient")

    @property
    def target(self) -> int:
        """The stage that receives."""
        assert not self.has_shard, f"{self} has a shard"
        return self.boundary + (self.direction == "activation")

    def ranks(self, rank_of_stage: Sequence[int]) -> tuple[int, int]:
        """Return the pipeline ranks that send and receive."""
        if not self.has_shard:
            return rank_of_stage[self.source], rank_of_stage[self.target]
        transfer = TRANSFER_OF_NAME[self.direction]
        stage = rank_of_stage[0 if transfer.at_first else -1]
        return (stage, self.boundary) if transfer.to_shards else (self.boundary, stage)


class Connection(NamedTuple):
    """A channel with queues: its process group, and the pipeline ranks that send and receive."""

    group: int
    source: int
    target: int
    channel: Channel


def channels(
    rank_of_stage: Sequence[int], transfers: Sequence[Transfer] = BETWEEN_STAGES
) -> list[Channel]:
    """Return the channels of `transfers` between different ranks."""
    found = []
    for transfer in transfers:
        stages = len(rank_of_stage) - 1
        for boundary in range(stages if transfer.offset else max(rank_of_stage) + 1):
            channel = Channel(transfer.name, boundary)
            source, target = channel.ranks(rank_of_stage)
            if source != target:
                found.append(channel)
    return found


def connections(
    rank_of_stage: Sequence[int], transfers: Sequence[Transfer] = BETWEEN_STAGES
) -> list[Connection]:
    """Return the connections for queues, in the one order in which all ranks open them.

    The k-th channel between two ranks is in group k. So no group has two channels between the same
    ranks.
    """
    found: Counter[frozenset[int]] = Counter()
    made = []
    for channel in channels(rank_of_stage, transfers):
        source, target = channel.ranks(rank_of_stage)
        pair = frozenset((source, target))
        made.append(Connection(found[pair], source, target, channel))
        found[pair] += 1
    return sorted(made, key=lambda made: (made.group, min(made[1:3]), max(made[1:3])))


def connections_per_rank(
    rank_of_stage: Sequence[int], transfers: Sequence[Transfer] = BETWEEN_STAGES
) -> tuple[int, ...]:
    """Return how many connections each rank has with queues.

    At most four per stage: two directions across the boundary before it and the one after it. With
    vocabulary parallelism at most five more on each rank without the first and the last stage, and
    as many more for each other rank on those.
    """
    count = Counter(rank for made in connections(rank_of_stage, transfers) for rank in made[1:3])
    return tuple(count[rank] for rank in range(max(rank_of_stage) + 1))


def channels_of(plan: Plan, transfer: Transfer, step: Instruction) -> tuple[Channel, ...]:
    """Return the channels over which `step` sends, receives or uses messages of its `transfer`."""
    kind, place, _ = step
    peers = plan.peers(transfer, place, sends=kind is transfer.send)
    if transfer.offset:
        return tuple(Channel(transfer.name, min(place, peer)) for peer in peers)
    return tuple(Channel(transfer.name, place if kind.has_shard else peer) for peer in peers)


class Hardware(NamedTuple):
    """How a GPU runs what its host has launched.

    Args:
        queues: the streams of a rank share this many hardware queues, each first in, first out:
            computation is in queue 0, the messages of the i-th connection of the rank, from 1, in
            queue i % queues. None: each stream has a queue of its own.
        streams: the connections of a rank share this many streams in the same way, none of them
            with computation. None: each has a stream of its own.
        loads: each launch of computation may load a kernel, which waits for all messages that the
            rank has posted.
    """

    queues: int | None = None
    streams: int | None = None
    loads: bool = False

    def describe(self) -> tuple[str, str]:
        """Return what a plan that hangs here cannot stand, and the way out; empty for no limit."""
        if self.queues is not None:
            return (
                f"{self.queues} hardware queues run messages and computation of a rank "
                f"({CONNECTIONS}={self.queues})",
                f"start the job without {CONNECTIONS}, which pipemega sets to "
                f"{DEFAULTS[CONNECTIONS]}, or use another schedule",
            )
        if self.streams is not None:
            return (
                f"the connections of a rank share {self.streams} streams",
                "use fewer stages per rank (pipeline.chunks)",
            )
        if self.loads:
            return (
                f"CUDA loads kernels while messages are posted ({LOADING}=LAZY)",
                f"start the job without {LOADING}, which pipemega sets to {DEFAULTS[LOADING]}",
            )
        return "", ""


UNLIMITED = Hardware()


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
        plan: the lowered plan.
        shapes: when the transport sends headers; in evaluation every message has a header.
        loads: see `Hardware`.
    """

    def __init__(self, plan: Plan, shapes: ShapeMode, loads: bool = False) -> None:
        self._plan, self._loads = plan, loads
        self._shapes: ShapeMode = "exchanged" if plan.forward_only else shapes
        # Equal in every micro-batch.
        self._transfers: dict[tuple[Kind, int], list[tuple[Transfer, tuple[Channel, ...]]]] = {}
        self._sent_headers: set[Channel] = set()
        self._received_headers: set[Channel] = set()
        self._step = _Step()

    def program(self, program: Program) -> Iterator[Operation]:
        """Yield the operations of the first part of a program."""
        for at, step in enumerate(program):
            for transfer, used in self._transfers_of(step):
                for channel in used:
                    if step.kind is transfer.send:
                        yield from self._send(at, channel, step.microbatch)
                    elif step.kind is transfer.receive:
                        yield from self._receive(at, channel, step.microbatch)
                    else:
                        yield from self._wait(at, channel, step.microbatch)
                if step.kind in transfer.users and transfer.proves is not None:
                    for channel in used:
                        proven = Channel(transfer.proves, channel.boundary)
                        yield from self._finish_sends(at, proven, step.microbatch)
            if self._loads and not step.kind.is_message:
                yield from self._wait_for_posted(at)
            if step.kind is Kind.FORWARD:
                self._step.forwards.add((step.stage, step.microbatch))

    def _wait_for_posted(self, at: int) -> Iterator[Operation]:
        """Yield the waits for all messages that this rank has posted."""
        for message in self._step.sends:
            yield Operation(at, False, message)
        for channel, m in self._step.receives:
            if m not in self._step.unposted[channel]:
                yield Operation(at, False, Message(channel, m))

    def _transfers_of(self, step: Instruction) -> list[tuple[Transfer, tuple[Channel, ...]]]:
        """Return the transfers of which `step` sends, receives or uses messages, with channels."""
        key = step.kind, step.stage
        if key not in self._transfers:
            self._transfers[key] = [
                (transfer, channels_of(self._plan, transfer, step))
                for transfer in self._plan.transfers
                if step.kind in (transfer.send, transfer.receive, *transfer.users)
            ]
        return self._transfers[key]

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


def queues_of(
    rank_of_stage: Sequence[int],
    order: MessageOrder,
    transfers: Sequence[Transfer] = BETWEEN_STAGES,
) -> dict[Channel, Hashable]:
    """Return the queue of each channel under the transport."""
    if order == "tags":
        return {channel: channel for channel in channels(rank_of_stage, transfers)}
    return {
        made.channel: (made.group, frozenset((made.source, made.target)))
        for made in connections(rank_of_stage, transfers)
    }


def _places(plan: Plan, hardware: Hardware) -> dict[tuple[Channel, int], int]:
    """Return the number of the stream or hardware queue of each end of the connections.

    Empty if nothing is shared.
    """
    places: dict[tuple[Channel, int], int] = {}
    if hardware.queues is None and hardware.streams is None:
        return places
    count: Counter[int] = Counter()
    for made in connections(plan.rank_of_stage, plan.transfers):
        for rank in (made.source, made.target):
            number = count[rank] if hardware.streams is None else count[rank] % hardware.streams
            count[rank] += 1
            places[made.channel, rank] = (
                number if hardware.queues is None else (number + 1) % hardware.queues
            )
    return places


class MessageQueues:
    """The queues of one pipeline.

    Args:
        plan: the lowered plan.
        queue_of: the queue of each channel.
        hardware: how the device runs operations of different queues.
    """

    def __init__(
        self, plan: Plan, queue_of: Mapping[Channel, Hashable], hardware: Hardware = UNLIMITED
    ) -> None:
        self._plan, self._queue_of, self._hardware = plan, queue_of, hardware
        self._ranks = {channel: channel.ranks(plan.rank_of_stage) for channel in queue_of}
        # Posted and not started, on each of the two ranks.
        self._ends: dict[tuple[Channel, int], deque[Message]] = {}
        self._blocks = set[tuple[Channel, int]]()
        """Ends in the hardware queue of the computation."""
        shared: dict[Hashable, deque[Message]] = defaultdict(deque)
        places = _places(plan, hardware)
        for channel, ranks in self._ranks.items():
            for rank in ranks:
                place = places.get((channel, rank), queue_of[channel])
                self._ends[channel, rank] = shared[place, rank]
                if hardware.queues is not None and place == 0:
                    self._blocks.add((channel, rank))
        self._arrived: set[Message] = set()

    def run(self, operations: Sequence[Iterable[Operation]]) -> None:
        """Run the operations of each rank, a step or a part of one, to the end.

        Raises:
            ScheduleError: some ranks wait for ever, or a message arrives as another one.
        """
        rest = [iter(row) for row in operations]
        waits: dict[int, Operation] = {}
        waiting: dict[Message, list[int]] = {}
        runnable = list(reversed(range(len(rest))))
        while runnable:
            rank = runnable.pop()
            for operation in rest[rank]:
                message = operation.message
                if operation.posts:
                    for arrived in self._post(rank, message):
                        runnable += waiting.pop(arrived, ())
                    waits_now = (message.channel, rank) in self._blocks
                else:
                    waits_now = True
                if waits_now and message not in self._arrived:
                    waits[rank] = operation
                    waiting.setdefault(message, []).append(rank)
                    break
        stuck = {rank: waits[rank] for ranks in waiting.values() for rank in ranks}
        if stuck:
            self._report(stuck)

    def end_step(self) -> None:
        """Forget the messages that have arrived; all have, because each rank waited for its own."""
        left = [end for end, queue in self._ends.items() if queue]
        assert not left, f"posted and never waited for: {left}"
        self._arrived.clear()

    def _post(self, rank: int, message: Message) -> list[Message]:
        """Enqueue a send or a receive; return the messages that arrive by it."""
        own = self._ends[message.channel, rank]
        own.append(message)
        arrived = []
        changed = [(own, rank)]
        while changed:
            own, rank = changed.pop()
            if not own:
                continue
            peer = sum(self._ranks[own[0].channel]) - rank
            other = self._ends[own[0].channel, peer]
            if other and own[0] == other[0]:
                arrived.append(own.popleft())
                other.popleft()
                changed += [(own, rank), (other, peer)]
            elif other:
                self._check_same_way(rank, own[0], other[0])
        self._arrived.update(arrived)
        return arrived

    def _check_same_way(self, rank: int, own: Message, other: Message) -> None:
        """Check that the next operations of a queue do not match two messages of one way."""
        sender, receiver = self._ranks[own.channel]
        if (sender, receiver) != self._ranks[other.channel]:
            return  # two sends or two receives: both ranks wait
        if self._queue_of[own.channel] != self._queue_of[other.channel]:
            return
        sent, received = (own, other) if rank == sender else (other, own)
        problem = (
            f"rank {sender} sends {self._name(sent, sender)} when rank {receiver} receives "
            f"{self._name(received, receiver)}, in one queue"
        )
        self._fail("mixes messages", [problem], {})

    def _report(self, stuck: Mapping[int, Operation]) -> NoReturn:
        """Raise the error about ranks that wait for each other for ever."""
        peers = {r: sum(self._ranks[wait.message.channel]) - r for r, wait in stuck.items()}
        cycle = cycle_of(peers)
        waits = []
        for rank in cycle:
            program, operation = self._plan.programs[rank], stuck[rank]
            at = program[operation.at] if operation.at < len(program) else "the end of the step"
            ends = (f"{self._next(operation.message, r)} on rank {r}" for r in (rank, peers[rank]))
            waits.append(
                f"rank {rank} waits at {at} for {self._name(operation.message, peers[rank])}; next "
                f"in this queue: {', '.join(ends)}"
            )
        if others := len(stuck) - len(cycle):
            waits.append(f"and {others} more ranks wait for them")
        self._fail("deadlocks", waits, {rank: stuck[rank].at for rank in (*cycle, *stuck)})

    def _fail(self, what: str, lines: Sequence[str], marks: Mapping[int, int]) -> NoReturn:
        condition, way_out = self._hardware.describe()
        if not condition:
            condition = (
                "the messages between two ranks run in the order in which they were posted, as "
                "over NCCL"
            )
            way_out = (
                "use another schedule, or gloo, which separates messages by tag (mesh.device 'cpu')"
            )
        lines = [
            f"schedule {self._plan.name!r} {what} if {condition}:",
            *(f"  {line}" for line in lines),
            f"  {way_out}",
            excerpt(self._plan, marks),
        ]
        raise ScheduleError("\n".join(lines))

    def _next(self, message: Message, rank: int) -> str:
        end = self._ends[message.channel, rank]
        return self._name(end[0], rank) if end else "nothing"

    def _name(self, message: Message, rank: int) -> str:
        """Return the instruction of `rank` that sends or receives the message."""
        channel, m, is_header = message
        receives = rank != self._ranks[channel][0]
        transfer = TRANSFER_OF_NAME[channel.direction]
        kind = transfer.receive if receives else transfer.send
        if not channel.has_shard:
            place = channel.target if receives else channel.source
        else:
            place = channel.boundary if kind.has_shard else self._plan.root_of(transfer)
        step = Instruction(kind, place, m)
        return f"the header of {step}" if is_header else str(step)

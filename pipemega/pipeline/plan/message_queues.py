"""Runs the message operations of a plan through the queues of a transport, or reports who waits.

A queue is between two ranks. Its operations start in the order in which each rank posted them, and
nothing is buffered: a message arrives once its send is the next operation on one rank and its
receive the next on the other. With tags each channel is a queue; without, all channels of one
process group between two ranks share one.

Each rank is executed in order. On a GPU the host posts operations ahead of the computation, but an
operation starts only after the computation that was enqueued before it. So what this order cannot
run, a GPU cannot run either, and the other way round.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NoReturn

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.channels import Channel, MessageOrder, channels, connections
from pipemega.pipeline.plan.execution_order import cycle_of, excerpt
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.kinds import TRANSFER_OF_NAME
from pipemega.pipeline.plan.message_operations import Message, Operation

# Direction -> kinds of the instructions that send and receive.
_KINDS = {
    "activation": (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION),
    "gradient": (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT),
}


def queues_of(
    rank_of_stage: Sequence[int], order: MessageOrder, vocabulary: bool = False
) -> dict[Channel, Hashable]:
    """Return the queue of each channel under the transport."""
    if order == "tags":
        return {channel: channel for channel in channels(rank_of_stage, vocabulary)}
    return {
        made.channel: (made.group, frozenset((made.source, made.target)))
        for made in connections(rank_of_stage, vocabulary)
    }


class MessageQueues:
    """The queues of one pipeline.

    Args:
        plan: lowered.
        queue_of: the queue of each channel.
    """

    def __init__(self, plan: Plan, queue_of: Mapping[Channel, Hashable]) -> None:
        self._plan, self._queue_of = plan, queue_of
        self._ranks = {channel: channel.ranks(plan.rank_of_stage) for channel in queue_of}
        # Posted and not started, on each of the two ranks.
        self._ends: dict[tuple[Hashable, int], deque[Message]] = {}
        for channel, ranks in self._ranks.items():
            for rank in ranks:
                self._ends[queue_of[channel], rank] = deque()
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
                    for arrived in self._post(rank, operation):
                        runnable += waiting.pop(arrived, ())
                elif message not in self._arrived:
                    waits[rank] = operation
                    waiting.setdefault(message, []).append(rank)
                    break
        stuck = {rank: waits[rank] for ranks in waiting.values() for rank in ranks}
        if stuck:
            self._report(stuck)

    def end_step(self) -> None:
        """Forget the messages that have arrived; all have, because each rank waited for its own."""
        left = {end: list(queue) for end, queue in self._ends.items() if queue}
        assert not left, f"posted and never waited for: {left}"
        self._arrived.clear()

    def _post(self, rank: int, operation: Operation) -> list[Message]:
        """Enqueue a send or a receive; return the messages that arrive by it."""
        message = operation.message
        queue = self._queue_of[message.channel]
        source, target = self._ranks[message.channel]
        own, other = self._ends[queue, rank], self._ends[queue, source + target - rank]
        own.append(message)
        arrived = []
        while own and other and own[0] == other[0]:
            arrived.append(own.popleft())
            other.popleft()
        if own and other:
            self._check_same_way(rank, own[0], other[0])
        self._arrived.update(arrived)
        return arrived

    def _check_same_way(self, rank: int, own: Message, other: Message) -> None:
        """Check that the next operations of a queue do not match two messages of one way."""
        sender, receiver = self._ranks[own.channel]
        if (sender, receiver) != self._ranks[other.channel]:
            return  # two sends or two receives: both ranks wait
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
        lines = [
            f"schedule {self._plan.name!r} {what} if the messages between two ranks run in the "
            f"order in which they were posted, as over NCCL:",
            *(f"  {line}" for line in lines),
            "  use another schedule, or gloo, which separates messages by tag (mesh.device 'cpu')",
            excerpt(self._plan, marks),
        ]
        raise ScheduleError("\n".join(lines))

    def _next(self, message: Message, rank: int) -> str:
        end = self._ends[self._queue_of[message.channel], rank]
        return self._name(end[0], rank) if end else "nothing"

    def _name(self, message: Message, rank: int) -> str:
        """Return the instruction of `rank` that sends or receives the message."""
        channel, m, is_header = message
        receives = rank != self._ranks[channel][0]
        if channel.direction in _KINDS:
            stage = channel.target if receives else channel.source
            step = Instruction(_KINDS[channel.direction][receives], stage, m)
        else:
            transfer = TRANSFER_OF_NAME[channel.direction]
            kind = transfer.receive if receives else transfer.send
            place = channel.boundary if kind.has_shard else self._plan.root_of(transfer)
            step = Instruction(kind, place, m)
        return f"the header of {step}" if is_header else str(step)

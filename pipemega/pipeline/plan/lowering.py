"""Lowering: adds the messages to a plan of compute steps.

Instructions of a lowered plan:

    SA m@s   send the output of stage s for micro-batch m to the rank of stage s + 1
    RA m@s   post the receive of the input of stage s for micro-batch m
    SG m@s   send the gradient of the input of stage s to the rank of stage s - 1
    RG m@s   post the receive of the gradient of the output of stage s

- A channel is one direction over one boundary between two stages, first in, first out: the k-th
  posted receive gets the k-th message sent.
- Sends and receives do not wait. A send starts the transfer and keeps the tensor alive until the
  transfer ends. A receive provides a buffer. The only place where a rank waits is the compute step
  that uses the message: F m@s waits for RA m@s, B m@s or I m@s for RG m@s.
- A receive may be posted before the stage has run the forward of that micro-batch, and before the
  message was sent, but not after the step that uses it.
- Stages on the same rank exchange tensors without a message.
- In vocabulary parallelism (`plan.kinds`), a send to the shards sends to all other ranks; a receive
  from the shards, which has the number of the stage, is a receive from each other rank.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.kinds import TRANSFERS

# Kind of a step -> the send and the receive of its result, and the stage offset of the receiver.
_MESSAGES_OF = {
    Kind.FORWARD: (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, +1),
    Kind.BACKWARD: (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, -1),
    Kind.BACKWARD_INPUT: (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, -1),
}


def lower(plan: Plan, ahead: int = 1) -> Plan:
    """Add messages to `plan`, with each receive posted `ahead` compute steps before its use."""
    return hoist_receives(add_messages(plan.compute_only()), ahead)


def add_messages(plan: Plan) -> Plan:
    """Insert a send after each step whose result another rank uses, and the receive on that rank.

    A receive comes right before the step that uses it. If a rank uses messages in another order
    than they were sent in, the receives of earlier messages are posted first, to keep the order of
    the channel. This cannot cause a deadlock, since posting a receive does not wait.
    """
    channels: dict[tuple[Kind, int], deque[Instruction]] = defaultdict(deque)
    listed: set[Instruction] = set()
    for step in plan.steps():
        for _, receives in _messages(plan, step):
            # A receive from all shards is in the order of the first one.
            for receive in receives:
                if receive not in listed:
                    channels[receive.kind, receive.stage].append(receive)
                    listed.add(receive)

    def program(rank: int) -> Program:
        posted: set[Instruction] = set()
        order: list[Instruction] = []
        for step in plan.programs[rank]:
            for receive in _receives(plan, step):
                channel = channels[receive.kind, receive.stage]
                # Empty if the plan is incomplete; `validate` reports what is missing.
                while channel and receive not in posted:
                    order.append(channel.popleft())
                    posted.add(order[-1])
            order.append(step)
            order += [send for send, _ in _messages(plan, step)]
        return tuple(order)

    return replace(plan, programs=tuple(map(program, range(plan.num_ranks))))


def hoist_receives(plan: Plan, ahead: int = 1) -> Plan:
    """Post every receive `ahead` compute steps earlier, so that transfers overlap with compute.

        ahead=0    F0 SA0  F1 SA1  RG0 B0  F2 SA2  RG1 B1
        ahead=1    F0 SA0  RG0 F1 SA1  B0  RG1 F2 SA2  B1

    All receives of a rank move by the same number of steps, so each channel keeps its order. They
    come after the sends of the previous step, because other ranks wait for those.
    """

    def program(steps: Program) -> Program:
        before: list[list[Instruction]] = [[]]  # receives posted before each compute step
        compute: list[Instruction] = []
        sends: list[list[Instruction]] = []  # after each compute step
        for step in steps:
            if step.kind.is_receive:
                before[max(0, len(compute) - ahead)].append(step)
            elif step.kind.is_message:
                sends[-1].append(step)
            else:
                compute.append(step)
                sends.append([])
                before.append([])
        return tuple(
            instruction
            for receives, step, after in zip(before, compute, sends, strict=False)
            for instruction in (*receives, step, *after)
        )

    return replace(plan, programs=tuple(map(program, plan.programs)))


def _messages(
    plan: Plan, step: Instruction
) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
    """Yield each send of the result of `step`, with its receives on other ranks."""
    if step.kind in _MESSAGES_OF:
        send, receive, direction = _MESSAGES_OF[step.kind]
        target = step.stage + direction
        if plan.crosses(min(step.stage, target)):
            yield step._replace(kind=send), (Instruction(receive, target, step.microbatch),)
    if not plan.has_vocabulary:
        return
    for transfer in TRANSFERS:
        root = plan.root_of(transfer)
        if step.kind not in transfer.after or (transfer.to_shards and step.stage != root):
            continue
        if not transfer.to_shards and step.stage == plan.rank_of_stage[root]:
            continue  # the shard is on the rank of the stage
        if plan.forward_only and not transfer.in_evaluation:
            continue
        targets = _other_shards(plan, root) if transfer.to_shards else (root,)
        receives = (Instruction(transfer.receive, t, step.microbatch) for t in targets)
        yield step._replace(kind=transfer.send), tuple(receives)


def _receives(plan: Plan, step: Instruction) -> Iterator[Instruction]:
    """Yield the receives of the messages that `step` uses."""
    if step.kind is Kind.FORWARD and plan.crosses(step.stage - 1):
        yield step._replace(kind=Kind.RECV_ACTIVATION)
    if step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and plan.crosses(step.stage):
        yield step._replace(kind=Kind.RECV_GRADIENT)
    if not plan.has_vocabulary:
        return
    for transfer in TRANSFERS:
        root = plan.root_of(transfer)
        receivers = _other_shards(plan, root) if transfer.to_shards else (root,)
        if step.kind is transfer.user and step.stage in receivers:
            yield step._replace(kind=transfer.receive)


def _other_shards(plan: Plan, root: int) -> tuple[int, ...]:
    """Return the shards that are not on the rank of stage `root`."""
    return tuple(s for s in range(plan.num_ranks) if s != plan.rank_of_stage[root])

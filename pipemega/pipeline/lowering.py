"""From what is computed to what is also sent: plan to plan.

What the instructions of a lowered plan mean, for whoever runs them:

    SA m@s   send the output of stage s for micro-batch m to the rank of stage s + 1
    RA m@s   post the receive of the input of stage s for micro-batch m
    SG m@s   send the gradient of the input of stage s to the rank of stage s - 1
    RG m@s   post the receive of the gradient of the output of stage s

- A channel belongs to one direction over one boundary between two stages, and is first in, first
  out: the k-th receive that is posted gets the k-th message that was sent.
- Neither a send nor a receive waits. A send starts the transfer and keeps the tensor alive until
  it is done. A receive promises a buffer. The compute step that uses the message waits for it:
  F m@s for RA m@s, B m@s or I m@s for RG m@s; it is the only place where a rank waits.
- A receive may be posted before the stage has run the forward of that micro-batch, and before the
  message was sent; never after the step that uses it.
- Stages on the same rank hand over without a message.
"""

from collections import defaultdict, deque
from dataclasses import replace

from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program

# What carries the result of a step away: the send, the receive, and to which side it goes.
_CARRIERS = {
    Kind.FORWARD: (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, +1),
    Kind.BACKWARD: (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, -1),
    Kind.BACKWARD_INPUT: (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, -1),
}


def lower(plan: Plan, ahead: int = 1) -> Plan:
    """`plan` with its messages, and each receive posted `ahead` compute steps before its use."""
    return hoist_receives(add_messages(plan.compute_only()), ahead)


def add_messages(plan: Plan) -> Plan:
    """Puts a send after each step whose result leaves its rank, and its receive over there.

    A receive stands right before the step that uses it. Where that would break the order of the
    channel, because a rank uses messages in another order than they are sent in, what was sent
    earlier is received earlier too. That never holds up a plan that ran without messages, since
    posting a receive waits for nothing.
    """
    channels: dict[tuple[Kind, int], deque[Instruction]] = defaultdict(deque)
    for step in plan.steps():
        if (message := _message(plan, step)) is not None:
            _, receive = message
            channels[receive.kind, receive.stage].append(receive)

    def program(rank: int) -> Program:
        posted: set[Instruction] = set()
        order: list[Instruction] = []
        for step in plan.programs[rank]:
            receive = _receive(plan, step)
            while receive is not None and receive not in posted:
                next_in_channel = channels[receive.kind, receive.stage].popleft()
                posted.add(next_in_channel)
                order.append(next_in_channel)
            order.append(step)
            if (message := _message(plan, step)) is not None:
                order.append(message[0])
        return tuple(order)

    return replace(plan, programs=tuple(map(program, range(plan.num_ranks))))


def hoist_receives(plan: Plan, ahead: int = 1) -> Plan:
    """Posts every receive `ahead` compute steps earlier, so that it travels while they run.

        ahead=0    F0 SA0  F1 SA1  RG0 B0  F2 SA2  RG1 B1
        ahead=1    F0 SA0  RG0 F1 SA1  B0  RG1 F2 SA2  B1

    All receives of a rank move by the same number of steps, so each channel keeps its order. They
    come after the sends of the step before: what another rank waits for goes first.
    """

    def program(steps: Program) -> Program:
        before: list[list[Instruction]] = [[]]  # receives posted before each compute step
        compute: list[Instruction] = []
        sends: list[list[Instruction]] = []  # after each compute step
        for step in steps:
            if step.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
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


def _message(plan: Plan, step: Instruction) -> tuple[Instruction, Instruction] | None:
    """The send and the receive that carry the result of `step`, or None if it stays."""
    if step.kind not in _CARRIERS:
        return None
    send, receive, direction = _CARRIERS[step.kind]
    target = step.stage + direction
    if not plan.crosses(min(step.stage, target)):
        return None
    return step._replace(kind=send), Instruction(receive, target, step.microbatch)


def _receive(plan: Plan, step: Instruction) -> Instruction | None:
    """The receive of what `step` uses from another rank, or None if it uses nothing of the sort."""
    if step.kind is Kind.FORWARD and plan.crosses(step.stage - 1):
        return step._replace(kind=Kind.RECV_ACTIVATION)
    if step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and plan.crosses(step.stage):
        return step._replace(kind=Kind.RECV_GRADIENT)
    return None

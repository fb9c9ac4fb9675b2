"""The rules that every plan keeps, proven before a process starts.

1.  Every stage lives on a rank that exists, and every instruction stands on the rank of its stage.
2.  Every stage runs each micro-batch forward exactly once, and backward exactly once: as one B, or
    as one I and one W. A plan without any backward is an evaluation and needs none.
3.  In a lowered plan, each result that leaves its rank is sent exactly once and its receive posted
    exactly once, before the step that uses it; over each channel (one direction over one stage
    boundary), receives are posted in the order of the sends.
4.  It runs to the end: no ranks wait for each other in a ring. Sends are *unbuffered*: a message
    is there once its send has run and its receive was posted, and no memory in between is relied
    on. Since sends are asynchronous and both ends of a channel keep one order (rule 3), that is
    as soon as the later of the two is reached.

Counting is exact: a step that is there twice is as wrong as one that is missing.

One more rule is for transports whose sends do not return before their receive is posted; ours do,
so `validate` does not ask for it, and `validate_meeting` does:

5.  It runs to the end even if each send waits until its receive is posted.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NoReturn

from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Instruction, Kind, Plan
from pipemega.pipeline.order import excerpt, running_order

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
# From a receive to its send, and how far the sender's stage is from the receiver's.
_SEND_OF = {
    Kind.RECV_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.RECV_GRADIENT: (Kind.SEND_GRADIENT, +1),
}


def validate(plan: Plan) -> Plan:
    """Returns `plan` unchanged if it keeps every rule; with its messages, if it was lowered.

    Raises:
        ScheduleError: the message names the instruction and the rank, and shows the place.
    """
    _check_places(plan)
    _check_counts(plan)
    if plan.is_lowered:
        _check_messages(plan)
        _check_channels(plan)
    for _ in running_order(plan):
        pass
    return plan


def validate_meeting(plan: Plan) -> Plan:
    """Returns the lowered `plan` unchanged if it keeps rule 5 as well as the others.

    Where it does not, receives posted further ahead (`lowering.lower`) are what helps.

    Raises:
        ScheduleError: the message says which ranks wait for whom, and shows the place.
    """
    for _ in running_order(validate(plan), meeting=True):
        pass
    return plan


def _check_places(plan: Plan) -> None:
    """Rule 1, and that stages and micro-batches are within the plan's own numbers."""
    if plan.num_microbatches < 1 or plan.num_stages < 1:
        _fail(
            plan,
            f"{plan.num_microbatches} micro-batches and {plan.num_stages} stages; both are at "
            f"least 1",
        )
    for stage, rank in enumerate(plan.rank_of_stage):
        if not 0 <= rank < plan.num_ranks:
            _fail(plan, f"stage {stage} lives on rank {rank}, and there are {plan.num_ranks} ranks")
    for rank in range(plan.num_ranks):
        if not plan.stages_of(rank):
            _fail(plan, f"rank {rank} holds no stage; rank_of_stage is {list(plan.rank_of_stage)}")
    for rank, program in enumerate(plan.programs):
        for at, step in enumerate(program):
            if not 0 <= step.stage < plan.num_stages:
                _fail(plan, f"{step}: the stages are 0 to {plan.num_stages - 1}", {rank: at})
            if not 0 <= step.microbatch < plan.num_microbatches:
                last = plan.num_microbatches - 1
                _fail(plan, f"{step}: the micro-batches are 0 to {last}", {rank: at})
            if (home := plan.rank_of_stage[step.stage]) != rank:
                what = f"{step} is on rank {rank}, but stage {step.stage} lives on rank {home}"
                _fail(plan, what, {rank: at})


def _check_counts(plan: Plan) -> None:
    """Rule 2."""
    count = Counter(plan.steps())
    for stage in range(plan.num_stages):
        for m in range(plan.num_microbatches):
            forward, *backward = (count[Instruction(kind, stage, m)] for kind in _COMPUTE)
            if forward != 1:
                what = f"F{m}@{stage} is there {_times(forward)}, not once"
                _fail(plan, what, _second(plan, Instruction(Kind.FORWARD, stage, m)))
            if backward not in ([0, 0, 0], [1, 0, 0], [0, 1, 1]) or (
                not plan.forward_only and not any(backward)
            ):
                whole, inputs, weights = backward
                doubled = (Instruction(kind, stage, m) for kind in _COMPUTE[1:])
                _fail(
                    plan,
                    f"micro-batch {m} at stage {stage} has {whole} B, {inputs} I and {weights} W; "
                    f"its backward is either one B, or one I and one W",
                    next((_second(plan, step) for step in doubled if count[step] > 1), None),
                )


def _check_messages(plan: Plan) -> None:
    """The first half of rule 3: each message once at either end, receives before their use."""
    count = Counter(step for step in plan.steps() if step.kind.is_message)
    expected = _expected_messages(plan)
    for step in [*expected, *count]:
        if count[step] != int(step in expected):
            wanted = "not once" if step in expected else "but its result stays on its rank"
            what = f"{step} is there {_times(count[step])}, {wanted}"
            _fail(plan, what, _second(plan, step))
    for rank, program in enumerate(plan.programs):
        position = {step: at for at, step in enumerate(program)}
        for receive, at in position.items():
            if receive.kind not in _SEND_OF:
                continue
            user = next(
                user
                for kind in _users(receive.kind)
                if (user := receive._replace(kind=kind)) in position
            )
            if position[user] < at:
                _fail(plan, f"{user} uses what {receive} receives, and comes before it", {rank: at})


def _expected_messages(plan: Plan) -> dict[Instruction, None]:
    """Both ends of every message of the plan, in the order of the stages."""
    kinds = [(Kind.SEND_ACTIVATION, 0), (Kind.RECV_ACTIVATION, 1)]
    if not plan.forward_only:
        kinds += [(Kind.SEND_GRADIENT, 1), (Kind.RECV_GRADIENT, 0)]
    return {
        Instruction(kind, boundary + offset, m): None
        for boundary in range(plan.num_stages - 1)
        if plan.crosses(boundary)
        for m in range(plan.num_microbatches)
        for kind, offset in kinds
    }


def _users(receive: Kind) -> tuple[Kind, ...]:
    if receive is Kind.RECV_ACTIVATION:
        return (Kind.FORWARD,)
    return (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def _check_channels(plan: Plan) -> None:
    """The second half of rule 3: both ends of a channel keep the same order."""
    ends: dict[tuple[Kind, int], list[Instruction]] = defaultdict(list)
    for step in plan.steps():
        if step.kind.is_message:
            ends[step.kind, step.stage].append(step)
    for (kind, stage), receives in ends.items():
        if kind not in _SEND_OF:
            continue
        send_kind, away = _SEND_OF[kind]
        sends = ends[send_kind, stage + away]
        for send, receive in zip(sends, receives, strict=True):
            if send.microbatch != receive.microbatch:
                sender, receiver = (plan.rank_of_stage[step.stage] for step in (send, receive))
                _fail(
                    plan,
                    f"rank {sender} sends {send} next to rank {receiver}, which posts {receive}: "
                    f"a channel is first in, first out, so that sends and receives have one order",
                    {
                        sender: plan.programs[sender].index(send),
                        receiver: plan.programs[receiver].index(receive),
                    },
                )


def _second(plan: Plan, step: Instruction) -> dict[int, int]:
    """Where `step` stands for the second time, for the arrow; nowhere if it does not."""
    rank = plan.rank_of_stage[step.stage]
    places = [at for at, found in enumerate(plan.programs[rank]) if found == step]
    return {rank: places[1]} if len(places) > 1 else {}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _fail(plan: Plan, what: str, marks: Mapping[int, int] | None = None) -> NoReturn:
    raise ScheduleError(f"schedule {plan.name!r}: {what}\n{excerpt(plan, marks or {})}")

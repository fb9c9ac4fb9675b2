"""The forwards that each rank runs before its first backward, as a cut through the plan.

    rank 0   F0 F1 F2 F3 |       B0 F4 B1 ..
    rank 1      F0 F1 F2 |    B0 F3 B1 ..
    rank 2         F0 F1 | B0 F2 B1 ..

What is left of the cut can be thrown away and run again: no gradient has been added to anything,
and no rank's warm-up needs a message from behind another's.  Where a first backward alone would not
make such a cut, as in plans that were made by hand, it is drawn earlier.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)


@dataclass(frozen=True)
class WarmUp:
    """A lowered plan with its cut.

    Args:
        plan: the same steps in the same order, with the receives that only later steps use moved
            behind the cut.
        stop: rank r's warm-up is its first `stop[r]` instructions.
        last_forward: rank r runs no forward after its first `last_forward[r]` instructions;
            never before the cut.
        unread: what rank r would still have to receive in order to have all that the warm-ups of
            the others have sent to it, in the order of each channel.
    """

    plan: Plan
    stop: tuple[int, ...]
    last_forward: tuple[int, ...]
    unread: tuple[Program, ...]


def warm_up(plan: Plan) -> WarmUp:
    """The cut through a lowered `plan`, as late as it can be."""
    stops = _close(plan, [_first_backward(program) for program in plan.programs])
    halves = [_part(program, stop) for program, stop in zip(plan.programs, stops, strict=True)]
    sent: dict[int, list[Instruction]] = defaultdict(list)  # stage that receives -> in order
    for head, _ in halves:
        for step in head:
            if step.kind is Kind.SEND_ACTIVATION:
                receive = Instruction(Kind.RECV_ACTIVATION, step.stage + 1, step.microbatch)
                sent[receive.stage].append(receive)
    return WarmUp(
        replace(plan, programs=tuple(head + rest for head, rest in halves)),
        tuple(len(head) for head, _ in halves),
        tuple(max(len(head), _last_forward(head + rest)) for head, rest in halves),
        tuple(
            tuple(
                receive
                for stage in plan.stages_of(rank)
                for receive in sent[stage]
                if receive not in set(head)
            )
            for rank, (head, _) in enumerate(halves)
        ),
    )


def _first_backward(program: Program) -> int:
    kinds = (at for at, step in enumerate(program) if step.kind in _BACKWARD)
    return next(kinds, len(program))


def _last_forward(program: Program) -> int:
    return max((at + 1 for at, step in enumerate(program) if step.kind is Kind.FORWARD), default=0)


def _close(plan: Plan, stops: list[int]) -> list[int]:
    """Draws the cut back until no forward before it needs one behind it."""
    while True:
        done = {
            step
            for program, stop in zip(plan.programs, stops, strict=True)
            for step in program[:stop]
            if step.kind is Kind.FORWARD
        }
        closed = [
            _first_unmet(program[:stop], done)
            for program, stop in zip(plan.programs, stops, strict=True)
        ]
        if closed == stops:
            return stops
        stops = closed


def _first_unmet(head: Program, done: Iterable[Instruction]) -> int:
    for at, step in enumerate(head):
        needs = step._replace(stage=step.stage - 1)
        if step.kind is Kind.FORWARD and step.stage > 0 and needs not in done:
            return at
    return len(head)


def _part(program: Program, stop: int) -> tuple[Program, Program]:
    """Warm-up and rest.

    A receive stays in the warm-up if that uses it, or a later one of its channel: channels are
    first in, first out.
    """
    used = {step for step in program[:stop] if step.kind is Kind.FORWARD}
    keep: list[Instruction] = []
    later: list[Instruction] = []
    open_channels: set[int] = set()
    for step in reversed(program[:stop]):
        if step.kind not in _RECEIVES:
            keep.append(step)
        elif step.kind is Kind.RECV_ACTIVATION and (
            step.stage in open_channels or step._replace(kind=Kind.FORWARD) in used
        ):
            open_channels.add(step.stage)
            keep.append(step)
        else:
            later.append(step)
    return tuple(reversed(keep)), (*reversed(later), *program[stop:])

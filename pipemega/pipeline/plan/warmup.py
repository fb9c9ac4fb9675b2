"""Splits a plan at the end of the warm-up: the forwards of each rank before its first backward.

    rank 0   F0 F1 F2 F3 |       B0 F4 B1 ..
    rank 1      F0 F1 F2 |    B0 F3 B1 ..
    rank 2         F0 F1 | B0 F2 B1 ..

The steps before the cut can be discarded and run again: no gradient has been computed, and the
warm-up of a rank needs no message from after the cut of another rank. If the first backwards alone
do not give such a cut, as in some hand-made plans, the cut is moved to an earlier position.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)


@dataclass(frozen=True)
class WarmupCut:
    """A lowered plan with its cut.

    Args:
        plan: the same steps in the same order, with receives that only later steps use moved after
            the cut.
        stop: the warm-up of rank r is its first `stop[r]` instructions.
        last_forward: rank r runs no forward after its first `last_forward[r]` instructions; never
            before the cut.
        unread: the receives that rank r must still post to receive all messages that the warm-ups
            of other ranks have sent to it, in the order of each channel.
    """

    plan: Plan
    stop: tuple[int, ...]
    last_forward: tuple[int, ...]
    unread: tuple[Program, ...]


def warmup_cut(plan: Plan) -> WarmupCut:
    """Return the latest possible cut of a lowered `plan`."""
    stops = _move_back(plan, [_first_backward(program) for program in plan.programs])
    parts = [_split(program, stop) for program, stop in zip(plan.programs, stops, strict=True)]
    sent: dict[int, list[Instruction]] = defaultdict(list)  # stage that receives -> in order
    for head, _ in parts:
        for step in head:
            if step.kind is Kind.SEND_ACTIVATION:
                receive = Instruction(Kind.RECV_ACTIVATION, step.stage + 1, step.microbatch)
                sent[receive.stage].append(receive)
    return WarmupCut(
        replace(plan, programs=tuple(head + rest for head, rest in parts)),
        tuple(len(head) for head, _ in parts),
        tuple(max(len(head), _last_forward(head + rest)) for head, rest in parts),
        tuple(
            tuple(
                receive
                for stage in plan.stages_of(rank)
                for receive in sent[stage]
                if receive not in set(head)
            )
            for rank, (head, _) in enumerate(parts)
        ),
    )


def _first_backward(program: Program) -> int:
    kinds = (at for at, step in enumerate(program) if step.kind in _BACKWARD)
    return next(kinds, len(program))


def _last_forward(program: Program) -> int:
    return max((at + 1 for at, step in enumerate(program) if step.kind is Kind.FORWARD), default=0)


def _move_back(plan: Plan, stops: list[int]) -> list[int]:
    """Move the cut back until no forward before it needs one after it."""
    while True:
        heads = [program[:stop] for program, stop in zip(plan.programs, stops, strict=True)]
        done = {step for head in heads for step in head if step.kind is Kind.FORWARD}
        earlier = [_first_unmet(head, done) for head in heads]
        if earlier == stops:
            return stops
        stops = earlier


def _first_unmet(head: Program, done: Iterable[Instruction]) -> int:
    for at, step in enumerate(head):
        needs = step._replace(stage=step.stage - 1)
        if step.kind is Kind.FORWARD and step.stage > 0 and needs not in done:
            return at
    return len(head)


def _split(program: Program, stop: int) -> tuple[Program, Program]:
    """Return the warm-up and the rest of a program.

    A receive stays in the warm-up if the warm-up uses it or a later one of its channel, because
    channels are first in, first out.
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

"""W of other micro-batches within the exchanges of tokens in F and I.

    without     F1 [exchange]      I1 [exchange]      W0         W1
    filled      F1 [exchange]      I1 [exchange]      W0         W1
                    part of W0         part of W0     the rest

A rank starts jobs of the next W of its program, if the I of that W has run. What share of a W fits
into an exchange follows from counted times, so it is equal on all data and tensor ranks: jobs
may communicate over the tensor ranks. Gradients are added in the order of the program, so the
results are bitwise those without filling.

Work of one micro-batch beside the communication of another is known: Jiang et al. 2024 (Lancet),
arXiv:2404.19429, moves weight gradients of the same micro-batch beside all-to-alls. Here the plan
chooses among the queued W of a schedule with split backward, and the simulation contains it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program


class Waits(NamedTuple):
    """Exchanges of a layer or of a stage, for one micro-batch.

    Args:
        forward, backward: seconds of the exchanges in F, and in I or B.
        num_forward, num_backward: their numbers.
        weight: seconds of W.
    """

    forward: float
    backward: float
    num_forward: int
    num_backward: int
    weight: float

    @classmethod
    def sum(cls, layers: Iterable["Waits"]) -> "Waits":
        """Return the waits of a stage."""
        return cls(*map(sum, zip(NO_WAITS, *layers, strict=True)))

    def in_step(self, kind: Kind) -> tuple[float, int]:
        """Return (seconds, number) of the exchanges in F, or in I and B."""
        if kind is Kind.FORWARD:
            return self.forward, self.num_forward
        return self.backward, self.num_backward


NO_WAITS = Waits(0.0, 0.0, 0, 0, 0.0)


class Filling(NamedTuple):
    """What runs within the exchanges of a step.

    Args:
        exchanges: number of exchanges of the step.
        goals: (W, the share of its jobs that have run before the step, and after it), oldest first.
    """

    exchanges: int
    goals: tuple[tuple[Instruction, float, float], ...]


_WITH_EXCHANGES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD)


def fill_waits(program: Program, waits: Mapping[int, Waits]) -> dict[Instruction, Filling]:
    """Return what runs within the exchanges of each step of a rank.

    Args:
        waits: stage -> its exchanges.
    """
    following = [step for step in program if step.kind is Kind.BACKWARD_WEIGHT]
    following.reverse()  # the last one is the next W
    ready, share, filled = set[Instruction](), 0.0, dict[Instruction, Filling]()
    for step in program:
        if step.kind in _WITH_EXCHANGES:
            seconds, number = waits[step.stage].in_step(step.kind)
            goals = []
            while seconds > 0 and following and following[-1] in ready:
                whole = waits[following[-1].stage].weight
                done = min(1.0, share + seconds / whole) if whole else 1.0
                goals.append((following[-1], share, done))
                seconds -= (done - share) * whole
                share = done
                if done < 1:
                    break
                following.pop()
                share = 0.0
            if goals:
                filled[step] = Filling(number, tuple(goals))
        if step.kind is Kind.BACKWARD_INPUT:
            ready.add(step._replace(kind=Kind.BACKWARD_WEIGHT))
        elif following and step == following[-1]:
            following.pop()
            share = 0.0
    return filled


def filled_shares(filled: Mapping[Instruction, Filling]) -> dict[Instruction, float]:
    """Return the share of each W that runs within exchanges."""
    return {step: done for filling in filled.values() for step, _, done in filling.goals}


def delay_weights(plan: Plan) -> Plan:
    """Return the compute steps of `plan`, with each W at the place of the next one of its rank.

    So each rank keeps one more W in its queue, which may run within the exchanges:

        F0 I0 W0 F1 I1 W1   becomes   F0 I0 F1 I1 W0 W1
    """
    plan = plan.compute_only()
    return replace(plan, programs=tuple(map(_delayed, plan.programs)))


def _delayed(program: Program) -> Program:
    weights = [step for step in program if step.kind is Kind.BACKWARD_WEIGHT]
    before: Sequence[Instruction | None] = [None, *weights[:-1]]
    previous = dict(zip(weights, before, strict=True))
    steps = [previous.get(step, step) for step in program]
    return tuple(step for step in steps if step is not None) + tuple(weights[-1:])

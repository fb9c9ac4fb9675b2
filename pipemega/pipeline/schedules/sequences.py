"""Sequences of steps that several schedules are built from."""

from collections.abc import Sequence
from dataclasses import replace

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program


def steps(kind: Kind, stage: int, num_microbatches: int) -> Program:
    """Return one step per micro-batch at one stage: F0 F1 F2 .."""
    return tuple(Instruction(kind, stage, m) for m in range(num_microbatches))


def steps_in_groups(kind: Kind, stages: Sequence[int], groups: Sequence[int]) -> Program:
    """Return the steps of each group of micro-batches: all at the first stage, then at the next.

    stages=[0, 2], groups=[2, 1]:   F0@0 F1@0 F0@2 F1@2   F2@0 F2@2
    """
    order: list[Instruction] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        order += [Instruction(kind, stage, m) for stage in stages for m in group]
        first += size
    return tuple(order)


def alternate(first: Sequence[Instruction], second: Sequence[Instruction], lead: int) -> Program:
    """Return `lead` steps of `first`, then steps of `second` and `first` in turn.

    Both have the same length. lead=1:   F0   F1 B0   F2 B1   B2
    """
    lead = min(lead, len(first))
    turns = (step for pair in zip(first[lead:], second, strict=False) for step in pair)
    return (*first[:lead], *turns, *second[len(first) - lead :])


def delay_weights(order: Sequence[Instruction], lag: int) -> Program:
    """Return `order` with the W of each I inserted `lag` I steps later, or at the end.

    lag=1:   F0 I0   F1 I1 W0   I2 W1   W2
    """
    inputs = [step for step in order if step.kind is Kind.BACKWARD_INPUT]
    weights = [step._replace(kind=Kind.BACKWARD_WEIGHT) for step in inputs]
    inserted = dict(zip(inputs[lag:], weights, strict=False))
    program: list[Instruction] = []
    for step in order:
        program.append(step)
        if step in inserted:
            program.append(inserted[step])
    return (*program, *weights[len(inserted) :])


def keep_first(plan: Plan, num_microbatches: int) -> Plan:
    """Return `plan` with only its first `num_microbatches` micro-batches.

    The result stays valid, because no step needs a step of another micro-batch.
    """
    programs = (
        tuple(step for step in program if step.microbatch < num_microbatches)
        for program in plan.programs
    )
    return replace(plan, num_microbatches=num_microbatches, programs=tuple(programs))

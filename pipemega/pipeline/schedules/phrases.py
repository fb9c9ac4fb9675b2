"""Runs of steps that several schedules are made of."""

from collections.abc import Sequence

from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program


def steps(kind: Kind, stage: int, num_microbatches: int) -> Program:
    """One step per micro-batch at one stage: F0 F1 F2 .."""
    return tuple(Instruction(kind, stage, m) for m in range(num_microbatches))


def by_turns(first: Sequence[Instruction], second: Sequence[Instruction], lead: int) -> Program:
    """`first` and `second`, equally many, by turns after a head start of `lead` for `first`.

    lead=1:   F0   F1 B0   F2 B1   B2
    """
    lead = min(lead, len(first))
    turns = (step for pair in zip(first[lead:], second, strict=False) for step in pair)
    return (*first[:lead], *turns, *second[len(first) - lead :])


def in_groups(kind: Kind, stages: Sequence[int], groups: Sequence[int]) -> Program:
    """All micro-batches of a group at the first of `stages`, then at the next; then the next group.

    stages=[0, 2], groups=[2, 1]:   F0@0 F1@0 F0@2 F1@2   F2@0 F2@2
    """
    order: list[Instruction] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        order += [Instruction(kind, stage, m) for stage in stages for m in group]
        first += size
    return tuple(order)


def weights_behind(order: Sequence[Instruction], lag: int) -> Program:
    """`order` with the weight half of each input half put off by `lag` input halves, or to the end.

    lag=1:   F0 I0   F1 I1 W0   I2 W1   W2
    """
    inputs = [step for step in order if step.kind is Kind.BACKWARD_INPUT]
    weights = [step._replace(kind=Kind.BACKWARD_WEIGHT) for step in inputs]
    put_off = dict(zip(inputs[lag:], weights, strict=False))
    program: list[Instruction] = []
    for step in order:
        program.append(step)
        if step in put_off:
            program.append(put_off[step])
    return (*program, *weights[len(put_off) :])


def without_the_rest(plan: Plan, num_microbatches: int) -> Plan:
    """`plan` for its first `num_microbatches` alone.

    What is right stays right: no step needs one of another micro-batch.
    """
    programs = (
        tuple(step for step in program if step.microbatch < num_microbatches)
        for program in plan.programs
    )
    return Plan(plan.name, num_microbatches, plan.rank_of_stage, tuple(programs))

"""Runs of steps that several schedules are made of."""

from collections.abc import Sequence

from pipemega.pipeline.instructions import Instruction, Kind, Program


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

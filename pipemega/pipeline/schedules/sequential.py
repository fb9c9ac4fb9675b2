"""One micro-batch at a time: plain model parallelism."""

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.schedules.family import Formula, ScheduleFamily
from pipemega.pipeline.schedules.placement import loop


def sequential(pp_size: int, num_microbatches: int) -> Plan:
    """A micro-batch starts when the previous one has finished: no pipelining.

    pp_size=3, num_microbatches=2, backward as long as forward:

        rank 0   F0 .. .. .. .. B0 F1 .. .. .. .. B1
        rank 1   .. F0 .. .. B0 .. .. F1 .. .. B1 ..
        rank 2   .. .. F0 B0 .. .. .. .. F1 B1 .. ..

    Only one rank works at a time. Nothing overlaps, which makes it useful for debugging.

    Source: the naive baseline of Huang et al. 2019, arXiv:1811.06965, figure 2b.
    """
    return sequential_on(loop(pp_size), num_microbatches)


def sequential_on(rank_of_stage: tuple[int, ...], num_microbatches: int) -> Plan:
    """Return the same for any placement: the least memory that a plan on it can need."""
    forwards = [(Kind.FORWARD, stage) for stage in range(len(rank_of_stage))]
    backwards = [(Kind.BACKWARD, stage) for _, stage in reversed(forwards)]
    order = [
        Instruction(kind, stage, microbatch)
        for microbatch in range(num_microbatches)
        for kind, stage in (*forwards, *backwards)
    ]
    programs = tuple(
        tuple(step for step in order if rank_of_stage[step.stage] == rank)
        for rank in range(max(rank_of_stage) + 1)
    )
    return Plan("sequential", num_microbatches, rank_of_stage, programs)


SEQUENTIAL = ScheduleFamily(
    name="sequential",
    build=sequential,
    makespan=Formula("m * (p * (F + I + W) + 2 * (p - 1) * c)"),
    peak=Formula("1"),
    source="arXiv:1811.06965",
)

"""GPipe: all micro-batches forward, then all backward."""

from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.schedules.family import Formula, ScheduleFamily
from pipemega.pipeline.schedules.placement import loop
from pipemega.pipeline.schedules.sequences import steps


def gpipe(pp_size: int, num_microbatches: int) -> Plan:
    """All forwards, then all backwards.

    pp_size=3, num_microbatches=4, backward as long as forward:

        rank 0   F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        rank 1   .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
        rank 2   .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    Same bubble as 1F1B, but every rank holds the activations of all micro-batches at once. With
    slow messages it is faster than 1F1B: messages go one way at a time and overlap with compute.

    Backwards run in the order of the micro-batches, so that gradients are summed in the same order
    under every schedule.

    Source: Huang et al. 2019, arXiv:1811.06965.
    """
    programs = tuple(
        steps(Kind.FORWARD, rank, num_microbatches) + steps(Kind.BACKWARD, rank, num_microbatches)
        for rank in range(pp_size)
    )
    return Plan("gpipe", num_microbatches, loop(pp_size), programs)


GPIPE = ScheduleFamily(
    name="gpipe",
    aliases=("f-then-b",),
    build=gpipe,
    makespan=Formula("(m + p - 1) * (F + I + W) + 2 * (p - 1) * c"),
    peak=Formula("m"),
    source="arXiv:1811.06965",
)

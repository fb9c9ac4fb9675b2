"""GPipe: all micro-batches forward, then all backward."""

from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.phrases import steps
from pipemega.pipeline.schedules.placement import loop


def gpipe(pp_size: int, num_microbatches: int) -> Plan:
    """All forwards, then all backwards.

    pp_size=3, num_microbatches=4, backward as long as forward:

        rank 0   F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        rank 1   .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
        rank 2   .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    The bubble of 1F1B, but every rank holds the activations of all micro-batches at once. With
    slow messages it is the faster of the two: they travel one way at a time, behind the work.

    Backward goes in the order of the micro-batches, so that gradients add up in the same order
    under every schedule.

    Source: Huang et al. 2019, arXiv:1811.06965.
    """
    programs = tuple(
        steps(Kind.FORWARD, rank, num_microbatches) + steps(Kind.BACKWARD, rank, num_microbatches)
        for rank in range(pp_size)
    )
    return Plan("gpipe", num_microbatches, loop(pp_size), programs)


def _makespan(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    return (m + p - 1) * costs.work + 2 * (p - 1) * costs.message


GPIPE = ScheduleFamily(
    name="gpipe",
    aliases=("f-then-b",),
    build=lambda sizes: gpipe(sizes.pp_size, sizes.num_microbatches),
    makespan=_makespan,
    makespan_formula="(m + p - 1) * (F + I + W) + 2 * (p - 1) * c",
    peak=lambda sizes, rank: sizes.num_microbatches,
    peak_formula="m",
    source="arXiv:1811.06965",
)

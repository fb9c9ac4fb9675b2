"""One micro-batch at a time: plain model parallelism."""

from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.phrases import by_turns, steps
from pipemega.pipeline.schedules.placement import loop


def sequential(pp_size: int, num_microbatches: int) -> Plan:
    """The next micro-batch enters once the one before has left: no pipelining at all.

    pp_size=3, num_microbatches=2, backward as long as forward:

        rank 0   F0 .. .. .. .. B0 F1 .. .. .. .. B1
        rank 1   .. F0 .. .. B0 .. .. F1 .. .. B1 ..
        rank 2   .. .. F0 B0 .. .. .. .. F1 B1 .. ..

    One rank works, the others wait. Nothing overlaps, which makes it the one to debug with.

    Source: the naive baseline of Huang et al. 2019, arXiv:1811.06965, figure 2b.
    """
    programs = tuple(
        by_turns(
            steps(Kind.FORWARD, rank, num_microbatches),
            steps(Kind.BACKWARD, rank, num_microbatches),
            lead=0,
        )
        for rank in range(pp_size)
    )
    return Plan("sequential", num_microbatches, loop(pp_size), programs)


def _makespan(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    return m * (p * costs.work + 2 * (p - 1) * costs.message)


SEQUENTIAL = ScheduleFamily(
    name="sequential",
    build=lambda sizes: sequential(sizes.pp_size, sizes.num_microbatches),
    makespan=_makespan,
    makespan_formula="m * (p * (F + I + W) + 2 * (p - 1) * c)",
    peak=lambda sizes, rank: 1,
    peak_formula="1",
    source="arXiv:1811.06965",
)

"""1F1B: one forward, one backward, by turns."""

from pipemega.pipeline.instructions import Kind, Plan, Program
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.phrases import by_turns, steps
from pipemega.pipeline.schedules.placement import loop


def one_f_one_b(pp_size: int, num_microbatches: int) -> Plan:
    """Each backward as soon as it can run.

    pp_size=3, num_microbatches=4, backward as long as forward:

        rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Rank r runs pp_size - 1 - r forwards ahead, so it never holds the activations of more than
    pp_size - r micro-batches, however many there are.

    Source: Narayanan et al. 2021, arXiv:2104.04473 (PipeDream-Flush); the same as DAPPLE, Fan et
    al. 2020, arXiv:2007.01045.
    """

    def program(rank: int) -> Program:
        forwards = steps(Kind.FORWARD, rank, num_microbatches)
        backwards = steps(Kind.BACKWARD, rank, num_microbatches)
        return by_turns(forwards, backwards, lead=pp_size - 1 - rank)

    return Plan("1f1b", num_microbatches, loop(pp_size), tuple(map(program, range(pp_size))))


def _makespan(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    # In the steady state a message and its answer stand between a rank and its next step. They
    # are paid for once per micro-batch, except that the first of every p was already on its way.
    messages = 2 * (p + m - 3 - (m - 2) // p)
    return (m + p - 1) * costs.work + messages * costs.message


ONE_F_ONE_B = ScheduleFamily(
    name="1f1b",
    build=lambda sizes: one_f_one_b(sizes.pp_size, sizes.num_microbatches),
    makespan=_makespan,
    makespan_formula="(m + p - 1) * (F + I + W) + 2 * (p + m - 3 - (m - 2) // p) * c",
    peak=lambda sizes, rank: min(sizes.num_microbatches, sizes.pp_size - rank),
    peak_formula="min(m, p - r)",
    source="arXiv:2104.04473",
)

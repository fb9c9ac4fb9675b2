"""1F1B: one forward, one backward, in turn."""

from pipemega.pipeline.plan.instructions import Kind, Plan, Program
from pipemega.pipeline.schedules.family import Formula, ScheduleFamily
from pipemega.pipeline.schedules.placement import loop
from pipemega.pipeline.schedules.sequences import alternate, steps


def one_f_one_b(pp_size: int, num_microbatches: int) -> Plan:
    """Each backward as soon as it can run.

    pp_size=3, num_microbatches=4, backward as long as forward:

        rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Rank r runs pp_size - 1 - r warm-up forwards, so it never holds the activations of more than
    pp_size - r micro-batches, for any number of micro-batches.

    Source: Narayanan et al. 2021, arXiv:2104.04473 (PipeDream-Flush); the same as DAPPLE, Fan et
    al. 2020, arXiv:2007.01045.
    """

    def program(rank: int) -> Program:
        forwards = steps(Kind.FORWARD, rank, num_microbatches)
        backwards = steps(Kind.BACKWARD, rank, num_microbatches)
        return alternate(forwards, backwards, lead=pp_size - 1 - rank)

    return Plan("1f1b", num_microbatches, loop(pp_size), tuple(map(program, range(pp_size))))


ONE_F_ONE_B = ScheduleFamily(
    name="1f1b",
    build=one_f_one_b,
    # Messages: in the steady state a rank waits for a message and its reply once per micro-batch,
    # except for the first of every p micro-batches, whose message was already sent.
    makespan=Formula("(m + p - 1) * (F + I + W) + 2 * (p + m - 3 - (m - 2) // p) * c"),
    peak=Formula("min(m, p - r)"),
    source="arXiv:2104.04473",
)

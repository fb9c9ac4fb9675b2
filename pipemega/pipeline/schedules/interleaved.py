"""Several small stages on each rank, placed in a loop: interleaved 1F1B and looped BFS."""

from pipemega.pipeline.plan.instructions import Kind, Plan, Program
from pipemega.pipeline.schedules.building_blocks import (
    Formula,
    ScheduleFamily,
    alternate,
    loop,
    steps_in_groups,
)


def groups_of(pp_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Split micro-batches into even groups of at least pp_size, or one group if there are fewer.

    A group smaller than pp_size would leave ranks idle: its first micro-batch returns to rank 0
    later than rank 0 has started the last. A remainder is therefore spread over the groups.

        groups_of(4, 8) == (4, 4)    groups_of(4, 11) == (6, 5)    groups_of(4, 3) == (3,)
    """
    num_groups = max(1, num_microbatches // pp_size)
    size, larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def interleaved(pp_size: int, num_microbatches: int, chunks: int = 2) -> Plan:
    """1F1B with `chunks` small stages per rank; micro-batches run in groups.

    pp_size=2, num_microbatches=4, chunks=2, backward as long as forward:

        rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
        rank 1   .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..

    Divides the bubble of 1F1B by `chunks`; needs `chunks` times the messages and somewhat more
    memory. Accepts any number of micro-batches, see `groups_of`.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2, for multiples of pp_size.
    """
    groups = groups_of(pp_size, num_microbatches)

    def program(rank: int) -> Program:
        stages = range(rank, pp_size * chunks, pp_size)
        forwards = steps_in_groups(Kind.FORWARD, stages, groups)
        backwards = steps_in_groups(Kind.BACKWARD, stages[::-1], groups)
        lead = (chunks - 1) * groups[0] + 2 * (pp_size - 1 - rank)
        return alternate(forwards, backwards, lead)

    programs = tuple(map(program, range(pp_size)))
    return Plan("interleaved", num_microbatches, loop(pp_size, chunks), programs)


def looped_bfs(pp_size: int, num_microbatches: int, chunks: int = 2) -> Plan:
    """All micro-batches through the first chunk, then through the next; backward in reverse order.

    pp_size=2, num_microbatches=3, chunks=2, backward as long as forward:

        rank 0   F0 F1 F2 f0 f1 f2 .. .. b0 b1 b2 B0 B1 B2
        rank 1   .. F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2 ..

    GPipe on a loop placement: the bubble of `interleaved`, with the activations of all
    micro-batches in memory. With more micro-batches than ranks, messages between chunks cost no
    time.

    Source: Lamy-Poirier 2022, arXiv:2211.05953 ("breadth-first").
    """

    def program(rank: int) -> Program:
        stages, one_group = range(rank, pp_size * chunks, pp_size), [num_microbatches]
        return (
            *steps_in_groups(Kind.FORWARD, stages, one_group),
            *steps_in_groups(Kind.BACKWARD, stages[::-1], one_group),
        )

    programs = tuple(map(program, range(pp_size)))
    return Plan("looped-bfs", num_microbatches, loop(pp_size, chunks), programs)


INTERLEAVED = ScheduleFamily(
    name="interleaved",
    build=interleaved,
    chunks=None,
    # max(0, p - m): a group smaller than p returns to rank 0 that many steps after rank 0 is free.
    makespan=Formula(
        "(m + (p - 1 + (v - 1) * max(0, p - m)) / v) * (F + I + W) + 2 * (v * p - 1) * c"
    ),
    exact=Formula("c == 0 or (p > 1 and v > 1 and m % p == 0 and v * c <= min(F, I + W))"),
    peak=Formula("min(m, ((v - 1) * ceil(m / max(1, m // p)) + 2 * (p - 1 - r) + 1) / v)"),
    source="arXiv:2104.04473",
)

LOOPED_BFS = ScheduleFamily(
    name="looped-bfs",
    build=looped_bfs,
    chunks=None,
    # (v - 1) * ..: the first micro-batch returns to rank 0 that much later than rank 0 is free.
    makespan=Formula(
        "(m + (p - 1) / v) * (F + I + W) + 2 * (p - 1) * c + "
        "(v - 1) * (max(0, p * (F / v + c) - m * F / v) + "
        "max(0, p * ((I + W) / v + c) - m * (I + W) / v))"
    ),
    exact=Formula("p > 1 or c == 0"),
    peak=Formula("m"),
    source="arXiv:2211.05953",
)

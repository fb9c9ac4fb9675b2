"""Several thin stages on each rank, placed in a loop: interleaved 1F1B, and looped BFS."""

from pipemega.pipeline.instructions import Kind, Plan, Program
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.phrases import by_turns, in_groups
from pipemega.pipeline.schedules.placement import loop


def groups_of(pp_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Micro-batches in groups as even as can be, none smaller than pp_size if there are that many.

    A group smaller than pp_size would leave ranks idle: its first micro-batch has not come round
    the loop when its last has left. So what does not make a group of its own is shared out.

        groups_of(4, 8) == (4, 4)    groups_of(4, 11) == (6, 5)    groups_of(4, 3) == (3,)
    """
    num_groups = max(1, num_microbatches // pp_size)
    size, larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def interleaved(pp_size: int, num_microbatches: int, chunks: int = 2) -> Plan:
    """1F1B over `chunks` thin stages per rank, micro-batches in groups that go round the loop.

    pp_size=2, num_microbatches=4, chunks=2, backward as long as forward:

        rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
        rank 1   .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..

    The bubble of 1F1B divided by the chunks, for as many times the messages and some more memory.
    Any number of micro-batches will do: see `groups_of`.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; there for multiples of pp_size.
    """
    groups = groups_of(pp_size, num_microbatches)

    def program(rank: int) -> Program:
        stages = range(rank, pp_size * chunks, pp_size)
        forwards = in_groups(Kind.FORWARD, stages, groups)
        backwards = in_groups(Kind.BACKWARD, stages[::-1], groups)
        lead = (chunks - 1) * groups[0] + 2 * (pp_size - 1 - rank)
        return by_turns(forwards, backwards, lead)

    programs = tuple(map(program, range(pp_size)))
    return Plan("interleaved", num_microbatches, loop(pp_size, chunks), programs)


def looped_bfs(pp_size: int, num_microbatches: int, chunks: int = 2) -> Plan:
    """All micro-batches through the first chunk, then through the next; backward the same way back.

    pp_size=2, num_microbatches=3, chunks=2, backward as long as forward:

        rank 0   F0 F1 F2 f0 f1 f2 .. .. b0 b1 b2 B0 B1 B2
        rank 1   .. F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2 ..

    GPipe round a loop: the bubble of `interleaved`, the activations of all micro-batches held, and
    with more micro-batches than ranks no time lost to messages on the way round.

    Source: Lamy-Poirier 2022, arXiv:2211.05953 ("breadth-first").
    """

    def program(rank: int) -> Program:
        stages, everything = range(rank, pp_size * chunks, pp_size), [num_microbatches]
        return (
            *in_groups(Kind.FORWARD, stages, everything),
            *in_groups(Kind.BACKWARD, stages[::-1], everything),
        )

    programs = tuple(map(program, range(pp_size)))
    return Plan("looped-bfs", num_microbatches, loop(pp_size, chunks), programs)


def _makespan_interleaved(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, v = sizes
    # A group smaller than p comes back to rank 0 that much later than rank 0 is free.
    late = (v - 1) * max(0, p - m)
    return (m + (p - 1 + late) / v) * costs.work + 2 * (v * p - 1) * costs.message


def _exact_interleaved(sizes: Sizes, costs: ShareCosts) -> bool:
    p, m, v = sizes
    return costs.message == 0 or (
        p > 1 and v > 1 and m % p == 0 and v * costs.message <= costs.forward
    )


def _peak_interleaved(sizes: Sizes, rank: int) -> float:
    p, m, v = sizes
    return min(m, ((v - 1) * groups_of(p, m)[0] + 2 * (p - 1 - rank) + 1) / v)


def _makespan_looped_bfs(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, v = sizes
    total = (m + (p - 1) / v) * costs.work + 2 * (p - 1) * costs.message
    # The first micro-batch comes back to rank 0 that much later than rank 0 is free.
    for share in (costs.forward / v, (costs.backward_input + costs.backward_weight) / v):
        total += (v - 1) * max(0.0, p * (share + costs.message) - m * share)
    return total


INTERLEAVED = ScheduleFamily(
    name="interleaved",
    build=lambda sizes: interleaved(*sizes),
    chunks=None,
    makespan=_makespan_interleaved,
    makespan_formula="(m + (p - 1 + (v - 1) * max(0, p - m)) / v) * (F + I + W) + "
    "2 * (v * p - 1) * c",
    exact=_exact_interleaved,
    exact_formula="c == 0 or (p > 1 and v > 1 and m % p == 0 and v * c <= F)",
    peak=_peak_interleaved,
    peak_formula="min(m, ((v - 1) * ceil(m / max(1, m // p)) + 2 * (p - 1 - r) + 1) / v)",
    source="arXiv:2104.04473",
)

LOOPED_BFS = ScheduleFamily(
    name="looped-bfs",
    build=lambda sizes: looped_bfs(*sizes),
    chunks=None,
    makespan=_makespan_looped_bfs,
    makespan_formula="(m + (p - 1) / v) * (F + I + W) + 2 * (p - 1) * c + "
    "(v - 1) * (max(0, p * (F / v + c) - m * F / v) + "
    "max(0, p * ((I + W) / v + c) - m * (I + W) / v))",
    exact=lambda sizes, costs: sizes.pp_size > 1 or costs.message == 0,
    exact_formula="p > 1 or c == 0",
    peak=lambda sizes, rank: sizes.num_microbatches,
    peak_formula="m",
    source="arXiv:2211.05953",
)

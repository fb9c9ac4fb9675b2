"""1F1B: one forward, one backward, in turn.

GPipe: all micro-batches forward, then all backward.

One micro-batch at a time: plain model parallelism.

Forward passes only, for evaluation, under any placement.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.schedules.building_blocks import (
    Formula,
    ScheduleFamily,
    alternate,
    loop,
    steps,
)


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


def forward_only(rank_of_stage: Sequence[int], num_microbatches: int) -> Plan:
    """Run the forward of each micro-batch through all stages, under any placement.

    Two ranks, placement v of two chunks (stages 0 and 3 on rank 0), num_microbatches=4:

        rank 0   F0 F1 F2 f0 F3 f1 .. f2 .. f3
        rank 1   .. F0 f0 F1 f1 F2 f2 F3 f3 ..

    The order comes from a simulation in ticks, so it cannot deadlock. In each tick every rank runs
    the oldest micro-batch whose input has arrived. A new micro-batch starts only while fewer than
    2 * pp_size are in flight, so that a fast rank does not queue work for a slower one. The limit
    costs no time: a pipeline with evenly placed stages is full with pp_size micro-batches, or
    nearly twice as many where the placement visits its ranks unevenly, as v with three chunks.
    """
    num_ranks, last = max(rank_of_stage) + 1, len(rank_of_stage) - 1
    programs: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    arrived: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # (micro-batch, stage)
    started = finished = 0
    waits_for_stage_0 = False
    while finished < num_microbatches:
        if not waits_for_stage_0 and started < min(num_microbatches, finished + 2 * num_ranks):
            heappush(arrived[rank_of_stage[0]], (started, 0))
            started, waits_for_stage_0 = started + 1, True
        ran = [heappop(queue) for queue in arrived if queue]
        for microbatch, stage in ran:
            programs[rank_of_stage[stage]].append(Instruction(Kind.FORWARD, stage, microbatch))
            if stage == 0:
                waits_for_stage_0 = False
            if stage == last:
                finished += 1
            else:
                heappush(arrived[rank_of_stage[stage + 1]], (microbatch, stage + 1))
    return Plan("forward-only", num_microbatches, tuple(rank_of_stage), tuple(map(tuple, programs)))

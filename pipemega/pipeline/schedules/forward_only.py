"""Forward passes only, for evaluation, under any placement."""

from collections.abc import Sequence
from heapq import heappop, heappush

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan


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

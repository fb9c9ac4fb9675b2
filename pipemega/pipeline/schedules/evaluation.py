"""A forward pass alone, under any placement."""

from collections.abc import Sequence
from heapq import heappop, heappush

from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program


def forward_only(rank_of_stage: Sequence[int], num_microbatches: int) -> Plan:
    """The forward of each micro-batch through all stages, wherever they live; for evaluation.

    Two ranks, placement v of two chunks (stages 0 and 3 on rank 0), num_microbatches=4:

        rank 0   F0 F1 F2 f0 F3 f1 .. f2 .. f3
        rank 1   .. F0 f0 F1 f1 F2 f2 F3 f3 ..

    Made by playing it out: at each tick every rank runs the oldest micro-batch that has arrived,
    and a new one enters the model only while fewer than 2 * pp_size are under way. So no rank
    piles up what a slower one cannot take yet, and since the order is one that was played, it
    cannot stand still. The limit costs no time: a pipeline of evenly laid out stages is full with
    pp_size micro-batches, or nearly twice as many where its ranks are visited unevenly, as in v
    with three chunks.
    """
    num_ranks, last = max(rank_of_stage) + 1, len(rank_of_stage) - 1
    programs: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    arrived: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # (micro-batch, stage)
    entered = finished = 0
    at_the_door = False
    while finished < num_microbatches:
        if not at_the_door and entered < min(num_microbatches, finished + 2 * num_ranks):
            heappush(arrived[rank_of_stage[0]], (entered, 0))
            entered, at_the_door = entered + 1, True
        ran = [heappop(queue) for queue in arrived if queue]
        for microbatch, stage in ran:
            programs[rank_of_stage[stage]].append(Instruction(Kind.FORWARD, stage, microbatch))
            if stage == 0:
                at_the_door = False
            if stage == last:
                finished += 1
            else:
                heappush(arrived[rank_of_stage[stage + 1]], (microbatch, stage + 1))
    written: tuple[Program, ...] = tuple(map(tuple, programs))
    return Plan("forward-only", num_microbatches, tuple(rank_of_stage), written)

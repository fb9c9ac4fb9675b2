"""Encodes timelines as columns of small integers, the data of the HTML page.

196,608 steps take about four megabytes, a tenth of one JSON object per step. Times and memory are
integer multiples of a tick, the largest tick that keeps seven digits.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pipemega.pipeline.visualize.panel import Panel


def panel_data(panel: Panel) -> dict[str, Any]:
    """Return the data of one panel; steps are ordered by rank.

    title                 heading
    makespan              time from the first to the last step or phase
    outside               for each rank, (name, start, end) of the phases of a measured step
    chunks                maximum number of stages on a rank
    rank_of_stage, chunk_of_stage
    counts                number of steps of each rank
    kinds                 one letter per step
    stages, batches       stage and micro-batch of each step
    tick                  units of time in one tick
    gaps, times           ticks from the end of the previous step of the rank (or time 0) to the
                          start, and ticks from start to end
    waits                 (index of a step, index of the step of another rank that it waited for)
    memory_tick, during, after    memory of the rank during and after each step
    """
    timeline, plan = panel.timeline, panel.timeline.plan
    steps = list(plan.steps())
    position = {step: index for index, step in enumerate(steps)}
    tick, moments = _ticks(
        time - panel.origin
        for rank in range(plan.num_ranks)
        for _, *interval in timeline.steps(rank)
        for time in interval
    )
    memory_tick, held = _ticks(
        value for rank in range(plan.num_ranks) for pair in panel.held(rank) for value in pair
    )
    gaps, first, waits = [], 0, []
    for rank, program in enumerate(plan.programs):
        starts = moments[2 * first : 2 * (first + len(program)) : 2]
        ends = moments[2 * first + 1 : 2 * (first + len(program)) : 2]
        gaps += [start - end for start, end in zip(starts, [0, *ends[:-1]], strict=True)]
        for wait in panel.waits(rank):
            if wait.awaited is not None:
                waits.append((first + wait.at, position[wait.awaited]))
        first += len(program)
    return {
        "title": panel.heading,
        "makespan": panel.length,
        "outside": [
            [(name, start - panel.origin, end - panel.origin) for name, start, end in rank]
            for rank in panel.phases
        ],
        "chunks": panel.num_chunks,
        "rank_of_stage": plan.rank_of_stage,
        "chunk_of_stage": panel.chunk_of_stage,
        "counts": [len(program) for program in plan.programs],
        "kinds": "".join(step.kind.value for step in steps),
        "stages": [step.stage for step in steps],
        "batches": [step.microbatch for step in steps],
        "tick": tick,
        "gaps": gaps,
        "times": [e - s for s, e in zip(moments[::2], moments[1::2], strict=True)],
        "waits": waits,
        "memory_tick": memory_tick,
        "during": held[::2],
        "after": held[1::2],
    }


def _ticks(values: Iterable[float]) -> tuple[float, Sequence[int]]:
    """Return (tick, values in ticks)."""
    values = list(values)
    highest = max(map(abs, values), default=0.0)
    if not highest:
        return 1.0, [0] * len(values)
    fine = 10.0 ** (math.floor(math.log10(highest)) - 6)
    whole = [round(value / fine) for value in values]
    common = math.gcd(*whole) or 1
    return float(f"{fine * common:.12g}"), [number // common for number in whole]

"""Timelines as columns of small numbers: what the page in HTML is given to draw.

196,608 steps are some four megabytes so, a tenth of what objects would take. Times and memory
become whole numbers of a tick, the largest one that gives them back to seven digits.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pipemega.pipeline.pictures.panel import Panel


def columns(panel: Panel) -> dict[str, Any]:
    """One panel, its steps rank after rank.

    title                 what stands above it
    makespan              in units of time
    chunks                the most stages on a rank
    rank_of_stage, chunk_of_stage
    counts                steps of each rank
    kinds                 a letter per step
    stages, batches       stage and micro-batch of each step
    tick                  units of time in one tick
    gaps, times           ticks from the end of the step before on its rank (or time 0), and
                          that the step takes
    waits                 of those that waited for a step of another rank: its position, and the
                          position of what it waited for
    memory_tick, during, after    what the rank holds while it runs and afterwards
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
        free = 0
        for at in range(first, first + len(program)):
            gaps.append(moments[2 * at] - free)
            free = moments[2 * at + 1]
        for wait in panel.waits(rank):
            if wait.awaited is not None:
                waits.append((first + wait.at, position[wait.awaited]))
        first += len(program)
    return {
        "title": panel.heading,
        "makespan": timeline.makespan,
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
    """(tick, values in ticks)."""
    values = list(values)
    highest = max(map(abs, values), default=0.0)
    if not highest:
        return 1.0, [0] * len(values)
    fine = 10.0 ** (math.floor(math.log10(highest)) - 6)
    whole = [round(value / fine) for value in values]
    common = math.gcd(*whole) or 1
    return float(f"{fine * common:.12g}"), [number // common for number in whole]

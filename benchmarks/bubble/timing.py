"""Computes the measured timeline of a plan, and the lag before each step, from logged sleeps."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipemega.pipeline.plan.instructions import Instruction, Plan
from pipemega.pipeline.plan.simulate import Timeline

Span = tuple[float, float]


def timeline(
    plan: Plan, parts: Sequence[Sequence[int]], sleeps: Sequence[Sequence[Span]]
) -> Timeline:
    """Return the measured timeline of `plan`, in seconds from its first step.

    Args:
        parts: number of sleeps of each step of each rank; a step without sleeps starts and ends at
            the end of the previous step.
        sleeps: (start, end) of the sleeps of each rank, in order.
    """
    begin = min(spans[0][0] for spans in sleeps)
    starts, ends = [], []
    for counts, spans in zip(parts, sleeps, strict=True):
        start: list[float] = []
        end: list[float] = []
        at, now = 0, begin
        for count in counts:
            first = spans[at][0] if count else now
            now = spans[at + count - 1][1] if count else now
            at += count
            start.append(first - begin)
            end.append(now - begin)
        starts.append(tuple(start))
        ends.append(tuple(end))
    return Timeline(plan, tuple(starts), tuple(ends), (0.0,) * plan.num_ranks)


def lags(measured: Timeline) -> dict[str, Any]:
    """Return the median time in µs from when a step could start to its start, by cause.

    `own`: the previous step on the rank ended last; the lag is the work of the runtime between two
    steps. `message`: the result of another rank was ready last; the lag also contains the transfer.
    """
    plan = measured.plan
    ends: dict[Instruction, float] = {
        step: end for rank in range(plan.num_ranks) for step, _, end in measured.steps(rank)
    }
    kinds: dict[str, list[float]] = {"own": [], "message": []}
    for rank in range(plan.num_ranks):
        before: float | None = None
        for step, start, end in measured.steps(rank):
            need = plan.needs(step)
            ready = ends[need] if need is not None else None
            if end > start:
                if ready is not None and (before is None or ready > before):
                    kinds["message"].append(start - ready)
                elif before is not None:
                    kinds["own"].append(start - before)
            before = end
    return {kind: median(values) * 1e6 if values else None for kind, values in kinds.items()}

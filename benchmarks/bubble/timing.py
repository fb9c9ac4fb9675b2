"""From what each rank slept to when each step of the plan ran, and what lay between the steps."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipemega.pipeline.instructions import Instruction, Plan
from pipemega.pipeline.simulate import Timeline

Span = tuple[float, float]


def timeline(
    plan: Plan, parts: Sequence[Sequence[int]], naps: Sequence[Sequence[Span]]
) -> Timeline:
    """The measured timeline of `plan`, in seconds from its first step.

    Args:
        parts: how many naps each step of each rank has; a step without any ends where the one
            before it ended.
        naps: of each rank, in order.
    """
    begin = min(spans[0][0] for spans in naps)
    starts, ends = [], []
    for counts, spans in zip(parts, naps, strict=True):
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
    """How long after it could each step began, in µs: the median, by what it had to wait for.

    `own`: the step before it on its rank, which ended last; it is what the runtime does between
    two steps. `message`: the result of another rank, which came last; it is that and the way over.
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

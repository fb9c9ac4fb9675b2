"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

A process per pipeline rank with one thread, an event per step, an arrow per message from the step
that made it to the step that uses it, and a counter of the memory held. Times are microseconds.

Source: "Trace Event Format", the document of the Chromium project on its JSON traces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pipemega.pipeline.instructions import Instruction
from pipemega.pipeline.pictures.palette import WORDS
from pipemega.pipeline.pictures.panel import Panel, Wait, panels_of
from pipemega.pipeline.simulate import Timeline

_MICROSECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0}
)

Event = dict[str, Any]


def trace(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory_unit: str = "micro-batches",
) -> str:
    """The trace as JSON, one event per line.

    Args:
        shown: a timeline; or panels, the ranks of each after those of the one before.
        measured: what was measured of the same plan, after what was predicted.
        unit: of time: s, ms or us; one of anything else is shown as a millisecond.
        memory_unit: of memory, as the counter names it.
    """
    scale = _MICROSECONDS.get(unit, 1e3)
    # Event by event: a million of them as objects would take a gigabyte.
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    lines: list[str] = []
    first = 0
    for panel in panels_of(shown, measured):
        lines += map(encode, _events(panel, first, scale, f"memory held ({memory_unit})"))
        first += panel.timeline.plan.num_ranks
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _events(panel: Panel, first: int, scale: float, counter: str) -> Iterator[Event]:
    """All events of one panel.

    Args:
        first: process of its rank 0.
        scale: microseconds in its unit of time.
    """
    plan = panel.timeline.plan
    places: dict[Instruction, tuple[int, float, float]] = {}  # step -> (process, start, end)
    for rank in range(plan.num_ranks):
        process = first + rank
        yield _named(process, "process_name", f"{panel.heading}: rank {rank}")
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": process,
            "args": {"sort_index": process},
        }
        yield _named(process, "thread_name", "compute")
        waits = {wait.at: wait for wait in panel.waits(rank)}
        before = None
        rows = zip(panel.timeline.steps(rank), panel.held(rank), strict=True)
        for at, ((step, start, end), held) in enumerate(rows):
            start, end = ((time - panel.origin) * scale for time in (start, end))
            places[step] = (process, start, end)
            yield _slice(step, process, start, end, _said(step, rank, waits.get(at)))
            for value, moment in ((held.during, start), (held.after, end)):
                if value != before:
                    yield _count(counter, process, moment, value)
                    before = value
    yield from _arrows(panel, places, first)


def _said(step: Instruction, rank: int, wait: Wait | None) -> Event:
    """What is read of a step that is clicked on."""
    said: Event = {
        "kind": WORDS[step.kind],
        "micro-batch": step.microbatch,
        "stage": step.stage,
        "rank": rank,
    }
    if wait is not None:
        said["waited"] = round(wait.time, 9)
        said["waited for"] = str(wait.awaited) if wait.awaited else "no other rank"
    return said


def _arrows(
    panel: Panel, places: Mapping[Instruction, tuple[int, float, float]], first: int
) -> Iterator[Event]:
    """From the middle of each step to the start of the one on another rank that needs it.

    The middle, since at its very end the next step may have begun, and the arrow would start there.
    """
    plan = panel.timeline.plan
    for step, (process, start, _) in places.items():
        need = plan.needs(step)
        if need is None or plan.rank_of_stage[need.stage] == plan.rank_of_stage[step.stage]:
            continue
        source, began, ended = places[need]
        arrow = {"name": "message", "cat": "message", "id": f"{first}:{step}", "tid": 0}
        left = min(began + (ended - began) / 2, start)
        yield {"ph": "s", **arrow, "pid": source, "ts": round(left, 3)}
        yield {"ph": "f", "bp": "e", **arrow, "pid": process, "ts": round(start, 3)}


def _slice(step: Instruction, process: int, start: float, end: float, said: Event) -> Event:
    start, end = round(start, 3), round(end, 3)
    return {
        "ph": "X",
        "name": str(step),
        "cat": WORDS[step.kind],
        "pid": process,
        "tid": 0,
        "ts": start,
        "dur": round(end - start, 3),
        "args": said,
    }


def _count(name: str, process: int, moment: float, value: float) -> Event:
    held = {"held": round(value, 9)}
    return {"ph": "C", "name": name, "pid": process, "ts": round(moment, 3), "args": held}


def _named(process: int, what: str, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": 0, "args": {"name": name}}

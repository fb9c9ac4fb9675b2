"""Writes timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

One process with one thread per pipeline rank, one event per step, one arrow per message from the
sending step to the receiving step, and a counter of the memory. Times are in microseconds.

Source: "Trace Event Format", the document of the Chromium project on its JSON traces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pipemega.pipeline.plan.instructions import Instruction
from pipemega.pipeline.plan.simulate import Timeline
from pipemega.pipeline.visualize.figure import Panel, Wait, as_panels
from pipemega.pipeline.visualize.palette import ALL_NAMES

_MICROSECONDS: Final[Mapping[str, float]] = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0}

Event = dict[str, Any]


def chrome_trace(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory_unit: str = "micro-batches",
) -> str:
    """Return the trace as JSON, one event per line.

    Args:
        shown: one timeline, or panels; the ranks of a panel follow the ranks of the one before.
        measured: the measured timeline of the same plan; `shown` is then called predicted.
        unit: unit of time: s, ms or us. One unit of any other name is written as a millisecond.
        memory_unit: unit of memory, for the name of the counter.
    """
    scale = _MICROSECONDS.get(unit, 1e3)
    # Encoded one by one: a million events as Python objects would take a gigabyte.
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    lines: list[str] = []
    first = 0
    for panel in as_panels(shown, measured):
        lines += map(encode, _events(panel, first, scale, f"memory ({memory_unit})"))
        first += panel.timeline.plan.num_ranks
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _events(panel: Panel, first: int, scale: float, counter: str) -> Iterator[Event]:
    """Yield all events of one panel.

    Args:
        first: process id of its rank 0.
        scale: microseconds per unit of time.
    """
    plan = panel.timeline.plan
    places: dict[Instruction, tuple[int, float, float]] = {}  # step -> (process, start, end)
    for rank in range(plan.num_ranks):
        pid = first + rank
        yield _metadata(pid, "process_name", f"{panel.heading}: rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield _metadata(pid, "thread_name", "compute")
        for name, start, end in panel.phases_of(rank):
            interval = (start - panel.origin) * scale, (end - panel.origin) * scale
            yield _slice(name, "phase", pid, interval, {})
        waits = {wait.at: wait for wait in panel.waits(rank)}
        before = None
        rows = zip(panel.timeline.steps(rank), panel.held(rank), strict=True)
        for at, ((step, start, end), held) in enumerate(rows):
            start, end = ((time - panel.origin) * scale for time in (start, end))
            places[step] = (pid, start, end)
            details = _details(step, rank, waits.get(at))
            yield _slice(str(step), ALL_NAMES[step.kind], pid, (start, end), details)
            for value, moment in ((held.during, start), (held.after, end)):
                if value != before:
                    yield _counter(counter, pid, moment, value)
                    before = value
    yield from _arrows(panel, places, first)


def _details(step: Instruction, rank: int, wait: Wait | None) -> Event:
    """Return what the viewer shows for a selected step."""
    details: Event = {
        "kind": ALL_NAMES[step.kind],
        "micro-batch": step.microbatch,
        "stage": step.stage,
        "rank": rank,
    }
    if wait is not None:
        details["waited"] = round(wait.time, 9)
        details["waited for"] = str(wait.awaited) if wait.awaited else "no other rank"
    return details


def _arrows(
    panel: Panel, places: Mapping[Instruction, tuple[int, float, float]], first: int
) -> Iterator[Event]:
    """Yield an arrow from each step to the step on another rank that needs its result.

    It starts in the middle of the step: at its end, the viewer would attach it to the next step.
    """
    plan = panel.timeline.plan
    for step, (process, start, _) in places.items():
        need = plan.remote_need(step)
        if need is None:
            continue
        source, began, ended = places[need]
        arrow = {"name": "message", "cat": "message", "id": f"{first}:{step}", "tid": 0}
        left = min(began + (ended - began) / 2, start)
        yield {"ph": "s", **arrow, "pid": source, "ts": round(left, 3)}
        yield {"ph": "f", "bp": "e", **arrow, "pid": process, "ts": round(start, 3)}


def _slice(
    name: str, category: str, process: int, interval: tuple[float, float], args: Event
) -> Event:
    start, end = round(interval[0], 3), round(interval[1], 3)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": 0,
        "ts": start,
        "dur": round(end - start, 3),
        "args": args,
    }


def _counter(name: str, process: int, moment: float, value: float) -> Event:
    held = {"held": round(value, 9)}
    return {"ph": "C", "name": name, "pid": process, "ts": round(moment, 3), "args": held}


def _metadata(process: int, key: str, name: str) -> Event:
    return {"ph": "M", "name": key, "pid": process, "tid": 0, "args": {"name": name}}

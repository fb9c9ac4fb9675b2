"""Writes the timeline of a traced step: files to look at, and a record for the monitor."""

import logging
from pathlib import Path

from pipemega.errors import ConfigError
from pipemega.monitor import TimelineRecord
from pipemega.profiling.simulated_vs_measured import Comparison, compare
from pipemega.profiling.step_trace import Trace


def write_timeline(
    trace: Trace, folder: Path, consumed_samples: int, log: logging.Logger
) -> TimelineRecord:
    """Write the timeline into `folder`, in every format that is available.

        step-10.json         for `python -m pipemega timeline`
        step-10.trace.json   for ui.perfetto.dev
        step-10.html         measured and predicted timelines
        step-10.png          the same, if matplotlib is installed

    If writing fails, a warning is logged and training continues.
    """
    comparison = compare(trace)
    picture = None
    try:
        picture = _write(comparison, folder / f"step-{trace.step}")
    except OSError as error:
        log.warning("the timeline of step %d could not be written: %s", trace.step, error)
    ranks = range(trace.plan.num_ranks)
    timeline = trace.timeline
    return TimelineRecord(
        step=trace.step,
        consumed_samples=consumed_samples,
        schedule=trace.plan.name,
        makespan=timeline.makespan,
        span=timeline.span,
        bubble=timeline.bubble,
        predicted_makespan=comparison.predicted.makespan / 1e3,
        busy=tuple(timeline.busy(rank) for rank in ranks),
        waited=tuple(trace.waited(rank) for rank in ranks),
        picture=picture,
    )


def _write(comparison: Comparison, path: Path) -> Path | None:
    """Write all files; return the picture's path, None without matplotlib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(comparison.trace.to_json() + "\n", encoding="utf-8")
    path.with_suffix(".trace.json").write_bytes(comparison.render("trace"))
    path.with_suffix(".html").write_bytes(comparison.render("html"))
    try:
        png = comparison.render("png")
    except ConfigError:
        return None
    picture = path.with_suffix(".png")
    picture.write_bytes(png)
    return picture

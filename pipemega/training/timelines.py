"""What a run leaves of a step that was timed: files to look at, and a record for the monitor."""

import logging
from pathlib import Path

from pipemega.errors import ConfigError
from pipemega.monitor import TimelineRecord
from pipemega.pipeline.comparison import Comparison, compare
from pipemega.pipeline.trace import Trace


def write_timeline(
    trace: Trace, folder: Path, consumed_samples: int, log: logging.Logger
) -> TimelineRecord:
    """Writes the timeline into `folder`, in every form that this machine can make.

        step-10.json         as `python -m pipemega timeline` reads it
        step-10.trace.json   for ui.perfetto.dev
        step-10.html         measured beside predicted
        step-10.png          likewise, where matplotlib is installed

    What cannot be written is reported, and the training goes on.
    """
    shown = compare(trace)
    picture = None
    try:
        picture = _write(shown, folder / f"step-{trace.step}")
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
        predicted_makespan=shown.predicted.makespan / 1e3,
        busy=tuple(timeline.busy(rank) for rank in ranks),
        waited=tuple(trace.waited(rank) for rank in ranks),
        picture=picture,
    )


def _write(shown: Comparison, path: Path) -> Path | None:
    """Returns the picture, if it was drawn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(shown.trace.to_json() + "\n", encoding="utf-8")
    path.with_suffix(".trace.json").write_text(shown.chrome_trace(), encoding="utf-8")
    path.with_suffix(".html").write_text(shown.html(), encoding="utf-8")
    try:
        drawn = shown.png()
    except ConfigError:
        # Without matplotlib: the page shows the same.
        return None
    picture = path.with_suffix(".png")
    picture.write_bytes(drawn)
    return picture

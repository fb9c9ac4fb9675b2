"""The report for pictures and the HTML page: timelines with memory, verdict, bars and tables."""

from collections.abc import Sequence
from dataclasses import replace

from pipemega.pipeline.visualize import Bars, Intro, Panel, Table, Verdict
from pipemega.planning import report_text
from pipemega.planning.advice import MUCH_SLOWER, Advice
from pipemega.planning.estimate import Report
from pipemega.planning.prediction import Prediction
from pipemega.planning.report_text import Rows
from pipemega.planning.units import show_bytes, show_percent, show_time, three, unit_of
from pipemega.printing import percent

_IN_CONFIG, _RECOMMENDED = "in the config", "recommended"
_ALTERNATIVE, _SLOWER = "best alternative", "much slower"


def report_panels(report: Report, advice: Advice) -> tuple[list[Panel], str]:
    """Return a panel for each schedule, that of the config first; the unit of memory."""
    predictions = _in_order(report, advice)
    name, size = unit_of([int(max(p.timeline.peak)) for p in predictions])
    panels = [_panel(p, size, _mark(p, report, advice)) for p in predictions]
    return panels, f"{name} of activations"


def _in_order(report: Report, advice: Advice) -> list[Prediction]:
    """Return the schedule of the config, the best alternative, the others from fast to slow."""
    first = [report.prediction]
    alternative = _alternative(report, advice)
    if alternative:
        first.append(alternative)
    return [*first, *(other for other in report.compared if other not in first)]


def _alternative(report: Report, advice: Advice) -> Prediction | None:
    """Return the recommended other schedule, or the fastest other one, if possible one that fits.

    None if there was no comparison.
    """
    if advice.best not in (None, report.prediction):
        return advice.best
    others = [other for other in report.compared if other is not report.prediction]
    fitting = [other for other in others if other.fits(report.request.limit) is not False]
    return next(iter(fitting or others), None)


def _mark(prediction: Prediction, report: Report, advice: Advice) -> str | None:
    if not report.compared:
        return None
    marks = [_IN_CONFIG] * (prediction is report.prediction)
    slow = _time_ratio(prediction, report) > MUCH_SLOWER
    marks += [_RECOMMENDED] * (prediction is advice.best and not slow)
    if not marks and prediction is _alternative(report, advice):
        marks.append(_SLOWER if slow else _ALTERNATIVE)
    return ", ".join(marks) or None


def _panel(prediction: Prediction, unit: int, mark: str | None) -> Panel:
    def scaled(sizes: Sequence[float]) -> tuple[float, ...]:
        return tuple(round(size / unit, 2) for size in sizes)

    costs = replace(
        prediction.costs,
        activation=scaled(prediction.costs.held_after_forward),
        kept=scaled(prediction.costs.held_after_input),
    )
    timeline = replace(prediction.timeline, peak=scaled(prediction.timeline.peak))
    return Panel(timeline, costs=costs, mark=mark)


def report_intro(report: Report, advice: Advice, title: str) -> Intro:
    """Return the verdict, the memory of each rank and the comparison; details in tables."""
    summary: Rows = [("", ""), *report_text.summary(report).items()]
    summary += report_text.step_summary(report).items()
    summary.append(report_text.verdict(report))
    details: dict[str, Rows] = {
        "mesh, batch, model and step": summary,
        "stages": report_text.stage_table(report),
        report_text.memory_title(report): report_text.memory_table(report),
    }
    return Intro(
        title=title,
        verdict=_verdict(report, advice),
        bars=_memory(report),
        tables=[_comparison(report, advice)] if report.compared else [],
        details=[Table(name, header, rows) for name, (header, *rows) in details.items()],
    )


def _verdict(report: Report, advice: Advice) -> Verdict:
    limit, prediction = report.request.limit, report.prediction
    need = show_bytes(prediction.peak)
    rank = [memory.total for memory in prediction.memory].index(prediction.peak)
    if limit is None:
        headline = f"Needs {need} of device memory"
    elif report.fits:
        headline = f"Fits: {need} of {show_bytes(limit)}"
    else:
        headline = f"Does not fit: needs {need} of {show_bytes(limit)}"
    facts = [
        ("schedule", prediction.plan.name),
        ("time per step", _time(prediction, report)),
        ("bubble", show_percent(prediction.timeline.bubble)),
        ("fullest rank", f"pipeline rank {rank}"),
    ]
    alternative = _alternative(report, advice)
    if alternative:
        facts.append(("best alternative", _best_change(alternative, report, advice)))
    remarks = [("recommended:", advice.recommendation)] if advice.recommendation else []
    for change, peak, fits in advice.suggestions:
        label = "to make it fit:" if fits else "reduces memory, not enough:"
        remarks.append((label, f"{change} ({show_bytes(peak)})"))
    for change, gain, peak in advice.alternatives:
        remarks.append(("faster:", f"{change} ({show_percent(gain)} faster, {show_bytes(peak)})"))
    remarks += [("warning:", text) for text in advice.warnings]
    remarks += [(f"{name} is not possible:", why) for name, why in report.refused.items()]
    remarks += [("note:", text) for text in report.notes]
    return Verdict(report.fits, headline, facts, remarks)


def _best_change(other: Prediction, report: Report, advice: Advice) -> str:
    """Return name, time, memory, and whether the other schedule fits.

    If the other schedule does not fit or is much slower, return the change of another key that
    makes the run fit and saves least memory, because such a change often costs least time.
    """
    changes = [suggestion for suggestion in advice.suggestions if suggestion.fits]
    if changes and (
        not other.fits(report.request.limit) or _time_ratio(other, report) > MUCH_SLOWER
    ):
        least = max(changes, key=lambda suggestion: suggestion.peak)
        return f"{least.change}: {show_bytes(least.peak)}, fits"
    change = percent(_time_ratio(other, report) - 1, signed=True)
    text = f"{other.plan.name}: {_time(other, report)} ({change})"
    fits = {True: "fits", False: "does not fit", None: ""}[other.fits(report.request.limit)]
    return ", ".join(filter(None, (text, show_bytes(other.peak), fits)))


def _time_ratio(other: Prediction, report: Report) -> float:
    return other.timeline.makespan / report.prediction.timeline.makespan


def _time(prediction: Prediction, report: Report) -> str:
    makespan = prediction.timeline.makespan
    if report.request.rates.known:
        return show_time(makespan)
    return f"{three(makespan)} mean forwards of a rank"


def _memory(report: Report) -> Bars:
    memory, limit = report.prediction.memory, report.request.limit
    name, unit = unit_of([rank.total for rank in memory])
    parts = {
        "weights": [rank.footprint.weights for rank in memory],
        "gradients": [rank.footprint.gradients for rank in memory],
        "optimizer": [rank.footprint.masters + rank.footprint.optimizer for rank in memory],
        "activations": [rank.activations for rank in memory],
        "buffers": [rank.buffers for rank in memory],
    }
    sizes = zip(*parts.values(), strict=True)
    return Bars(
        title="memory of each pipeline rank",
        unit=name,
        parts=tuple(parts),
        rows=[(f"rank {n}", [size / unit for size in rank]) for n, rank in enumerate(sizes)],
        limit=None if limit is None else limit / unit,
        limit_name="device",
    )


def _comparison(report: Report, advice: Advice) -> Table:
    """Return the table of compared schedules; words mark those that the timelines mark."""
    header, *rows = report_text.comparison_table(report)
    marks = [_mark(prediction, report, advice) for prediction in report.compared]
    marked = [number for number, mark in enumerate(marks) if mark]
    cells = [(*row[1:], mark or "") for row, mark in zip(rows, marks, strict=True)]
    return Table("schedules", (*header[1:], ""), cells, marked)

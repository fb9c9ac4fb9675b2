"""A report as pictures show it: timelines with what ranks hold, and tables above them."""

from dataclasses import replace
from typing import Final

from pipemega.pipeline.pictures import Panel, Table
from pipemega.planning.outcome import Outcome
from pipemega.planning.report import Report
from pipemega.planning.text import comparison_table, memory_table, memory_title, stage_table

MEMORY_UNIT: Final = "GB of activations"


def panels_of(report: Report) -> list[Panel]:
    """The schedules that were compared, the quickest first, or the config's own."""
    return [_panel(outcome) for outcome in report.others or (report.outcome,)]


def _panel(outcome: Outcome) -> Panel:
    costs = outcome.costs
    gigabytes = replace(
        costs,
        activation=tuple(size / 1e9 for size in costs.held_after_forward),
        kept=tuple(size / 1e9 for size in costs.held_after_input),
    )
    peak = tuple(size / 1e9 for size in outcome.timeline.peak)
    return Panel(replace(outcome.timeline, peak=peak), costs=gigabytes)


def tables_of(report: Report) -> list[Table]:
    """Stages, memory by rank, and the comparison where there is one."""
    tables = {"stages": stage_table(report), memory_title(report): memory_table(report)}
    if report.others:
        tables["schedules side by side"] = comparison_table(report)
    return [Table(title, header, rows) for title, (header, *rows) in tables.items()]

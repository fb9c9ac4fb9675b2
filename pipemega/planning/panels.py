"""A report as pictures show it: timelines with what ranks hold, and tables above them."""

from collections.abc import Sequence
from dataclasses import replace

from pipemega.pipeline.pictures import Panel, Table
from pipemega.planning.outcome import Outcome
from pipemega.planning.quantities import unit_of
from pipemega.planning.report import Report
from pipemega.planning.text import (
    Rows,
    comparison_table,
    memory_table,
    memory_title,
    stage_table,
    verdict_of,
    what_it_takes,
    what_runs,
)


def panels_of(report: Report) -> tuple[list[Panel], str]:
    """The schedules that were compared, the quickest first, or the config's own; unit of memory."""
    outcomes = report.others or (report.outcome,)
    name, size = unit_of([int(max(outcome.timeline.peak)) for outcome in outcomes])
    return [_panel(outcome, size) for outcome in outcomes], f"{name} of activations"


def _panel(outcome: Outcome, unit: int) -> Panel:
    def scaled(sizes: Sequence[float]) -> tuple[float, ...]:
        return tuple(round(size / unit, 2) for size in sizes)

    costs = replace(
        outcome.costs,
        activation=scaled(outcome.costs.held_after_forward),
        kept=scaled(outcome.costs.held_after_input),
    )
    return Panel(replace(outcome.timeline, peak=scaled(outcome.timeline.peak)), costs=costs)


def tables_of(report: Report, warnings: Sequence[str], best: str | None) -> list[Table]:
    """The report in tables: what runs, stages, memory by rank, the comparison if there is one."""
    lines = [*what_runs(report).items(), *what_it_takes(report).items()]
    lines += [("recommended", best)] if best else []
    lines += [("warning", text) for text in warnings]
    lines += [("note", text) for text in report.notes]
    summary: Rows = [*lines, verdict_of(report)]
    tables: dict[str, Rows] = {
        "": [("", ""), *summary],
        "stages": stage_table(report),
        memory_title(report): memory_table(report),
    }
    if report.others:
        tables["schedules side by side"] = comparison_table(report)
    return [Table(title, header, rows) for title, (header, *rows) in tables.items()]

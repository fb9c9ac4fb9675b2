"""Writes timelines as one self-contained HTML page, without network access or libraries.

The page shows details of a step that is selected by pointer, touch or keyboard: its kind, times,
wait and the memory of its rank. It is assembled from `page.html`, `page.css`, `page_drawing.js` and
`page_interaction.js`; `page_data.panel_data` encodes the steps, `page_intro` the text above them.
"""

import html as escaping
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from pipemega.pipeline.plan.simulate import Timeline
from pipemega.pipeline.visualize import palette
from pipemega.pipeline.visualize.page_data import panel_data
from pipemega.pipeline.visualize.page_intro import Intro, Table, intro_html, table_html
from pipemega.pipeline.visualize.panel import Panel, as_panels
from pipemega.printing import percent

# If there are more panels than this, the page first shows only those with a mark.
_MAX_SHOWN = 4


def html(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory_unit: str = "micro-batches",
    intro: Intro | None = None,
) -> str:
    """Return the page.

    Args:
        shown: one timeline, or panels to draw below each other on one time axis; the page can hide
            each panel.
        measured: the measured timeline of the same plan, drawn below; `shown` is then called
            predicted. Selecting a step also marks it in the other panels.
        unit: of time.
        memory_unit: of memory.
        intro: title, verdict, bars and tables; the table of makespan, bubble and memory follows
            them, or is folded below the timelines if there is a verdict.
    """
    panels = as_panels(shown, measured)
    few = len(panels) <= _MAX_SHOWN or not any(panel.mark for panel in panels)
    data = {
        "unit": unit,
        "memory_unit": memory_unit,
        "kind_names": {kind.value: name for kind, name in palette.ALL_NAMES.items()},
        "phases": palette.PHASE_COLOURS,
        "shades": _shades({panel.num_chunks for panel in panels}),
        "panels": [
            panel_data(panel)
            | {
                "summary": panel.summary(unit),
                "short": name,
                "mark": panel.mark or "",
                "visible": few or bool(panel.mark),
            }
            for panel, name in zip(panels, _names(panels), strict=True)
        ],
    }
    intro = _with_totals(intro or Intro(), panels, unit, memory_unit)
    parts = {
        "title": escaping.escape(intro.title or as_panels(shown)[0].heading),
        "light": palette.LIGHT.variables(),
        "dark": palette.DARK.variables(),
        "style": _asset("page.css"),
        "intro": intro_html(intro),
        "more": "\n".join(
            [_folded(table.title, [table._replace(title="")]) for table in intro.details]
            + [_folded("each rank", [_by_rank(panel, unit, memory_unit) for panel in panels])]
        ),
        # Escaped so that no text in the data can close the script element.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": _asset("page_drawing.js") + _asset("page_interaction.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _with_totals(intro: Intro, panels: Sequence[Panel], unit: str, memory_unit: str) -> Intro:
    """Add the table of the panels."""
    totals = _totals(panels, unit, memory_unit)
    if intro.verdict is None:
        return replace(intro, tables=[*intro.tables, totals])
    totals = totals._replace(title="makespan, bubble and memory of each timeline")
    return replace(intro, details=[*intro.details, totals])


def _folded(title: str, tables: Sequence[Table]) -> str:
    body = "".join(map(table_html, tables))
    return f"<details><summary>{escaping.escape(title)}</summary>{body}</details>"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _shades(chunk_counts: set[int]) -> dict[str, Any]:
    """Return bar and text colours, by colour scheme, number of chunks, kind and chunk."""

    def colours(
        shades: palette.Shades, convert: Callable[[str], str]
    ) -> dict[int, dict[str, list[str]]]:
        return {
            count: {
                kind.value: [
                    convert(palette.shade(kind, chunk, count, shades)) for chunk in range(count)
                ]
                for kind in palette.ALL_NAMES
            }
            for count in chunk_counts
        }

    schemes = {"light": palette.LIGHT.shades, "dark": palette.DARK.shades}
    return {
        scheme: {"fill": colours(shades, str), "text": colours(shades, palette.text_colour)}
        for scheme, shades in schemes.items()
    }


def _names(panels: Sequence[Panel]) -> list[str]:
    """Return the first words of the headings, or the headings if those are not unique."""
    short = [re.split("[,:]", panel.heading, maxsplit=1)[0] for panel in panels]
    return short if len(set(short)) == len(short) else [panel.heading for panel in panels]


def _totals(panels: Sequence[Panel], unit: str, memory_unit: str) -> Table:
    header = ("", f"makespan, {unit}", f"span, {unit}", "bubble", f"peak memory, {memory_unit}")
    rows = [
        (
            name,
            f"{panel.timeline.makespan:.5g}",
            f"{panel.timeline.span:.5g}",
            percent(panel.timeline.bubble),
            f"{max(panel.timeline.peak):.5g}",
        )
        for panel, name in zip(panels, _names(panels), strict=True)
    ]
    marked = [number for number, panel in enumerate(panels) if panel.mark]
    return Table("", header, rows, marked)


def _by_rank(panel: Panel, unit: str, memory_unit: str) -> Table:
    timeline = panel.timeline
    header = ("rank", "stages", f"busy, {unit}", "idle", f"peak memory, {memory_unit}")
    rows = [
        (
            str(rank),
            ", ".join(map(str, timeline.plan.stages_of(rank))),
            f"{timeline.busy(rank):.5g}",
            percent(timeline.bubble_of(rank)),
            f"{timeline.peak[rank]:.5g}",
        )
        for rank in range(timeline.plan.num_ranks)
    ]
    return Table(panel.heading, header, rows)

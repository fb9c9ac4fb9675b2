"""Writes timelines as one self-contained HTML page, without network access or libraries.

The page shows details of a step that is selected by pointer, touch or keyboard: its kind, times,
wait and the memory of its rank. It is assembled from `page.html`, `page.css`, `page_drawing.js` and
`page_interaction.js`; `page_data.panel_data` encodes the steps, `page_intro` the text above them.

Encodes timelines as columns of small integers, the data of the HTML page.

196,608 steps take about four megabytes, a tenth of one JSON object per step. Times and memory are
integer multiples of a tick, the largest tick that keeps seven digits.

What the HTML page shows besides the timelines: verdict, memory bars and tables, as HTML.

Renders timelines as a file of a named format.
"""

import html as escaping
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Final, NamedTuple

from pipemega.pipeline.plan.simulate import Timeline
from pipemega.pipeline.visualize import palette
from pipemega.pipeline.visualize.chrome_trace import chrome_trace
from pipemega.pipeline.visualize.figure import Panel, as_panels, png, svg
from pipemega.printing import percent


def panel_data(panel: Panel) -> dict[str, Any]:
    """Return the data of one panel; steps are ordered by rank.

    title                 heading
    makespan              time from the first to the last step or phase
    outside               for each rank, (name, start, end) of the phases of a measured step
    chunks                maximum number of stages on a rank
    rank_of_stage, chunk_of_stage
    counts                number of steps of each rank
    kinds                 one letter per step
    stages, batches       stage and micro-batch of each step
    tick                  units of time in one tick
    gaps, times           ticks from the end of the previous step of the rank (or time 0) to the
                          start, and ticks from start to end
    waits                 (index of a step, index of the step of another rank that it waited for)
    memory_tick, during, after    memory of the rank during and after each step
    """
    timeline, plan = panel.timeline, panel.timeline.plan
    steps = list(plan.steps())
    position = {step: index for index, step in enumerate(steps)}
    tick, moments = _ticks(
        time - panel.origin
        for rank in range(plan.num_ranks)
        for _, *interval in timeline.steps(rank)
        for time in interval
    )
    memory_tick, held = _ticks(
        value for rank in range(plan.num_ranks) for pair in panel.held(rank) for value in pair
    )
    gaps, first, waits = [], 0, []
    for rank, program in enumerate(plan.programs):
        starts = moments[2 * first : 2 * (first + len(program)) : 2]
        ends = moments[2 * first + 1 : 2 * (first + len(program)) : 2]
        gaps += [start - end for start, end in zip(starts, [0, *ends[:-1]], strict=True)]
        for wait in panel.waits(rank):
            if wait.awaited is not None:
                waits.append((first + wait.at, position[wait.awaited]))
        first += len(program)
    return {
        "title": panel.heading,
        "makespan": panel.length,
        "outside": [
            [(name, start - panel.origin, end - panel.origin) for name, start, end in rank]
            for rank in panel.phases
        ],
        "chunks": panel.num_chunks,
        "rank_of_stage": plan.rank_of_stage,
        "chunk_of_stage": panel.chunk_of_stage,
        "counts": [len(program) for program in plan.programs],
        "kinds": "".join(step.kind.value for step in steps),
        "stages": [step.stage for step in steps],
        "batches": [step.microbatch for step in steps],
        "tick": tick,
        "gaps": gaps,
        "times": [e - s for s, e in zip(moments[::2], moments[1::2], strict=True)],
        "waits": waits,
        "memory_tick": memory_tick,
        "during": held[::2],
        "after": held[1::2],
    }


def _ticks(values: Iterable[float]) -> tuple[float, Sequence[int]]:
    """Return (tick, values in ticks)."""
    values = list(values)
    highest = max(map(abs, values), default=0.0)
    if not highest:
        return 1.0, [0] * len(values)
    fine = 10.0 ** (math.floor(math.log10(highest)) - 6)
    whole = [round(value / fine) for value in values]
    common = math.gcd(*whole) or 1
    return float(f"{fine * common:.12g}"), [number // common for number in whole]


_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?( ?\S{1,3})?")


class Table(NamedTuple):
    """A table of the page; all strings are text, not HTML.

    Args:
        title: shown above the table.
        header: names of the columns.
        rows: each with one cell per column.
        marked: indices of the rows to highlight.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Collection[int] = ()


@dataclass(frozen=True)
class Verdict:
    """The box at the top of the page.

    Args:
        good: whether the answer is yes; None: unknown.
        headline: the answer.
        facts: (name, value) of the numbers that matter most.
        remarks: (name, text) of warnings and suggestions, shown below the facts.
    """

    good: bool | None
    headline: str
    facts: Sequence[tuple[str, str]] = ()
    remarks: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Bars:
    """Stacked horizontal bars on one scale, such as the memory of each rank.

    Args:
        title: shown above the bars, with the unit.
        unit: unit of the values.
        parts: names of the parts of a bar, at most as many as `Theme.parts`.
        rows: (label, value of each part).
        limit: drawn as a line across all bars; the part of a bar above it is hatched.
        limit_name: name of the line.
    """

    title: str
    unit: str
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]
    limit: float | None = None
    limit_name: str = ""


@dataclass(frozen=True)
class Intro:
    """What the page shows besides the timelines.

    Args:
        title: title of the page; None: the heading of the first panel.
        verdict, bars, tables: shown above the timelines, in this order.
        details: tables below the timelines, folded.
    """

    title: str | None = None
    verdict: Verdict | None = None
    bars: Bars | None = None
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()


def intro_html(intro: Intro) -> str:
    """Return verdict, bars and tables as HTML."""
    parts = [verdict_html(intro.verdict)] if intro.verdict else []
    parts += [bars_html(intro.bars)] if intro.bars else []
    return "\n".join([*parts, *map(table_html, intro.tables)])


def verdict_html(verdict: Verdict) -> str:
    """Return the verdict as HTML."""
    style, sign = {True: ("good", "✓ "), False: ("bad", "✗ "), None: ("open", "")}[verdict.good]
    facts = "".join(
        f"<div><dt>{escaping.escape(name)}</dt><dd>{escaping.escape(value)}</dd></div>"
        for name, value in verdict.facts
    )
    remarks = "".join(
        f"<li><b>{escaping.escape(name)}</b> {escaping.escape(text)}</li>"
        for name, text in verdict.remarks
    )
    return (
        f'<div id="verdict" class="{style}"><p>{sign}{escaping.escape(verdict.headline)}</p>'
        f"<dl>{facts}</dl>" + (f"<ul>{remarks}</ul></div>" if remarks else "</div>")
    )


def bars_html(bars: Bars) -> str:
    """Return the bars as an HTML table with one row per bar, and a legend."""
    totals = [sum(values) for _, values in bars.rows]
    scale = 100 / (max([*totals, bars.limit or 0.0]) or 1.0)
    legend = "".join(
        f'<span><i style="background:var(--part{number})"></i>{escaping.escape(name)}</span>'
        for number, name in enumerate(bars.parts)
    )
    line = ""
    if bars.limit is not None:
        name = escaping.escape(f"{bars.limit_name}: {bars.limit:,.2f} {bars.unit}")
        legend += f'<span><i class="limit"></i>{name}</span>'
        line = f'<i class="limit" style="left:{bars.limit * scale:.2f}%"></i>'
    rows = "".join(
        f'<tr><th scope="row">{escaping.escape(label)}</th>'
        f'<td class="track"><div>{_stack(bars, values, scale)}{line}</div></td>'
        f"<td class=n>{total:,.2f} {escaping.escape(bars.unit)}</td></tr>"
        for (label, values), total in zip(bars.rows, totals, strict=True)
    )
    return (
        f"<h3>{escaping.escape(bars.title)}</h3>"
        f'<table class="bars">{rows}</table><p class="legend">{legend}</p>'
    )


def _stack(bars: Bars, values: Sequence[float], scale: float) -> str:
    """Return one bar: a box per part, and a hatched box where it exceeds the limit."""
    boxes, left = [], 0.0
    for number, (name, value) in enumerate(zip(bars.parts, values, strict=True)):
        text = escaping.escape(f"{name}: {value:,.2f} {bars.unit}")
        boxes.append(
            f'<b style="left:{left:.2f}%;width:{value * scale:.2f}%;'
            f'background:var(--part{number})" title="{text}"></b>'
        )
        left += value * scale
    if bars.limit is not None and left > bars.limit * scale:
        start = bars.limit * scale
        boxes.append(f'<b class="over" style="left:{start:.2f}%;width:{left - start:.2f}%"></b>')
    return "".join(boxes)


def table_html(table: Table) -> str:
    """Return the table as HTML; columns of numbers are right-aligned."""
    columns = list(zip(*table.rows, strict=True))
    right = [bool(column) and all(map(_NUMBER.fullmatch, column)) for column in columns]
    right += [False] * (len(table.header) - len(right))

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if is_number else ''}>{escaping.escape(cell)}</{tag}>"
            for cell, is_number in zip(cells, right, strict=True)
        )

    title = f"<h3>{escaping.escape(table.title)}</h3>" if table.title else ""
    body = "".join(
        f"<tr{' class=marked' if number in table.marked else ''}>{row(cells, 'td')}</tr>"
        for number, cells in enumerate(table.rows)
    )
    head = f"<thead><tr>{row(table.header, 'th')}</tr></thead>"
    return f'{title}<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


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
        unit: unit of time.
        memory_unit: unit of memory.
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


# Format -> file extension.
FORMATS: Final = {"png": "png", "svg": "svg", "html": "html", "trace": "trace.json"}


def render(
    form: str,
    panels: Sequence[Panel],
    *,
    unit: str,
    memory_unit: str,
    memory: bool = False,
    dark: bool = False,
    intro: Intro | None = None,
) -> bytes:
    """Return the content of a file that shows `panels`.

    Args:
        form: one of `FORMATS`.
        unit, memory_unit: names of the units of time and memory.
        memory: PNG and SVG: also draw the memory of each rank.
        dark: PNG and SVG: draw on a dark background.
        intro: HTML: title, verdict, bars and tables.

    Raises:
        ConfigError: PNG or SVG, and matplotlib is not installed.
    """
    if form == "png":
        return png(panels, unit=unit, memory=memory, memory_unit=memory_unit, dark=dark)
    if form == "svg":
        text = svg(panels, unit=unit, memory=memory, memory_unit=memory_unit, dark=dark)
    elif form == "html":
        text = html(panels, unit=unit, memory_unit=memory_unit, intro=intro)
    else:
        text = chrome_trace(panels, unit=unit, memory_unit=memory_unit)
    return text.encode()

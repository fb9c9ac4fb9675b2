"""What the HTML page shows besides the timelines: verdict, memory bars and tables, as HTML."""

import html as escaping
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        unit: of the values.
        parts: names of the parts of a bar, at most as many as `Theme.parts`.
        rows: (label, value of each part).
        limit: drawn as a line across all bars; the part of a bar above it is hatched.
        limit_name: of the line.
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
        title: of the page; None: the heading of the first panel.
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

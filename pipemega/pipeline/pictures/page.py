"""Timelines as one page in HTML that needs nothing beside itself: no network, no library.

On the page each step can be pointed at, tapped, or reached by keys, and says what it is, when it
ran, what it waited for and what its rank held then. The page is put together from `page.html`,
`page.css`, `page_draws.js` and `page_acts.js`; the steps are in it as `columns.columns` writes
them.
"""

import html as escaping
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from pipemega.pipeline.pictures.columns import columns
from pipemega.pipeline.pictures.palette import ON_BLACK, ON_WHITE, WORDS, ink, shade
from pipemega.pipeline.pictures.panel import Panel, panels_of
from pipemega.pipeline.simulate import Timeline

_FIGURE = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?( ?\S{1,3})?")


class Table(NamedTuple):
    """A table of a page; its words are text, not HTML.

    Args:
        title: above it.
        header: a word per column.
        rows: as many cells each as the header has words.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def html(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory_unit: str = "micro-batches",
    title: str | None = None,
    tables: Sequence[Table] = (),
) -> str:
    """The page.

    Args:
        shown: a timeline; or panels, one above the other on the same time axis, each with a box
            that hides it.
        measured: what was measured of the same plan, drawn below what was predicted; who points at
            a step in one sees it in the other.
        unit: of time.
        memory_unit: of memory.
        title: of the page; None: the first panel's.
        tables: to stand above the timelines, before the one of makespan, bubble and memory.
    """
    panels = panels_of(shown, measured)
    figures = [*tables, _figures(panels, unit, memory_unit)]
    data = {
        "unit": unit,
        "memory_unit": memory_unit,
        "words": {kind.value: words for kind, words in WORDS.items()},
        "shades": _shades({panel.num_chunks for panel in panels}),
        "panels": [
            columns(panel) | {"figures": panel.figures(unit), "short": name}
            for panel, name in zip(panels, _names(panels), strict=True)
        ],
    }
    parts = {
        "title": escaping.escape(title or panels_of(shown)[0].heading),
        "style": _part("page.css"),
        "tables": "\n".join(map(_table, figures)),
        "more": "\n".join(
            f"<details><summary>{escaping.escape(panel.heading)}, rank by rank</summary>"
            f"{_table(_by_rank(panel, unit, memory_unit))}</details>"
            for panel in panels
        ),
        # Nothing in the data can end the script that it stands in.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": _part("page_draws.js") + _part("page_acts.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _shades(chunks: set[int]) -> dict[str, Any]:
    """Colours and the colours of numbers on them: page, number of chunks, kind, chunk."""
    chosen = {"light": ON_WHITE, "dark": ON_BLACK}
    fill = {
        page: {
            count: {
                kind.value: [shade(kind, chunk, count, shades) for chunk in range(count)]
                for kind in WORDS
            }
            for count in chunks
        }
        for page, shades in chosen.items()
    }
    return {
        page: {
            "fill": by_count,
            "ink": {
                count: {kind: list(map(ink, colours)) for kind, colours in by_kind.items()}
                for count, by_kind in by_count.items()
            },
        }
        for page, by_count in fill.items()
    }


def _names(panels: Sequence[Panel]) -> list[str]:
    """What panels are called where room is short: by the first words that tell them apart."""
    short = [re.split("[,:]", panel.heading, maxsplit=1)[0] for panel in panels]
    return short if len(set(short)) == len(short) else [panel.heading for panel in panels]


def _figures(panels: Sequence[Panel], unit: str, memory_unit: str) -> Table:
    header = ("", f"makespan, {unit}", f"span, {unit}", "bubble", f"held, {memory_unit}")
    rows = [
        (
            name,
            f"{panel.timeline.makespan:.5g}",
            f"{panel.timeline.span:.5g}",
            f"{panel.timeline.bubble:.1%}",
            f"{max(panel.timeline.peak):.5g}",
        )
        for panel, name in zip(panels, _names(panels), strict=True)
    ]
    return Table("", header, rows)


def _by_rank(panel: Panel, unit: str, memory_unit: str) -> Table:
    timeline = panel.timeline
    header = ("rank", "stages", f"works, {unit}", "waits", f"holds at most, {memory_unit}")
    rows = [
        (
            str(rank),
            ", ".join(map(str, timeline.plan.stages_of(rank))),
            f"{timeline.busy(rank):.5g}",
            f"{timeline.bubble_of(rank):.1%}",
            f"{timeline.peak[rank]:.5g}",
        )
        for rank in range(timeline.plan.num_ranks)
    ]
    return Table("", header, rows)


def _table(table: Table) -> str:
    """In HTML, columns of figures to the right."""
    columns = list(zip(*table.rows, strict=True))
    right = [bool(column) and all(map(_FIGURE.fullmatch, column)) for column in columns]
    right += [False] * (len(table.header) - len(right))

    def row(cells: Sequence[str], tag: str) -> str:
        marked = zip(cells, right, strict=True)
        return "".join(
            f"<{tag}{' class=n' if figure else ''}>{escaping.escape(cell)}</{tag}>"
            for cell, figure in marked
        )

    title = f"<h3>{escaping.escape(table.title)}</h3>" if table.title else ""
    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    head = f"<thead><tr>{row(table.header, 'th')}</tr></thead>"
    return f'{title}<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'

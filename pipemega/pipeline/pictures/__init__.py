"""Timelines as pictures: PNG, SVG, a page in HTML, a Chrome trace.

    png(timeline)                                   the bytes of a file, as for PIL.Image.open
    png(predicted, measured=measured, unit="ms")    one above the other, on the same time axis
    svg([Panel(a), Panel(b)], memory=True)          several schedules, with what ranks hold
    html(timeline, title="plan", tables=[Table(...)])
    trace(measured, unit="s")                       for ui.perfetto.dev

PNG and SVG need matplotlib, `pip install 'pipemega[pictures]'`; the others nothing. None of them
needs torch, a screen, or a network.
"""

from pipemega.pipeline.pictures.figure import png, svg
from pipemega.pipeline.pictures.page import Table, html
from pipemega.pipeline.pictures.panel import Panel
from pipemega.pipeline.pictures.trace import trace

__all__ = ["Panel", "Table", "html", "png", "svg", "trace"]

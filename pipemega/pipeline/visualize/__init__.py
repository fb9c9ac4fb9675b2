"""Draws timelines as PNG, SVG, an HTML page or a Chrome trace.

    png(timeline)                                   bytes of a PNG file
    png(predicted, measured=measured, unit="ms")    both timelines on one time axis
    svg([Panel(a), Panel(b)], memory=True)          several schedules, with the memory of each rank
    svg(timeline, dark=True)                        for a dark page
    html(timeline, intro=Intro("plan", verdict=Verdict(...), tables=[Table(...)]))
    chrome_trace(measured, unit="s")                for ui.perfetto.dev
    render("svg", panels, unit="ms", memory_unit="GB")    the format by name

PNG and SVG need matplotlib (`pip install -e '.[pictures]'`). The package needs neither torch, a
display nor a network.
"""

from pipemega.pipeline.visualize.chrome_trace import chrome_trace
from pipemega.pipeline.visualize.figure import Panel, png, svg
from pipemega.pipeline.visualize.page import FORMATS, Bars, Intro, Table, Verdict, html, render

__all__ = [
    "FORMATS",
    "Bars",
    "Intro",
    "Panel",
    "Table",
    "Verdict",
    "chrome_trace",
    "html",
    "png",
    "render",
    "svg",
]

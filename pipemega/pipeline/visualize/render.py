"""Renders timelines as a file of a named format."""

from collections.abc import Sequence
from typing import Final

from pipemega.pipeline.visualize.chrome_trace import chrome_trace
from pipemega.pipeline.visualize.figure import Panel, png, svg
from pipemega.pipeline.visualize.page import Intro, html

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

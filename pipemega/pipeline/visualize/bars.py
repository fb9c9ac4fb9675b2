"""Draws the bars, numbers and memory of a panel into matplotlib axes."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.visualize.palette import PHASE_COLOURS, Theme, shade, text_colour
from pipemega.pipeline.visualize.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Width of a digit of DejaVu Sans, relative to the font size.
_DIGIT: Final = 0.64
# With more steps than this, numbers are too small to read, and an SVG with one element per bar is
# too large for a browser.
_MAX_NUMBERS: Final = 4000
_MAX_BARS: Final = 10000
# Up to this many ranks, memory is an area per rank with its peak; for more, a row of grey shades.
_MAX_AREAS: Final = 16
_HALF = 0.43  # half of the height of a bar, in rows

Bar = tuple[float, float, int]  # start, end, rank


def median_step_time(panel: Panel) -> float:
    """Return the median time of the steps."""
    rows = zip(panel.timeline.start, panel.timeline.end, strict=True)
    return float(np.median(np.concatenate([np.subtract(end, start) for start, end in rows])))


def draw_bars(
    axes: "Axes", panel: Panel, theme: Theme, number: int, points: float, row: float
) -> None:
    """Draw a bar for every step, and its micro-batch number if there is space to read it.

    Args:
        number: index of the panel, for the ids of the groups of bars.
        points: points per unit of time.
        row: height of a rank, in points.
    """
    from matplotlib.collections import PolyCollection

    timeline, plan = panel.timeline, panel.timeline.plan
    bars: dict[tuple[str, int], list[Bar]] = defaultdict(list)
    for rank in range(plan.num_ranks):
        for step, start, end in timeline.steps(rank):
            colour = (step.kind.value, panel.chunk_of_stage[step.stage])
            bars[colour].append((start - panel.origin, end - panel.origin, rank))
    count = sum(map(len, bars.values()))
    edge = 0.5 if median_step_time(panel) * points > 3 and row > 5 else 0.0
    _draw_idle(axes, panel, theme)
    _draw_phases(axes, panel, number)
    for (kind, chunk), same_colour in sorted(bars.items()):
        collection = PolyCollection(
            _rectangles(same_colour, _HALF if row > 5 else 0.5),
            facecolors=shade(Kind(kind), chunk, panel.num_chunks, theme.shades),
            edgecolors=theme.background if edge else "none",
            linewidths=edge,
            rasterized=count > _MAX_BARS,
            clip_on=False,
            gid=f"bars-{number}-{kind}-{chunk}",
        )
        axes.add_collection(collection)
    if count <= _MAX_NUMBERS:
        _draw_numbers(axes, panel, theme, points, row)


def _draw_idle(axes: "Axes", panel: Panel, theme: Theme) -> None:
    """Draw the background of the bars: where it is visible, the rank is idle."""
    rows = range(panel.timeline.plan.num_ranks)
    bars = [(0.0, panel.length, rank) for rank in rows]
    _fill(axes, _rectangles(bars, _HALF), theme.idle, "idle")


def _draw_phases(axes: "Axes", panel: Panel, number: int) -> None:
    """Draw the phases of a measured step around its pipeline."""
    bars: dict[str, list[Bar]] = defaultdict(list)
    for rank, phases in enumerate(panel.phases):
        for name, start, end in phases:
            bars[name].append((start - panel.origin, end - panel.origin, rank))
    for name, same_name in bars.items():
        gid = f"phases-{number}-{name.replace(' ', '-')}"
        _fill(axes, _rectangles(same_name, _HALF), PHASE_COLOURS[name], gid)


def _fill(axes: "Axes", polygons: Any, colour: str, gid: str) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(
        PolyCollection(polygons, facecolors=colour, linewidths=0, clip_on=False, gid=gid)
    )


def _rectangles(bars: Sequence[Bar], half: float) -> Any:
    left, right, rank = np.array(bars, dtype=float).T
    x = np.stack([left, left, right, right], axis=1)
    y = np.stack([rank - half, rank + half, rank + half, rank - half], axis=1)
    return np.stack([x, y], axis=2)  # [bars, corner, xy]


def _draw_numbers(axes: "Axes", panel: Panel, theme: Theme, points: float, row: float) -> None:
    """Write the micro-batch numbers in one size that fits the median step; none if too small."""
    widest = _DIGIT * len(str(panel.timeline.plan.num_microbatches - 1))
    size = min(8.0, 0.6 * row, (median_step_time(panel) * points - 1) / widest)
    if size < 4.2:
        return
    for rank in range(panel.timeline.plan.num_ranks):
        for step, start, end in panel.timeline.steps(rank):
            text = str(step.microbatch)
            if _DIGIT * size * len(text) > (end - start) * points:
                continue
            bar = shade(step.kind, panel.chunk_of_stage[step.stage], panel.num_chunks, theme.shades)
            middle = (start + end) / 2 - panel.origin
            colour = text_colour(bar)
            axes.text(middle, rank + 0.04, text, size=size, ha="center", va="center", color=colour)


def draw_memory(axes: "Axes", panel: Panel, theme: Theme, unit: str) -> None:
    """Draw the memory of each rank over time, scaled to the highest peak."""
    ranks = panel.timeline.plan.num_ranks
    profiles = [_profile(panel, rank) for rank in range(ranks)]
    peaks = [float(held.max()) for _, held in profiles]
    highest = max(peaks) or 1.0
    scale = ""
    if ranks <= _MAX_AREAS:
        _draw_areas(axes, panel, theme, profiles, highest)
        for rank, peak in enumerate(peaks):
            end = panel.length
            axes.annotate(
                f"{peak:.3g}", (end, rank), (3, 0), textcoords="offset points", size=8, va="center"
            )
    else:
        _draw_shades(axes, panel, theme, profiles, highest)
        scale = "; higher contrast: more memory"
    axes.set_title(f"memory ({unit}){scale}", loc="left", fontsize=9, pad=4)
    axes.set_title(f"peak {highest:.4g}", loc="right", fontsize=9, pad=4)


def _profile(panel: Panel, rank: int) -> tuple[Any, Any]:
    """Return (times at which the memory changes, memory from each time on), from time 0."""
    times, held = [0.0], [0.0]
    steps = panel.timeline.steps(rank)
    for (_, start, end), (during, after) in zip(steps, panel.held(rank), strict=True):
        times += [start - panel.origin, end - panel.origin]
        held += [during, after]
    return np.array(times), np.array(held)


def _draw_areas(axes: "Axes", panel: Panel, theme: Theme, profiles: Any, highest: float) -> None:
    areas = []
    for rank, (times, held) in enumerate(profiles):
        x = np.repeat(np.append(times, panel.length), 2)[1:-1]
        y = np.repeat(held, 2)
        x, y = np.concatenate([x[:1], x, x[-1:]]), np.concatenate([[0.0], y, [0.0]])
        areas.append(np.stack([x, rank + _HALF - 2 * _HALF * y / highest], axis=1))
    _draw_idle(axes, panel, theme)
    _fill(axes, areas, theme.memory, "memory")


def _draw_shades(axes: "Axes", panel: Panel, theme: Theme, profiles: Any, highest: float) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    makespan = panel.length
    pixels = (np.arange(2000) + 0.5) * makespan / 2000
    held = [held[np.searchsorted(times, pixels, "right") - 1] for times, held in profiles]
    axes.imshow(
        np.array(held),  # [rank, pixel]
        extent=(0, makespan, len(held) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        cmap=LinearSegmentedColormap.from_list("held", [theme.idle, theme.text]),
        vmin=0,
        vmax=highest,
        gid="memory",
    )

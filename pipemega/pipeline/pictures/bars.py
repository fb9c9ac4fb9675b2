"""What is drawn into the axes of a panel: bars, numbers, memory."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.pictures.palette import ink, shade
from pipemega.pipeline.pictures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDLE: Final = "#eef0f3"
_HELD: Final = "#6b7a8f"
# A digit of DejaVu Sans is this wide, in units of the size of the font.
_DIGIT: Final = 0.64
# Beyond these, numbers would be specks, and an SVG of single bars too large for a browser.
_MOST_NUMBERS: Final = 4000
_MOST_BARS: Final = 10000
# Up to here, each rank's memory is an area with its peak beside it; of more ranks, a row of grey.
_MOST_AREAS: Final = 16
_HALF = 0.43  # of a bar's height, in rows

Place = tuple[float, float, int]  # from, to, rank


def usual_time(panel: Panel) -> float:
    """The median of the steps' times."""
    rows = zip(panel.timeline.start, panel.timeline.end, strict=True)
    return float(np.median(np.concatenate([np.subtract(end, start) for start, end in rows])))


def draw_bars(axes: "Axes", panel: Panel, number: int, points: float, row: float) -> None:
    """A bar for every step, those of one colour together, and a number where it can be read.

    Args:
        number: of the panel, for the ids of groups.
        points: per unit of time.
        row: height of a rank, in points.
    """
    from matplotlib.collections import PolyCollection

    timeline, plan = panel.timeline, panel.timeline.plan
    bars: dict[tuple[str, int], list[Place]] = defaultdict(list)
    for rank in range(plan.num_ranks):
        for step, start, end in timeline.steps(rank):
            colour = (step.kind.value, panel.chunk_of_stage[step.stage])
            bars[colour].append((start - panel.origin, end - panel.origin, rank))
    count = sum(map(len, bars.values()))
    edge = 0.5 if usual_time(panel) * points > 3 and row > 5 else 0.0
    _draw_idle(axes, panel)
    for (kind, chunk), places in sorted(bars.items()):
        collection = PolyCollection(
            _rectangles(places, _HALF if row > 5 else 0.5),
            facecolors=shade(Kind(kind), chunk, panel.num_chunks),
            edgecolors="white" if edge else "none",
            linewidths=edge,
            rasterized=count > _MOST_BARS,
            clip_on=False,
            gid=f"bars-{number}-{kind}-{chunk}",
        )
        axes.add_collection(collection)
    if count <= _MOST_NUMBERS:
        _draw_numbers(axes, panel, points, row)


def _draw_idle(axes: "Axes", panel: Panel) -> None:
    """The ground that bars stand on: where it is seen, a rank waits."""
    from matplotlib.collections import PolyCollection

    rows = range(panel.timeline.plan.num_ranks)
    places = [(0.0, panel.timeline.makespan, rank) for rank in rows]
    axes.add_collection(
        PolyCollection(
            _rectangles(places, _HALF), facecolors=IDLE, linewidths=0, clip_on=False, gid="idle"
        )
    )


def _rectangles(places: Sequence[Place], half: float) -> Any:
    left, right, rank = np.array(places, dtype=float).T
    x = np.stack([left, left, right, right], axis=1)
    y = np.stack([rank - half, rank + half, rank + half, rank - half], axis=1)
    return np.stack([x, y], axis=2)  # [bars, corner, xy]


def _draw_numbers(axes: "Axes", panel: Panel, points: float, row: float) -> None:
    """Micro-batches, all in one size, at which the longest fits the usual step; or none."""
    widest = _DIGIT * len(str(panel.timeline.plan.num_microbatches - 1))
    size = min(8.0, 0.6 * row, (usual_time(panel) * points - 1) / widest)
    if size < 4.2:
        return
    for rank in range(panel.timeline.plan.num_ranks):
        for step, start, end in panel.timeline.steps(rank):
            text = str(step.microbatch)
            if _DIGIT * size * len(text) > (end - start) * points:
                continue
            colour = ink(shade(step.kind, panel.chunk_of_stage[step.stage], panel.num_chunks))
            middle = (start + end) / 2 - panel.origin
            axes.text(middle, rank + 0.04, text, size=size, ha="center", va="center", color=colour)


def draw_memory(axes: "Axes", panel: Panel, unit: str) -> None:
    """What each rank holds over time, on the scale of the one that holds most."""
    ranks = panel.timeline.plan.num_ranks
    profiles = [_profile(panel, rank) for rank in range(ranks)]
    peaks = [float(held.max()) for _, held in profiles]
    highest = max(peaks) or 1.0
    scale = ""
    if ranks <= _MOST_AREAS:
        _draw_areas(axes, panel, profiles, highest)
        for rank, peak in enumerate(peaks):
            end = panel.timeline.makespan
            axes.annotate(
                f"{peak:.3g}", (end, rank), (3, 0), textcoords="offset points", size=8, va="center"
            )
    else:
        _draw_greys(axes, panel, profiles, highest)
        scale = ", the darker the more"
    axes.set_title(f"memory held ({unit}){scale}", loc="left", fontsize=9, pad=4)
    axes.set_title(f"at most {highest:.4g}", loc="right", fontsize=9, pad=4)


def _profile(panel: Panel, rank: int) -> tuple[Any, Any]:
    """(when what is held changes, what is held from then on), from time 0."""
    times, held = [0.0], [0.0]
    steps = panel.timeline.steps(rank)
    for (_, start, end), (during, after) in zip(steps, panel.held(rank), strict=True):
        times += [start - panel.origin, end - panel.origin]
        held += [during, after]
    return np.array(times), np.array(held)


def _draw_areas(axes: "Axes", panel: Panel, profiles: Any, highest: float) -> None:
    from matplotlib.collections import PolyCollection

    areas = []
    for rank, (times, held) in enumerate(profiles):
        x = np.repeat(np.append(times, panel.timeline.makespan), 2)[1:-1]
        y = np.repeat(held, 2)
        x, y = np.concatenate([x[:1], x, x[-1:]]), np.concatenate([[0.0], y, [0.0]])
        areas.append(np.stack([x, rank + _HALF - 2 * _HALF * y / highest], axis=1))
    _draw_idle(axes, panel)
    axes.add_collection(
        PolyCollection(areas, facecolors=_HELD, linewidths=0, clip_on=False, gid="memory")
    )


def _draw_greys(axes: "Axes", panel: Panel, profiles: Any, highest: float) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    makespan = panel.timeline.makespan
    moments = (np.arange(2000) + 0.5) * makespan / 2000
    held = [held[np.searchsorted(times, moments, "right") - 1] for times, held in profiles]
    axes.imshow(
        np.array(held),  # [rank, moment]
        extent=(0, makespan, len(held) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        cmap=LinearSegmentedColormap.from_list("held", [IDLE, "#2b3545"]),
        vmin=0,
        vmax=highest,
        gid="memory",
    )

"""Draws timelines with matplotlib: PNG and SVG.

Ranks from top to bottom, time from left to right, all panels on one time axis. Below each panel,
on request, the memory of each rank over time. Sizes are in inches, as in matplotlib.

Draws the bars, numbers and memory of a panel into matplotlib axes.

One timeline to draw: from time 0, with the waits and the memory of each rank.

Reduces an SVG file of matplotlib to about 40% of its size without a visible change.
"""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from pipemega.errors import ConfigError
from pipemega.monitor.timers import Phase, PhasesByRank
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.plan.simulate import CostModel, MemorySpan, Timeline, memory_spans
from pipemega.pipeline.visualize.palette import (
    ALL_NAMES,
    DARK,
    LIGHT,
    PHASE_COLOURS,
    Theme,
    shade,
    text_colour,
)
from pipemega.printing import counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Wait(NamedTuple):
    """Idle time of a rank before one of its steps.

    Args:
        at: index of the step in the program of its rank.
        time: from the end of the previous step, or from time 0, to the start of the step.
        awaited: the step of another rank whose result was awaited; None if the rank waited for no
            other rank.
    """

    at: int
    time: float
    awaited: Instruction | None


@dataclass(frozen=True)
class Panel:
    """A timeline with its title and memory costs.

    Args:
        timeline: simulated or measured; drawn from its first step on.
        title: None: name and sizes of the schedule.
        costs: memory costs of the stages; None: a micro-batch takes 1 on each rank, divided evenly
            among the stages of the rank.
        phases: for each rank, the phases of a measured step outside of its pipeline.
        mark: words that distinguish the panel from others, such as "chosen"; None: no mark.
    """

    timeline: Timeline
    title: str | None = None
    costs: CostModel | None = None
    mark: str | None = None
    phases: PhasesByRank = ()

    @property
    def heading(self) -> str:
        plan = self.timeline.plan
        if self.title is not None:
            return self.title
        return (
            f"{plan.name}, {counted(plan.num_ranks, 'rank')}, "
            f"{counted(plan.num_microbatches, 'micro-batch', 'es')}"
        )

    @cached_property
    def origin(self) -> float:
        """Start of the first step or phase: a measured clock may start at any number."""
        return min((start for start, _ in self._intervals()), default=0.0)

    @cached_property
    def length(self) -> float:
        """Time from the start of the first step or phase to the end of the last."""
        return max((end for _, end in self._intervals()), default=0.0) - self.origin

    def _intervals(self) -> Iterator[tuple[float, float]]:
        """Yield (start of the first step, end of the last step) of each rank, and the phases."""
        timeline = self.timeline
        yield from ((a[0], b[-1]) for a, b in zip(timeline.start, timeline.end, strict=True) if a)
        yield from ((phase.start, phase.end) for rank in self.phases for phase in rank)

    @cached_property
    def chunk_of_stage(self) -> tuple[int, ...]:
        """For each stage, its index among the stages of its rank."""
        plan = self.timeline.plan
        chunks = [0] * plan.num_stages
        for rank in range(plan.num_ranks):
            for chunk, stage in enumerate(plan.stages_of(rank)):
                chunks[stage] = chunk
        return tuple(chunks)

    @property
    def num_chunks(self) -> int:
        """The maximum number of stages on a rank."""
        return 1 + max(self.chunk_of_stage)

    def waits(self, rank: int) -> list[Wait]:
        """Return the waits of `rank` in order."""
        plan, timeline = self.timeline.plan, self.timeline
        found, starts = [], timeline.start[rank]
        before = [p.end for p in self.phases_of(rank) if starts and p.end <= starts[0]]
        free = max(before, default=self.origin)
        for at, (step, start, end) in enumerate(timeline.steps(rank)):
            if start > free:
                found.append(Wait(at, start - free, plan.remote_need(step)))
            free = max(free, end)
        return found

    def phases_of(self, rank: int) -> Sequence[Phase]:
        return self.phases[rank] if self.phases else ()

    def held(self, rank: int) -> list[MemorySpan]:
        """Return the memory of `rank` for each of its steps."""
        plan = self.timeline.plan
        costs = self.costs or CostModel.from_rank_costs(plan.rank_of_stage)
        return list(memory_spans(plan.programs[rank], costs, plan.forward_only))

    def summary(self, unit: str) -> str:
        """Return makespan and bubble, the text next to the title."""
        timeline = self.timeline
        step = f"step {self.length:.4g} {unit}, " if self.phases else ""
        return f"{step}makespan {timeline.makespan:.4g} {unit}, bubble {percent(timeline.bubble)}"


def as_panels(
    shown: Timeline | Panel | Sequence[Panel], measured: Timeline | None = None
) -> tuple[Panel, ...]:
    """Return the arguments of a drawing function as panels.

    Args:
        shown: one timeline, or panels.
        measured: the measured timeline of the same plan; the first panel is then called predicted.
    """
    if isinstance(shown, Timeline):
        shown = Panel(shown)
    panels = (shown,) if isinstance(shown, Panel) else tuple(shown)
    if measured is None:
        return panels
    heading, costs = panels[0].heading, panels[0].costs
    return (
        Panel(panels[0].timeline, f"predicted: {heading}", costs),
        *panels[1:],
        Panel(measured, f"measured: {heading}", costs),
    )


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
        _fill(
            axes,
            _rectangles(same_colour, _HALF if row > 5 else 0.5),
            shade(Kind(kind), chunk, panel.num_chunks, theme.shades),
            f"bars-{number}-{kind}-{chunk}",
            edgecolors=theme.background if edge else "none",
            linewidths=edge,
            rasterized=count > _MAX_BARS,
        )
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


def _fill(axes: "Axes", polygons: Any, colour: str, gid: str, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    style = {"linewidths": 0, **style}
    axes.add_collection(
        PolyCollection(polygons, facecolors=colour, clip_on=False, gid=gid, **style)
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


_TAG = re.compile(r"<[^>]+>")
_STYLE_ATTRIBUTE = re.compile(r' style="([^"]*)"')
_NUMBER = re.compile(r"-?\d+\.\d+")
# matplotlib writes unrotated text with a rotation by -0 degrees.
_UPRIGHT = re.compile(r' transform="rotate\(-?0 [^)]*\)"')
# A rectangle; each of its corners shares a coordinate with the next.
_RECTANGLE = re.compile(r'"M (\S+) (\S+) L \1 (\S+) L (\S+) \3 L \4 \2 z ?"')
_TEXT_GROUP = re.compile(r'<g id="text_\d+">\s*(<text[^>]*>[^<]*</text>)\s*</g>')


def minify(svg: str) -> str:
    """Replace repeated styles by classes, shorten rectangles, round coordinates to 0.01 points.

    Only tags change. The text between them stays as it is.
    """
    head, body = svg.split("</style>", 1)
    names: dict[str, str] = {}

    def named(style: re.Match[str]) -> str:
        return f' class="{names.setdefault(style[1], f"c{len(names)}")}"'

    def rounded(number: re.Match[str]) -> str:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    def shorter(tag: re.Match[str]) -> str:
        text = _STYLE_ATTRIBUTE.sub(named, _UPRIGHT.sub("", tag[0]))
        text = _NUMBER.sub(rounded, " ".join(text.split()))
        return _RECTANGLE.sub(r'"M\1 \2V\3H\4V\2z"', text)

    body = _TEXT_GROUP.sub(r"\1", _TAG.sub(shorter, body))
    body = re.sub(r">\s+<", ">\n<", body)
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return f"{head}{rules}</style>{body}"


# Columns of steps of a readable picture. A longer timeline is drawn up to this column.
_MOST_COLUMNS: Final = 240
_LEFT, _RIGHT, _TITLE, _GAP, _FOOT = 0.72, 0.4, 0.3, 0.12, 0.66
_TEXTS: Final = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE: Final[dict[str, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.linewidth": 0.6,
    # Keep text as text: the files are smaller, and text can be searched and selected.
    "svg.fonttype": "none",
    # Dollar signs in a title are not math.
    "text.parse_math": False,
    # Equal input gives an equal file.
    "svg.hashsalt": "pipemega",
}


def png(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory: bool = False,
    memory_unit: str = "micro-batches",
    dark: bool = False,
    dpi: int = 160,
) -> bytes:
    """Return the content of a PNG file.

    Args:
        shown: one timeline, or panels to draw below each other on one time axis.
        measured: the measured timeline of the same plan, drawn below; `shown` is then called
            predicted.
        unit: unit of time, for the label of the axis.
        memory: also draw the memory of each rank over time.
        memory_unit: unit of memory.
        dark: draw on a dark background, else on a white one.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    panels, drawn = as_panels(shown, measured), memory_unit if memory else None
    return _save(panels, unit, drawn, DARK if dark else LIGHT, "png", dpi)


def svg(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory: bool = False,
    memory_unit: str = "micro-batches",
    dark: bool = False,
) -> str:
    """Return the content of an SVG file; equal input gives equal text.

    Arguments and errors are the same as in `png`. The bars of one colour are a group whose id names
    panel, kind and chunk, as in `bars-0-F-0`. More than 10,000 bars are embedded as an image.
    """
    panels, drawn = as_panels(shown, measured), memory_unit if memory else None
    return minify(_save(panels, unit, drawn, DARK if dark else LIGHT, "svg", 200).decode())


def _save(
    panels: Sequence[Panel],
    unit: str,
    memory_unit: str | None,
    theme: Theme,
    form: str,
    dpi: int,
) -> bytes:
    return saved(lambda: draw_figure(panels, unit, memory_unit, theme), theme, form, dpi)


def saved(draw: "Callable[[], Figure]", theme: Theme, form: str, dpi: int) -> bytes:
    """Return the file with the figure that `draw` returns.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(
            "PNG and SVG need matplotlib, which is not installed: run pip install "
            "-e '.[pictures]', or use html, which needs no package"
        ) from error
    left_out = ("Date", "Creator", "Format", "Type") if form == "svg" else ("Software",)
    metadata, file = dict.fromkeys(left_out), io.BytesIO()
    colours = dict.fromkeys(_TEXTS, theme.text)
    with rc_context(dict[Any, Any](_STYLE | colours)):
        draw().savefig(file, format=form, dpi=dpi, facecolor=theme.background, metadata=metadata)
    return file.getvalue()


def draw_figure(
    panels: Sequence[Panel],
    unit: str = "units",
    memory_unit: str | None = None,
    theme: Theme = LIGHT,
) -> "Figure":
    """Return the figure, which the caller can change before saving it.

    Args:
        memory_unit: None: do not draw memory.
    """
    from matplotlib.figure import Figure

    width = _width(panels)
    blocks = list(_blocks(panels, memory_unit))
    height = sum(_TITLE + size + _GAP for _, _, size in blocks) + _FOOT
    figure = Figure(figsize=(width, height))
    whole = max(panel.length for panel in panels) or 1.0
    longest = min(whole, _MOST_COLUMNS * (max(map(median_step_time, panels)) or whole))
    points = 72 * (width - _LEFT - _RIGHT) / longest  # per unit of time
    top = height
    for number, panel, size in blocks:
        top -= _TITLE + size
        box = (_LEFT / width, top / height, 1 - (_LEFT + _RIGHT) / width, size / height)
        axes = figure.add_axes(box)
        _frame(axes, panel, longest)
        if number is None:
            draw_memory(axes, panel, theme, str(memory_unit))
        else:
            row = 72 * size / panel.timeline.plan.num_ranks
            draw_bars(axes, panel, theme, number, points, row)
            title = f"{panel.heading} ({panel.mark})" if panel.mark else panel.heading
            colour = theme.mark if panel.mark else theme.text
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=colour, pad=4)
            axes.set_title(panel.summary(unit), loc="right", fontsize=9, pad=4)
        top -= _GAP
    axes.tick_params("x", labelbottom=True, length=3, width=0.6)
    part = ""
    if longest < whole:
        part = f"; drawn: the first {longest:.4g} of {whole:.4g}; --format html shows all of it"
        for artist in (a for each in figure.axes for a in (*each.collections, *each.texts)):
            artist.set_clip_on(True)
    axes.set_xlabel(f"time ({unit}){part}", labelpad=2)
    _draw_legend(figure, panels, theme)
    return figure


def _width(panels: Sequence[Panel]) -> float:
    """Return a width, 10 to 20, with space for the numbers of the panel with the most columns."""
    columns = 0.0
    for panel in panels:
        step = median_step_time(panel)
        columns = max(columns, panel.length / step if step else 0.0)
    return min(20.0, max(10.0, _LEFT + _RIGHT + 0.13 * columns))


def _blocks(
    panels: Sequence[Panel], memory_unit: str | None
) -> Iterator[tuple[int | None, Panel, float]]:
    """Yield (index of the panel, None for its memory; panel; height) from top to bottom."""
    for number, panel in enumerate(panels):
        ranks = panel.timeline.plan.num_ranks
        row = 0.26 if ranks <= 8 else max(0.06, 2.1 / ranks, min(0.2, 4.0 / ranks))
        yield number, panel, row * ranks
        if memory_unit is not None:
            yield None, panel, row * ranks


def _frame(axes: "Axes", panel: Panel, longest: float) -> None:
    """Set up axes with rank labels and no frame."""
    ranks = panel.timeline.plan.num_ranks
    every = 1 if ranks <= 16 else 8
    axes.patch.set_visible(False)  # the background of the figure is enough
    axes.set_xlim(0, longest)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(0, ranks, every), [f"rank {r}" for r in range(0, ranks, every)])
    axes.tick_params("y", length=0, labelsize=8)
    axes.tick_params("x", length=0, labelbottom=False, labelsize=8)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: "Figure", panels: Sequence[Panel], theme: Theme) -> None:
    """Draw a legend with one entry per kind, showing the shades of its chunks."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    present = {step.kind for panel in panels for step in panel.timeline.plan.steps()}
    chunks = max(panel.num_chunks for panel in panels)
    shades = range(chunks) if chunks <= 4 else (0, chunks // 2, chunks - 1)
    kinds = [kind for kind in ALL_NAMES if kind in present]
    handles: list[Any] = [
        tuple(Patch(color=shade(k, c, chunks, theme.shades)) for c in shades) for k in kinds
    ]
    labels = [f"{kind.value} {ALL_NAMES[kind]}" for kind in kinds]
    named = {phase.name for panel in panels for rank in panel.phases for phase in rank}
    phases = [name for name in PHASE_COLOURS if name in named]
    handles += [(Patch(color=PHASE_COLOURS[name]),) for name in phases]
    handles.append((Patch(color=theme.idle),))
    labels += [*phases, "idle"]
    width, height = figure.get_figwidth(), figure.get_figheight()
    note = "shades: first to last stage of the rank" if chunks > 1 else ""
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(_LEFT / width - 0.005, 0),
        ncols=len(labels),
        frameon=False,
        fontsize=8,
        handlelength=1.2 if phases else 2.2,
        columnspacing=1.0 if phases else 1.6,
    )
    figure.text(1 - _RIGHT / width, 0.13 / height, note, size=8, ha="right")

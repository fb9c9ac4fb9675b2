"""Draws timelines with matplotlib: PNG and SVG.

Ranks from top to bottom, time from left to right, all panels on one time axis. Below each panel,
on request, the memory of each rank over time. Sizes are in inches, as in matplotlib.
"""

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pipemega.errors import ConfigError
from pipemega.pipeline.plan.simulate import Timeline
from pipemega.pipeline.visualize.bars import draw_bars, draw_memory, median_step_time
from pipemega.pipeline.visualize.palette import ALL_NAMES, DARK, LIGHT, PHASE_COLOURS, Theme, shade
from pipemega.pipeline.visualize.panel import Panel, as_panels
from pipemega.pipeline.visualize.svg_minify import minify

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        unit: of time, for the label of the axis.
        memory: also draw the memory of each rank over time.
        memory_unit: of memory.
        dark: draw on a dark background, else on a white one.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    panels = as_panels(shown, measured)
    theme = DARK if dark else LIGHT
    return _save(panels, unit, memory_unit if memory else None, theme, "png", dpi)


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

    Arguments and errors are those of `png`. The bars of one colour are a group whose id names
    panel, kind and chunk, as in `bars-0-F-0`. More than 10,000 bars are embedded as an image.
    """
    panels = as_panels(shown, measured)
    theme = DARK if dark else LIGHT
    return minify(_save(panels, unit, memory_unit if memory else None, theme, "svg", 200).decode())


def _save(
    panels: Sequence[Panel],
    unit: str,
    memory_unit: str | None,
    theme: Theme,
    form: str,
    dpi: int,
) -> bytes:
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
        figure = draw_figure(panels, unit, memory_unit, theme)
        figure.savefig(file, format=form, dpi=dpi, facecolor=theme.background, metadata=metadata)
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

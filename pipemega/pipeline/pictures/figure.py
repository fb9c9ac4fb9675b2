"""Timelines as a figure of matplotlib: PNG and SVG.

Ranks down, time across, all panels on one time axis; below, on request, what each rank holds over
time. Sizes are in inches, as matplotlib counts.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pipemega.errors import ConfigError
from pipemega.pipeline.pictures.bars import IDLE, draw_bars, draw_memory, usual_time
from pipemega.pipeline.pictures.palette import WORDS, shade
from pipemega.pipeline.pictures.panel import Panel, panels_of
from pipemega.pipeline.pictures.smaller import smaller
from pipemega.pipeline.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _RIGHT, _TITLE, _GAP, _FOOT = 0.72, 0.4, 0.3, 0.12, 0.66
_TEXT = "#15181d"
_STYLE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
        "font.size": 9,
        "text.color": _TEXT,
        "axes.linewidth": 0.6,
        # Text stays text: smaller files, and a reader can search and select it.
        "svg.fonttype": "none",
        # A title is a title, dollar signs and all.
        "text.parse_math": False,
        # The same picture gives the same file.
        "svg.hashsalt": "pipemega",
    }
)


def png(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory: bool = False,
    memory_unit: str = "micro-batches",
    dpi: int = 160,
) -> bytes:
    """The picture as a PNG file, on white.

    Args:
        shown: a timeline; or panels, one above the other on the same time axis.
        measured: what was measured of the same plan, drawn below what was predicted.
        unit: of time, as the axis names it.
        memory: whether to draw what each rank holds over time as well.
        memory_unit: of memory.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    panels = panels_of(shown, measured)
    return _saved(panels, unit, memory_unit if memory else None, "png", dpi)


def svg(
    shown: Timeline | Panel | Sequence[Panel],
    *,
    measured: Timeline | None = None,
    unit: str = "units",
    memory: bool = False,
    memory_unit: str = "micro-batches",
) -> str:
    """The picture as an SVG file, on white: the same input gives the same text.

    The bars of one colour are a group whose id says panel, kind and chunk, as in `bars-0-F-0`.
    Where there are more than 10,000, they are an image inside of the file. Arguments and errors
    are those of `png`.
    """
    panels = panels_of(shown, measured)
    return smaller(_saved(panels, unit, memory_unit if memory else None, "svg", 200).decode())


def _saved(panels: Sequence[Panel], unit: str, held: str | None, form: str, dpi: int) -> bytes:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(
            "pictures are drawn by matplotlib, which is not installed: "
            "pip install 'pipemega[pictures]', or ask for html, which needs nothing"
        ) from error
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    file = io.BytesIO()
    with rc_context(dict[Any, Any](_STYLE)):
        figure = draw(panels, unit, held)
        figure.savefig(
            file,
            format=form,
            dpi=dpi,
            facecolor="white",
            metadata=metadata if form == "svg" else {"Software": None},
        )
    return file.getvalue()


def draw(panels: Sequence[Panel], unit: str = "units", memory_unit: str | None = None) -> "Figure":
    """The figure, for who wants to change it before it is saved.

    Args:
        memory_unit: None: memory is not drawn.
    """
    from matplotlib.figure import Figure

    width = _width(panels)
    blocks = list(_blocks(panels, memory_unit))
    height = sum(_TITLE + size + _GAP for _, _, size in blocks) + _FOOT
    figure = Figure(figsize=(width, height))
    longest = max(panel.timeline.makespan for panel in panels) or 1.0
    points = 72 * (width - _LEFT - _RIGHT) / longest  # per unit of time
    top = height
    for number, panel, size in blocks:
        top -= _TITLE + size
        axes = figure.add_axes(
            (_LEFT / width, top / height, 1 - (_LEFT + _RIGHT) / width, size / height)
        )
        _frame(axes, panel, longest)
        if number is None:
            draw_memory(axes, panel, str(memory_unit))
        else:
            row = 72 * size / panel.timeline.plan.num_ranks
            draw_bars(axes, panel, number, points, row)
            axes.set_title(panel.heading, loc="left", fontsize=10, fontweight="bold", pad=4)
            axes.set_title(panel.figures(unit), loc="right", fontsize=9, pad=4)
        top -= _GAP
    axes.tick_params("x", labelbottom=True, length=3, width=0.6)
    axes.set_xlabel(f"time ({unit})", labelpad=2)
    _draw_legend(figure, panels)
    return figure


def _width(panels: Sequence[Panel]) -> float:
    """As wide as the numbers of the panel with the most columns need, 10 to 20."""
    columns = 0.0
    for panel in panels:
        middle = usual_time(panel)
        columns = max(columns, panel.timeline.makespan / middle if middle else 0.0)
    return min(20.0, max(10.0, _LEFT + _RIGHT + 0.13 * columns))


def _blocks(
    panels: Sequence[Panel], memory_unit: str | None
) -> Iterator[tuple[int | None, Panel, float]]:
    """(number of the panel, or None for its memory; panel; height), from top to bottom."""
    for number, panel in enumerate(panels):
        ranks = panel.timeline.plan.num_ranks
        row = 0.26 if ranks <= 8 else max(0.06, 2.1 / ranks, min(0.2, 4.0 / ranks))
        yield number, panel, row * ranks
        if memory_unit is not None:
            yield None, panel, row * ranks


def _frame(axes: "Axes", panel: Panel, longest: float) -> None:
    """Ranks down, time across, nothing else."""
    ranks = panel.timeline.plan.num_ranks
    every = 1 if ranks <= 16 else 8
    axes.set_xlim(0, longest)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(0, ranks, every), [f"rank {r}" for r in range(0, ranks, every)])
    axes.tick_params("y", length=0, labelsize=8)
    axes.tick_params("x", length=0, labelbottom=False, labelsize=8)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: "Figure", panels: Sequence[Panel]) -> None:
    """One entry per kind, with the shades of all chunks side by side."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    present = {step.kind for panel in panels for step in panel.timeline.plan.steps()}
    chunks = max(panel.num_chunks for panel in panels)
    shades = range(chunks) if chunks <= 4 else (0, chunks // 2, chunks - 1)
    kinds = [kind for kind in WORDS if kind in present]
    handles: list[Any] = [
        tuple(Patch(color=shade(kind, c, chunks)) for c in shades) for kind in kinds
    ]
    labels = [WORDS[kind] for kind in kinds]
    handles.append((Patch(color=IDLE),))
    labels.append("waiting")
    note = "shades: first to last stage of a rank" if chunks > 1 else ""
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(_LEFT / figure.get_figwidth() - 0.005, 0),
        ncols=len(labels),
        frameon=False,
        fontsize=8,
        handlelength=2.2,
        columnspacing=1.6,
    )
    figure.text(
        1 - _RIGHT / figure.get_figwidth(), 0.13 / figure.get_figheight(), note, size=8, ha="right"
    )

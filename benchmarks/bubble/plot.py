"""Draws the comparison: one panel per table, one bar per system."""

from pathlib import Path
from typing import Any

OURS, THEIRS, SIMULATED = "#2f6f9f", "#c98a2b", "#222222"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw measured step / ideal step as bars, with the simulated value as a tick.

    Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Keep text as text: the file is five times smaller than with outlines.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bubble"})
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tables = report["tables"]
    columns = min(2, len(tables))
    lines = -(-len(tables) // columns)
    height = 0.24 * max(len(table["rows"]) for table in tables) + 1.0
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6.5 * columns, height * lines), squeeze=False
    )
    for axis, table in zip(axes.flat, tables, strict=False):
        _panel(axis, table)
    for axis in list(axes.flat)[len(tables) :]:
        axis.set_visible(False)
    figure.legend(
        handles=[
            Patch(color=OURS, label="pipemega"),
            Patch(color=THEIRS, label="torch.distributed.pipelining"),
            Line2D([], [], color=SIMULATED, marker="|", linestyle="", label="simulated"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, table: dict[str, Any]) -> None:
    rows = sorted(table["rows"], key=lambda row: -row["measured"])
    # The bar of `sequential` would be too long for the scale.
    rows = [row for row in rows if not row["system"].endswith(":sequential")]
    places = range(len(rows))
    colours = [OURS if row["system"].startswith("pipemega:") else THEIRS for row in rows]
    axis.barh(places, [row["measured"] - 1 for row in rows], left=1, color=colours, height=0.7)
    axis.plot(
        [row["simulated"] for row in rows],
        places,
        linestyle="",
        marker="|",
        markersize=9,
        color=SIMULATED,
    )
    axis.set_yticks(places, [f"{row['system']} ({row['peak']:g})" for row in rows], fontsize=8)
    axis.set_xlim(left=1)
    costs = ", ".join(f"{cost:g}" for cost in table["costs"])
    axis.set_title(
        f"{table['ranks']} ranks, {table['microbatches']} micro-batches, F, I, W = {costs}",
        fontsize=9,
    )
    axis.set_xlabel("step / ideal step (activation units held)", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)

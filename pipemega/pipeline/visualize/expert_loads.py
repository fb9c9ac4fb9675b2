"""The loads of experts over the steps of a run, and their picture.

layer 2   expert 0   | . . : : # # |      one row for each expert, one column for some steps;
          expert 1   | : : : : : : |      the colour is the load: tokens of the expert / mean
layer 3   expert 0   | : : : . . . |      of the layer
          expert 1   | . . : : : : |
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipemega.errors import ConfigError
from pipemega.pipeline.visualize.figure import saved
from pipemega.pipeline.visualize.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# An even number: a full history is shortened by adding pairs of columns.
_MOST_COLUMNS: Final = 240
# More rows than this are too thin to see: neighbouring experts share a row.
_MOST_ROWS: Final = 1200
# The scale of colours ends at this load, and at its inverse.
_MOST_LOAD: Final = 4
_NO_TOKEN: Final = "#ffd21f"


class ExpertLoads:
    """Adds up the tokens of experts over steps, in at most 240 columns of equally many steps.

    Args:
        layers: positions of the layers with experts.
        num_experts: experts of each of them.

    Attributes:
        first_step: the first step that was added.
        has_new_steps: a step was added since the last `write`.
    """

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self._layers, self._num_experts = layers, num_experts
        self._columns: list[Any] = []  # each [layers, experts]
        self._width, self._in_last, self.first_step = 1, 0, 0
        self.has_new_steps = False

    def add(self, step: int, tokens: Sequence[Sequence[float]]) -> None:
        """Add the tokens of a step [layers, experts]."""
        if not self._columns:
            self.first_step = step
        if not self._columns or self._in_last == self._width:
            if len(self._columns) == _MOST_COLUMNS:
                pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
                self._columns, self._width = [a + b for a, b in pairs], 2 * self._width
            self._columns.append(np.zeros((len(self._layers), self._num_experts)))
            self._in_last = 0
        self._columns[-1] += np.array(tokens)
        self._in_last, self.has_new_steps = self._in_last + 1, True

    def loads(self) -> Any:
        """Return tokens of each expert / mean of the layer [layers, experts, columns].

        It is nan where a layer has no token.
        """
        tokens = np.stack(self._columns, axis=2)
        mean = tokens.mean(axis=1, keepdims=True)
        return np.divide(tokens, mean, out=np.full_like(tokens, np.nan), where=mean > 0)

    def write(self, path: Path) -> bool:
        """Write the picture as a PNG file; return False if matplotlib is not installed.

        Raises:
            OSError: the file cannot be written.
        """
        self.has_new_steps = False
        try:
            content = saved(self._draw, LIGHT, "png", 120)
        except ConfigError:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_bytes(content)
        # A sink may be reading the previous picture.
        draft.replace(path)
        return True

    def _draw(self) -> "Figure":
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        loads, most = self.loads(), np.log2(_MOST_LOAD)
        layers, experts, columns = loads.shape
        per_row = -(-layers * experts // _MOST_ROWS)
        rows = -(-experts // per_row)
        # Below the scale: a load of 0 has a colour of its own.
        shown = np.where(np.isnan(loads), np.nan, -most - 1)
        np.log2(loads, out=shown, where=loads > 0)
        shown = np.where(loads > 0, shown.clip(-most, most), shown)
        padded = np.full((layers, rows * per_row, columns), np.nan)
        padded[:, :experts] = shown
        groups = padded.reshape(layers, rows, per_row, columns)
        # Of the experts that share a row, the one that is farthest from the mean.
        farthest = np.where(np.isnan(groups), -1, np.abs(groups)).argmax(axis=2, keepdims=True)
        image = np.take_along_axis(groups, farthest, axis=2).reshape(layers * rows, columns)

        height = min(16.0, max(0.08 * len(image), 0.3 * layers, 1.5))
        figure = Figure(figsize=(10, height + 1), layout="constrained")
        axes = figure.subplots()
        start, end = self.first_step - 0.5, self.first_step - 0.5 + columns * self._width
        drawn = axes.imshow(
            image,
            extent=(start, end, layers, 0),
            aspect="auto",
            interpolation="nearest",
            cmap=colormaps["RdBu_r"].with_extremes(under=_NO_TOKEN, bad=LIGHT.idle),
            vmin=-most,
            vmax=most,
        )
        for border in range(1, layers):
            axes.axhline(border, color=LIGHT.background, linewidth=1.5)
        every = -(-layers // 40)
        named = range(0, layers, every)
        axes.set_yticks([n + 0.5 for n in named], [f"layer {self._layers[n]}" for n in named])
        axes.tick_params("y", length=0)
        axes.set_xlabel("step")
        axes.locator_params("x", integer=True)
        title = f"load of the {experts} experts of each layer, expert 0 at the top"
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        if per_row > 1:
            axes.set_title(f"each row: {per_row} experts", loc="right", fontsize=9)
        size, label = min(4.0, height), "tokens / mean; yellow: none"
        place = {"shrink": size / height, "aspect": size / 0.15, "anchor": (0.0, 1.0), "pad": 0.01}
        bar = figure.colorbar(drawn, ax=axes, label=label, **place)
        ticks = range(-int(most), int(most) + 1)
        bar.set_ticks(list(ticks), labels=[f"{2.0**tick:g}" for tick in ticks])
        return figure

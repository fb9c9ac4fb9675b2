"""Colours and names of the kinds of steps, with a shade per chunk.

Forward is blue. A full backward is orange, the input gradient amber, the weight gradient pale
yellow. The passes of vocabulary parallelism are green (embedding), violet (output head) and red
(loss). People with any colour blindness can distinguish blue from yellow, and these kinds differ in
lightness too, so they differ in black and white. The first stage of a rank has the darkest shade,
the last one the lightest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from pipemega.monitor.timers import PHASES
from pipemega.pipeline.plan.instructions import Kind

# In the order of the legend, which shows the letter of the kind, too: "F forward".
KIND_NAMES: Final[Mapping[Kind, str]] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
# Of vocabulary parallelism.
PASS_NAMES: Final[Mapping[Kind, str]] = {
    Kind.EMBED: "embedding",
    Kind.EMBED_WEIGHT: "embedding gradient",
    Kind.OUTPUT: "output head",
    Kind.LOSS: "loss",
    Kind.OUTPUT_WEIGHT: "head gradient",
}

ALL_NAMES: Final[Mapping[Kind, str]] = {**KIND_NAMES, **PASS_NAMES}

# Of the phases of a measured step outside of its pipeline; on white and on black.
PHASE_COLOURS: Final[Mapping[str, str]] = dict(
    zip(
        PHASES,
        ("#3c8d40", "#c9a7a0", "#7c5cbf", "#b39ddb", "#1f8a83", "#7fc8c0", "#8d96a3"),
        strict=True,
    )
)

Shades = Mapping[Kind, tuple[str, str]]  # the darkest and the lightest of each kind


@dataclass(frozen=True)
class Theme:
    """The colours of a page or picture, as #rrggbb.

    Args:
        shades: colours of the kinds of steps.
        background, text, muted, line, surface: colours of the page; muted: less important text;
            surface: buttons and boxes.
        idle, memory: colours of a timeline.
        mark: colour of the selected step and the chosen schedule.
        good, bad: colours of the verdict.
        parts: colours of the parts of a stacked bar.
    """

    shades: Shades
    background: str
    text: str
    muted: str
    line: str
    surface: str
    idle: str
    memory: str
    mark: str
    good: str
    bad: str
    parts: tuple[str, ...]

    def variables(self) -> str:
        """Return the colours of the page as CSS variables."""
        names = (field.name for field in fields(self) if field.name not in ("shades", "parts"))
        colours = {name: getattr(self, name) for name in names}
        colours |= {f"part{number}": colour for number, colour in enumerate(self.parts)}
        return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_SHADES: Final[Shades] = {
    Kind.FORWARD: ("#14467f", "#3470b4"),
    Kind.BACKWARD: ("#dc6a2f", "#ec9464"),
    Kind.BACKWARD_INPUT: ("#f3ab35", "#f7c065"),
    Kind.BACKWARD_WEIGHT: ("#f3d97c", "#f9e9b4"),
    Kind.EMBED: ("#0f766e", "#5aa8a1"),
    Kind.EMBED_WEIGHT: ("#8fd0c9", "#bfe5e1"),
    Kind.OUTPUT: ("#6d28a8", "#a274cc"),
    Kind.LOSS: ("#be185d", "#d86f9c"),
    Kind.OUTPUT_WEIGHT: ("#cdb4e8", "#e2d4f2"),
}
LIGHT: Final = Theme(
    shades=_SHADES,
    background="#ffffff",
    text="#15181d",
    muted="#5b6472",
    line="#d9dde3",
    surface="#f7f8fa",
    idle="#eef0f3",
    memory="#6b7a8f",
    mark="#c2185b",
    good="#1a7f37",
    bad="#cf222e",
    parts=("#4b5563", "#7c5cbf", "#1f8a83", "#d08a1d", "#a3acb9"),
)
DARK: Final = Theme(
    # Dark blue is hard to see on a dark page.
    shades={**_SHADES, Kind.FORWARD: ("#4787d2", "#8fbdf0")},
    background="#0d1117",  # the background of GitHub
    text="#e8eaed",
    muted="#9aa4b2",
    line="#333a44",
    surface="#1a1e25",
    idle="#20252d",
    memory="#8794a8",
    mark="#ff6fa5",
    good="#3fb950",
    bad="#f85149",
    parts=("#8b98a9", "#a98be0", "#3fb3aa", "#e0a040", "#5d6878"),
)


def shade(kind: Kind, chunk: int, chunks: int, shades: Shades = LIGHT.shades) -> str:
    """Return the colour of `kind` for chunk number `chunk` of `chunks`, as #rrggbb."""
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    dark, light = map(_channels, shades[kind])
    mixed = (round(d + part * (b - d)) for d, b in zip(dark, light, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def text_colour(colour: str) -> str:
    """Return white or near black, the one with more contrast on `colour`."""
    on_white, on_black = 1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / 0.06
    return "#ffffff" if on_white > on_black else "#15181d"


def luminance(colour: str) -> float:
    """Return the relative luminance of `colour`, 0 to 1.  Source: WCAG 2.1."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

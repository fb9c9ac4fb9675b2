"""What each kind of step looks like: a colour, a shade per chunk, a name.

Forward is blue, backward warm: a whole backward is orange, its input half amber, its weight half
straw. Blue against yellow is what every kind of colour-blindness leaves apart, and the kinds also
differ in lightness, so that they stay apart in black and white. The first stage of a rank has the
darkest shade of its kind, the last one the lightest.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pipemega.pipeline.instructions import Kind

# In the order of legends.
WORDS: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        Kind.FORWARD: "forward",
        Kind.BACKWARD: "backward",
        Kind.BACKWARD_INPUT: "backward, input half",
        Kind.BACKWARD_WEIGHT: "backward, weight half",
    }
)

Shades = Mapping[Kind, tuple[str, str]]  # the darkest and the lightest of each kind

ON_WHITE: Final[Shades] = MappingProxyType(
    {
        Kind.FORWARD: ("#14467f", "#3470b4"),
        Kind.BACKWARD: ("#dc6a2f", "#ec9464"),
        Kind.BACKWARD_INPUT: ("#f3ab35", "#f7c065"),
        Kind.BACKWARD_WEIGHT: ("#f3d97c", "#f9e9b4"),
    }
)
# Dark blue would be lost on a dark page.
ON_BLACK: Final[Shades] = MappingProxyType(
    {**ON_WHITE, Kind.FORWARD: ("#4787d2", "#8fbdf0")},
)


def shade(kind: Kind, chunk: int, chunks: int, shades: Shades = ON_WHITE) -> str:
    """The colour of `kind` on the stage `chunk` of a rank that holds `chunks`, as #rrggbb."""
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    dark, light = map(_channels, shades[kind])
    mixed = (round(d + part * (b - d)) for d, b in zip(dark, light, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ink(colour: str) -> str:
    """White or near black, whichever is easier to read on `colour`."""
    on_white, on_black = 1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / 0.06
    return "#ffffff" if on_white > on_black else "#15181d"


def luminance(colour: str) -> float:
    """How bright a screen shows `colour`, 0 to 1.  Source: WCAG 2.1, "relative luminance"."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

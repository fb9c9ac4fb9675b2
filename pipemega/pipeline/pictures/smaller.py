"""SVG as matplotlib writes it, made half as large without a change that can be seen."""

import re

_TAG = re.compile(r"<[^>]+>")
_STYLE = re.compile(r' style="([^"]*)"')
_NUMBER = re.compile(r"-?\d+\.\d+")
# Text that stands upright is written as turned by -0 degrees around itself.
_UPRIGHT = re.compile(r' transform="rotate\(-?0 [^)]*\)"')


def smaller(svg: str) -> str:
    """Styles named once instead of repeated, coordinates in hundredths of a point.

    Only tags change; what is written between them, numbers included, stays as it is.
    """
    head, body = svg.split("</style>", 1)
    names: dict[str, str] = {}

    def named(style: re.Match[str]) -> str:
        return f' class="{names.setdefault(style[1], f"c{len(names)}")}"'

    def rounded(number: re.Match[str]) -> str:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    def shorter(tag: re.Match[str]) -> str:
        text = _STYLE.sub(named, _UPRIGHT.sub("", tag[0]))
        return _NUMBER.sub(rounded, " ".join(text.split()))

    body = _TAG.sub(shorter, body)
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return f"{head}{rules}</style>{body}"

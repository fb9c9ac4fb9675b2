"""Formats what people read: percentages, counts, tables, colour, the width of the terminal.

Parses and formats sizes, times and counts.
"""

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final, TextIO

from pipemega.errors import ConfigError

# The columns of a line before the last one, or its label: wrapped text starts to the right of it.
_MARGIN: Final = re.compile(r".*\S {2,}|[a-z]+: ")
_LABEL: Final = re.compile(r"^(warning|error):", re.MULTILINE)

# ANSI codes (SGR, ECMA-48) by log level.
_CODES: Final = {"WARNING": "1;33", "ERROR": "1;31", "CRITICAL": "1;31"}


def percent(fraction: float, decimals: int = 1, *, signed: bool = False) -> str:
    """Format a fraction as in 10.2%; a number that rounds to zero has no minus sign."""
    # Adding 0.0 makes -0.0 positive. The format option "z" needs Python 3.11.
    number = round(100 * fraction, decimals) + 0.0
    return f"{number:{'+' if signed else ''}.{decimals}f}%"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return for example "1 rank" or "2 micro-batches"; `plural` is the ending."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def listed(items: Iterable[object], most: int = 5) -> str:
    """Return the first items, separated by commas, and how many more there are."""
    words = [str(item) for item in items]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return the rows of a table as lines; the columns after the first `left` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def line_width(stream: TextIO, otherwise: int) -> int:
    """Return COLUMNS or the columns of the terminal; `otherwise` if `stream` is not a terminal."""
    return shutil.get_terminal_size((otherwise, 24)).columns if stream.isatty() else otherwise


def wrapped(text: str, width: int) -> str:
    """Return `text` with its longer lines wrapped at words, below the last column of the line."""
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    margin = _MARGIN.match(line)
    indent = " " * margin.end() if margin and margin.end() <= 0.6 * width else "    "
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_report(text: str) -> None:
    """Print lines; on a terminal, wrap them and colour the labels `warning:` and `error:`."""
    if sys.stdout.isatty():
        text = wrapped(text, line_width(sys.stdout, 80))
    print(_LABEL.sub(lambda found: coloured(found[0], found[1].upper(), sys.stdout), text))


def uses_colour(stream: TextIO) -> bool:
    """Return whether to write colour: to a terminal, unless the environment decides.

    NO_COLOR (not empty) disables it; else FORCE_COLOR (not empty) or CLICOLOR_FORCE (not 0) enables
    it; else CLICOLOR=0 or TERM=dumb disables it.

    Source: https://no-color.org, https://force-color.org, https://bixense.com/clicolors.
    """
    environment = os.environ
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR") or environment.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    if environment.get("CLICOLOR") == "0" or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()


def coloured(text: str, level: str, stream: TextIO) -> str:
    """Return `text`, which is written to `stream`, in the colour of a log level.

    WARNING is yellow, ERROR and CRITICAL red; other levels have no colour.
    """
    code = _CODES.get(level)
    if code is None or not uses_colour(stream):
        return text
    return f"\033[{code}m{text}\033[0m"


_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
_SIZE = re.compile(r"(?:[a-z][a-z0-9]*-)?(\d+(?:\.\d+)?) ?([kmgt]?i?b)", re.IGNORECASE)


def print_error(text: str) -> None:
    """Print `error: text` on stderr, coloured on a terminal."""
    print(coloured("error:", "ERROR", sys.stderr), text, file=sys.stderr)


def parse_bytes(text: str) -> int:
    """Parse a size such as 80GB or 79.2GiB, or a device name that ends in its size: H100-80GB.

    Raises:
        ConfigError: the text is not a size, or the size is 0.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not size:
        raise ConfigError(
            f"the device memory {text!r} is not a size: write 80GB, 79.2GiB, or a device name that "
            f"ends in its size, such as H100-80GB"
        )
    return size


def unit_of(sizes: list[int]) -> tuple[str, int]:
    """Return (unit, bytes of the unit) that suits the largest of `sizes`."""
    largest = max(sizes, default=0)
    name = "GB" if largest >= 10**9 else "MB" if largest >= 10**6 else "KB"
    return name, _UNITS[name]


def show_bytes(size: float) -> str:
    """Format with three digits and a unit: 8.39 MB."""
    for name in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[name]:
            return f"{three(size / _UNITS[name])} {name}"
    return f"{size:g} B"


def show_time(seconds: float) -> str:
    """Format with three digits and a unit: 12.4 s, 310 ms."""
    for name, unit in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= unit:
            return f"{three(seconds / unit)} {name}"
    return f"{three(seconds * 1e6)} us"


def show_duration(seconds: float) -> str:
    """Format the time of a whole run, with three digits: 12.4 days, 3.10 hours."""
    for name, unit in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= unit:
            return f"{three(seconds / unit)} {name}"
    return f"{three(seconds)} seconds"


def show_percent(share: float) -> str:
    """Format with three digits: 10.2%, 3.33%."""
    return f"{three(100 * share)}%"


def show_count(number: float) -> str:
    """Format with three digits and a letter: 1.31 B."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{three(number / size)} {letter}"
    return f"{number:g}"


def three(number: float) -> str:
    """Format with three significant digits, and with all digits before the point: 0.0812, 1,234."""
    if not number or not math.isfinite(number):
        return f"{number + 0.0:g}"  # -0.0 + 0.0 is 0.0
    digits = 2 - math.floor(math.log10(abs(number)))
    # Rounding may add a digit: 9.996 is 10.0.
    digits = 2 - math.floor(math.log10(abs(round(number, digits))))
    return f"{number:,.{max(0, digits)}f}"

"""Formats what people read: percentages, counts, tables, colour, the width of the terminal."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Final, TextIO

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

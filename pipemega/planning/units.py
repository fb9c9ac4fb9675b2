"""Parses and formats sizes, times and counts."""

import math
import re

from pipemega.errors import ConfigError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
_SIZE = re.compile(r"(?:[a-z][a-z0-9]*-)?(\d+(?:\.\d+)?) ?([kmgt]?i?b)", re.IGNORECASE)


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

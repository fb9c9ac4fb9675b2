"""Sizes as people write and read them."""

import re

from pipemega.errors import ConfigError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(?:[a-z][a-z0-9]*-)?(\d+(?:\.\d+)?) ?([kmgt]?i?b)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """80GB, 79.2GiB; or the name of a device that ends in its size, as H100-80GB.

    Raises:
        ConfigError: it is none of them, or nothing.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not size:
        raise ConfigError(
            f"the device memory {text!r} is no size: write 80GB, 79.2GiB, or a device with its "
            f"size, such as H100-80GB"
        )
    return size


def unit_of(sizes: list[int]) -> tuple[str, int]:
    """The unit in which the largest of `sizes` reads well, and its bytes."""
    largest = max(sizes, default=0)
    name = "GB" if largest >= 10**9 else "MB" if largest >= 10**6 else "KB"
    return name, _UNITS[name]


def show_bytes(size: float) -> str:
    """Three digits and a unit: 8.39 MB."""
    for name in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[name]:
            return f"{_three(size / _UNITS[name])} {name}"
    return f"{size:g} B"


def show_time(seconds: float) -> str:
    """Three digits and a unit: 12.4 s, 310 ms."""
    if seconds >= 1:
        return f"{_three(seconds)} s"
    return f"{_three(seconds * 1e3)} ms"


def show_count(number: float) -> str:
    """Three digits and a letter: 1.31 B."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{_three(number / size)} {letter}"
    return f"{number:g}"


def _three(number: float) -> str:
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f}"

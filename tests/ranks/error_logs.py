"""Reads the log in which every rank writes the details of an error."""

import re
from pathlib import Path

_HEADER = re.compile(r"^=== \S+ \S+ rank (\d+) \(pid \d+ on .*\)\n", re.MULTILINE)


def find_logs(*folders: Path) -> list[Path]:
    """Return the logs of runs in these folders, and those of launches without a run's folder."""
    return [
        path
        for folder in folders
        for pattern in ("errors.log", "pipemega-*-errors.log")
        for path in sorted(folder.glob(pattern))
    ]


def read_entries(text: str) -> dict[int, str]:
    """Return the last entry of each rank."""
    _, *parts = _HEADER.split(text)
    return {int(rank): entry for rank, entry in zip(parts[::2], parts[1::2], strict=True)}

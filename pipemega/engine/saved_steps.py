"""The steps that this process has saved or loaded, by folder."""

import os
from pathlib import Path
from typing import NamedTuple

from pipemega.storage.filesystem import is_remote


class _Save(NamedTuple):
    step: int | None  # None: the run has changed since
    path: Path | str | None  # None: the user has saved it


class SavedSteps:
    """Remembers the last step of each folder of checkpoints, so that no step is saved twice."""

    def __init__(self) -> None:
        self._saves: dict[str, _Save] = {}

    def add(self, folder: str | Path, step: int, path: Path | str | None = None) -> None:
        """Note a checkpoint of `step`.

        Args:
            path: of a checkpoint that the run has saved by itself; None for any other.
        """
        self._saves[_key(folder)] = _Save(step, path)

    def outdate(self, folder: str | Path) -> None:
        """Note that the run has changed since the last checkpoint in `folder`, at the same step."""
        self._saves[_key(folder)] = _Save(None, None)

    def has_step(self, folder: str | Path, step: int) -> bool:
        """Return whether the last checkpoint in `folder` is that of `step`."""
        return folder in self and self._saves[_key(folder)].step == step

    def own_path(self, folder: str | Path, step: int) -> Path | str | None:
        """Return the path of the checkpoint of `step`, if the run has saved it by itself."""
        return self._saves[_key(folder)].path if self.has_step(folder, step) else None

    def __contains__(self, folder: str | Path) -> bool:
        return _key(folder) in self._saves


def _key(folder: str | Path) -> str:
    """Return the same text for the same folder."""
    text = os.fspath(folder)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)

"""Files that stay open for the length of a run, and may become shorter meanwhile.

To read a mapping beyond the end of its file is nothing that Python could raise: the system ends the
process (SIGBUS), and nobody learns why. So whoever reads one asks first whether the file still has
its length (0.3 us), and tokens are read and not mapped: a file system that fails then says so. A
file that is removed, or replaced by another one, does no harm: what is open stays what it was.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipemega.errors import DataError

Array = npt.NDArray[np.generic]


class Mappings:
    """The files behind some mapped arrays.

    In another process, to which they were sent, the arrays are copies, and there is nothing to ask.

    Args:
        arrays: as `np.memmap` and `np.load` make them; others are in memory, and left out.
    """

    def __init__(self, *arrays: Any) -> None:
        mapped = [array for array in arrays if isinstance(array, np.memmap)]
        self._files = [
            (array.filename, array._mmap, array.offset + array.nbytes)  # type: ignore[attr-defined]
            for array in mapped
        ]

    def refuse_shortened(self) -> None:
        """Raises DataError if a file has become shorter than what is mapped of it."""
        for path, mapping, needed in self._files:
            if (size := mapping.size()) < needed:
                raise _shortened(path, size, needed)

    def __reduce__(self) -> tuple[type["Mappings"], tuple[()]]:
        return Mappings, ()


class TokenFile:
    """The numbers of a file, read where they are asked for; by any number of threads.

    Args:
        path: the file, which stays open.
        dtype: of its numbers.

    Raises:
        DataError: it cannot be opened; on reading, it has become shorter, or the disk fails.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._handle)
        self.num_bytes = os.fstat(self._handle).st_size

    def read(self, start: int, stop: int) -> Array:
        """The numbers [start, stop); at most to the end that the file had when it was opened."""
        first = start * self.dtype.itemsize
        last = min(stop * self.dtype.itemsize, self.num_bytes)
        try:
            raw = os.pread(self._handle, max(last - first, 0), first)
            # The system gives no more than 2 GiB at once.
            while len(raw) < last - first:
                more = os.pread(self._handle, last - first - len(raw), first + len(raw))
                if not more:
                    size = os.fstat(self._handle).st_size
                    raise _shortened(self.path, size, self.num_bytes)
                raw += more
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        return np.frombuffer(raw, dtype=self.dtype)

    def mapped(self) -> Array:
        """All of it, for who reads it from one end to the other; no copy."""
        if not self.num_bytes:
            # An empty file cannot be mapped.
            return np.empty(0, dtype=self.dtype)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.num_bytes:
            raise _shortened(self.path, size, self.num_bytes)
        return np.memmap(self.path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path, np.dtype[Any]]]:
        return TokenFile, (self.path, self.dtype)


def _shortened(path: str | os.PathLike[str] | None, size: int, needed: int) -> DataError:
    return DataError(
        f"{path} became shorter while it was in use: {size} bytes are left of {needed}; whoever "
        "writes data anew must give it another name, or remove the old file before"
    )

"""Files that are open during a whole run, and may be truncated meanwhile.

Reading a memory map beyond the end of its file kills the process (SIGBUS) without a Python error.
So each reader first checks the length of the file (0.3 us), and tokens are read with pread instead
of a map, so that a failing file system raises an error. Removing or replacing a file is harmless:
an open file keeps its content.
"""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipemega.errors import DataError

Array = npt.NDArray[np.generic]


class Mappings:
    """The files of memory-mapped arrays.

    Pickled to another process, the arrays are copies and need no check.

    Args:
        arrays: from `np.memmap` or `np.load`; arrays in memory are ignored.
    """

    def __init__(self, *arrays: Any) -> None:
        mapped = [array for array in arrays if isinstance(array, np.memmap)]
        self._files = [
            (array.filename, array._mmap.size, array.offset + array.nbytes)  # type: ignore[attr-defined]
            for array in mapped
        ]

    def refuse_shortened(self) -> None:
        """Raise DataError if a file is now shorter than its mapped part."""
        for path, size_of, needed in self._files:
            if size_of() < needed:
                raise _shortened(path, size_of(), needed)

    def __reduce__(self) -> tuple[type["Mappings"], tuple[()]]:
        return Mappings, ()


class TokenFile:
    """A file of numbers with random access from any number of threads.

    Args:
        path: the file; stays open.
        dtype: dtype of its numbers.

    Raises:
        DataError: the file cannot be opened. While reading: it was truncated, or the disk fails.
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
        """Return the numbers [start, stop), up to the length of the file when it was opened."""
        first = start * self.dtype.itemsize
        last = min(stop * self.dtype.itemsize, self.num_bytes)
        try:
            raw = os.pread(self._handle, max(last - first, 0), first)
            # pread returns at most 2 GiB at once.
            while len(raw) < last - first:
                more = os.pread(self._handle, last - first - len(raw), first + len(raw))
                if not more:
                    size = os.fstat(self._handle).st_size
                    raise _shortened(self.path, size, self.num_bytes)
                raw += more
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        return np.frombuffer(raw, dtype=self.dtype)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Array:
        """Return the numbers of several ranges [start, stop), one after the other."""
        size, handle, count = self.dtype.itemsize, self._handle, 0
        parts = []
        try:
            for start, stop in ranges:
                parts.append(os.pread(handle, (stop - start) * size, start * size))
                count += stop - start
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        # Of one part, this is no copy.
        raw = b"".join(parts)
        if len(raw) != count * size:
            # The file ends here, or it became shorter: `read` tells which.
            return np.concatenate([self.read(*each) for each in ranges])
        return np.frombuffer(raw, dtype=self.dtype)

    def mapped(self) -> Array:
        """Return a memory map of the whole file, for sequential readers; no copy."""
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
        f"{path} became shorter while it was in use: {size} bytes are left of {needed}; write new "
        "data under another name, or remove the old file first"
    )

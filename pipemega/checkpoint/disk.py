"""Where checkpoints lie: a folder of the file system, or a place that fsspec knows.

Names are relative to it, with '/' between their parts.
"""

import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from pipemega.errors import CheckpointError


class Disk(ABC):
    """A root, and what is done with the files below it."""

    renames: ClassVar[bool]
    """Whether a folder can be renamed, in one go."""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """The whole path, for messages."""

    @abstractmethod
    def create(self, name: str) -> Any:
        """A context with a stream to write; on leaving it without an error the file is safe."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """A stream to read, which can seek."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none of that name."""

    @abstractmethod
    def has(self, name: str = "") -> bool:
        """Whether there is a file or a folder of that name, or the root itself."""

    @abstractmethod
    def names(self, name: str = "") -> list[str]:
        """What is in a folder, sorted; nothing if there is no such folder."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """A file, or a folder with all in it."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that are left, where that can be known."""

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as stream:
            stream.write(data)


class LocalDisk(Disk):
    """A folder that all ranks see."""

    renames = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.root / name
        # One folder, not those above it: where there is none yet, something is wrong.
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb")

    def size(self, name: str) -> int | None:
        path = self.root / name
        return path.stat().st_size if path.is_file() else None

    def has(self, name: str = "") -> bool:
        return (self.root / name).exists()

    def names(self, name: str = "") -> list[str]:
        path = self.root / name
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def delete(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def free(self) -> int | None:
        return shutil.disk_usage(self.root).free

    def make(self, name: str = "") -> None:
        """Makes a folder, and those above it; their names are on the disk afterwards."""
        path = self.root / name
        missing = [above for above in (path, *path.parents) if not above.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync(made.parent)

    def rename(self, name: str, to: str) -> None:
        """In one go, and on the disk afterwards; from and to the root itself."""
        (self.root / name).rename(self.root / to)
        sync(self.root)

    def sync(self, name: str) -> None:
        """Brings the names in a folder, and in those below it, to the disk."""
        for path in [*(self.root / name).rglob("*"), self.root / name]:
            if path.is_dir():
                sync(path)


class RemoteDisk(Disk):
    """A place that fsspec knows, such as an object store: a file is there when it is closed.

    Raises:
        CheckpointError: fsspec, or what it needs for this kind of place, is not installed.
    """

    renames = False

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url} cannot be opened: {error}; such places need fsspec and its part for this "
                f"kind of them (s3fs for s3://, gcsfs for gs://)"
            ) from error
        self._url, self._root = url.rstrip("/"), root.rstrip("/")

    def where(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self._path(name)
        with self._errors_of(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            stream = self._files.open(path, "wb")
        try:
            yield stream
        except BaseException:
            # What is there now nobody will ask for.
            with suppress(Exception):
                stream.close()
            raise
        with self._errors_of(name):
            stream.close()

    def open(self, name: str) -> IO[bytes]:
        with self._errors_of(name):
            stream: IO[bytes] = self._files.open(self._path(name), "rb")
            return stream

    def size(self, name: str) -> int | None:
        self._files.invalidate_cache()
        try:
            with self._errors_of(name):
                found = self._files.info(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def has(self, name: str = "") -> bool:
        # A folder of an object store is there as soon as something is in it.
        return bool(self.names(name)) or self.size(name) is not None

    def names(self, name: str = "") -> list[str]:
        self._files.invalidate_cache()
        try:
            with self._errors_of(name):
                found = self._files.ls(self._path(name), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def delete(self, name: str) -> None:
        with self._errors_of(name):
            self._files.rm(self._path(name), recursive=True)

    def free(self) -> int | None:
        return None

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Makes an OSError of whatever the client of a store raises."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, text, self.where(name)) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Whether it is a URL, and no path."""
    return "://" in os.fspath(folder)


def disk_at(folder: str | os.PathLike[str]) -> Disk:
    """The disk whose root is `folder`: a path, or a URL such as s3://bucket/runs/mine."""
    return RemoteDisk(os.fspath(folder)) if is_remote(folder) else LocalDisk(folder)


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

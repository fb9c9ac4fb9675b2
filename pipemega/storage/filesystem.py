"""File access: a local folder, or a URL that fsspec opens.

File names are relative to the root folder, with '/' between their parts.
"""

import errno
import fcntl
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pipemega.errors import CheckpointError


class Storage(ABC):
    """A root folder, and the operations on the files in it."""

    @abstractmethod
    def full_path(self, name: str = "") -> str:
        """Return the path with the root, for messages."""

    @abstractmethod
    def create(self, name: str) -> Any:
        """Return a context with a stream to write; on exit without an error the file is durable."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Return a seekable stream to read."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if no file has this name."""

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether a file or a folder of this name exists; without a name: the root."""

    @abstractmethod
    def listdir(self, name: str = "") -> list[str]:
        """Return the sorted names in a folder; [] if the folder does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its content."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the free space; None where the storage does not report it."""

    @abstractmethod
    def create_new(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether it was written."""

    @abstractmethod
    def refresh(self, name: str, data: bytes) -> None:
        """Change `version` of an existing file; storages without time stamps write `data`."""

    @abstractmethod
    def version(self, name: str) -> object | None:
        """Return a value that changes with each write and `refresh`; None: no such file."""

    @abstractmethod
    def modified_at(self, name: str) -> float | None:
        """Return the time of the last change (Unix time of the storage's clock), if known."""

    @abstractmethod
    def delete_if(self, name: str, data: bytes) -> bool:
        """Delete a file if it contains `data`; return whether this call deleted it."""

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as stream:
            stream.write(data)


class LocalStorage(Storage):
    """A folder of a file system that all ranks share."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def full_path(self, name: str = "") -> str:
        return str(self.root / name)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.root / name
        # Without parents=True: if the checkpoint folder itself is missing, that is an error.
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

    def exists(self, name: str = "") -> bool:
        return (self.root / name).exists()

    def listdir(self, name: str = "") -> list[str]:
        path = self.root / name
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def delete(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def free_bytes(self) -> int | None:
        root = self.root.absolute()
        usage = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists()))
        # Some file systems, such as FUSE mounts, report 0 for everything.
        return usage.free if usage.total else None

    def create_new(self, name: str, data: bytes) -> bool:
        try:
            # O_EXCL is atomic on network file systems too, NFS included.
            handle = os.open(self.root / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        return True

    def refresh(self, name: str, data: bytes) -> None:
        # Without writing: the file may belong to another process by now.
        os.utime(self.root / name)

    def version(self, name: str) -> object | None:
        try:
            # Network file systems compare their cached attributes with the server on open.
            with self.open(name) as file:
                return os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return None

    def modified_at(self, name: str) -> float | None:
        try:
            return (self.root / name).stat().st_mtime
        except OSError:
            return None

    def delete_if(self, name: str, data: bytes) -> bool:
        with _exclusive(self.root):
            return self.exists(name) and self.read(name) == data and self._delete_if(name, data)

    def _delete_if(self, name: str, data: bytes) -> bool:
        """As `delete_if`, also where processes cannot exclude each other."""
        path = self.root / name
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.stale")
        try:
            # Of several processes, only one succeeds.
            path.rename(aside)
        except FileNotFoundError:
            return False
        try:
            if aside.read_bytes() == data:
                return True
            # Between the caller's look and the rename another process has replaced the file.
            _restore(aside, path)
            return False
        finally:
            aside.unlink(missing_ok=True)

    def make_folder(self, name: str = "") -> None:
        """Create a folder and its parents, and sync their names to the disk."""
        path = self.root / name
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for created in missing:
            fsync_path(created.parent)

    def rename(self, name: str, to: str) -> None:
        """Rename a file or folder in the root atomically, and sync the root."""
        (self.root / name).rename(self.root / to)
        fsync_path(self.root)

    def sync_folders(self, name: str) -> None:
        """Sync the file names in a folder and in its subfolders to the disk."""
        for path in [*(self.root / name).rglob("*"), self.root / name]:
            if path.is_dir():
                fsync_path(path)


class FsspecStorage(Storage):
    """A URL that fsspec opens, such as an object store: a file appears when it is closed.

    Raises:
        CheckpointError: fsspec, or its package for this protocol, is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url} cannot be opened: {error}; URLs need fsspec and its package for the "
                f"protocol (s3fs for s3://, gcsfs for gs://)"
            ) from error
        self._url, self._root = url.rstrip("/"), root.rstrip("/")

    def full_path(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self._path(name)
        with self._as_os_errors(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            stream = self._files.open(path, "wb")
        try:
            yield stream
        except BaseException:
            # The partial file stays: no state.json will name it.
            with suppress(Exception):
                stream.close()
            raise
        with self._as_os_errors(name):
            stream.close()

    def open(self, name: str) -> IO[bytes]:
        with self._as_os_errors(name):
            stream: IO[bytes] = self._files.open(self._path(name), "rb")
            return stream

    def size(self, name: str) -> int | None:
        self._files.invalidate_cache()
        try:
            with self._as_os_errors(name):
                found = self._files.info(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def exists(self, name: str = "") -> bool:
        # A folder of an object store exists as soon as it contains a file.
        return bool(self.listdir(name)) or self.size(name) is not None

    def listdir(self, name: str = "") -> list[str]:
        self._files.invalidate_cache()
        try:
            with self._as_os_errors(name):
                found = self._files.ls(self._path(name), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def delete(self, name: str) -> None:
        with self._as_os_errors(name):
            self._files.rm(self._path(name), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def create_new(self, name: str, data: bytes) -> bool:
        if self.size(name) is not None:
            return False
        path = self._path(name)
        with self._as_os_errors(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                # "x" is atomic where the store has conditional writes (S3, Google, local).
                with self._files.open(path, "xb") as stream:
                    stream.write(data)
            except FileExistsError:
                return False
            except (ValueError, NotImplementedError):
                self._files.pipe_file(path, data)
        # Without conditional writes the last writer wins, and the other one notices here.
        return self.read(name) == data

    def refresh(self, name: str, data: bytes) -> None:
        self.write(name, data)

    def version(self, name: str) -> object | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def modified_at(self, name: str) -> float | None:
        try:
            with self._as_os_errors(name):
                modified: float = self._files.modified(self._path(name)).timestamp()
        except OSError:
            return None
        return modified

    def delete_if(self, name: str, data: bytes) -> bool:
        if self.version(name) != data:
            return False
        self.delete(name)
        return True

    @contextmanager
    def _as_os_errors(self, name: str) -> Iterator[None]:
        """Turn every exception of the store's client into an OSError with the path."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, text, self.full_path(name)) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Return whether `folder` is a URL and not a path."""
    return "://" in os.fspath(folder)


def storage_at(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage whose root is `folder`: a path, or a URL such as s3://bucket/runs/mine."""
    return FsspecStorage(os.fspath(folder)) if is_remote(folder) else LocalStorage(folder)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Exclude the other processes and threads of this host that enter with the same folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems do not lock folders.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _restore(aside: Path, path: Path) -> None:
    """Give a file its former name, unless there is a file of that name by now."""
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    except OSError:
        # A file system without hard links.
        aside.rename(path)


def fsync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

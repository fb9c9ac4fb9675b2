"""state.json: what a checkpoint says of itself, last of all its files.

It lists every other file with its size and its SHA-256, and carries a digest of itself.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from pipemega.checkpoint.disk import Disk
from pipemega.errors import CheckpointError

STATE_FILE = "state.json"
FORMAT = 2

_BLOCK = 4 << 20

Progress = Callable[[int], object]
"""Takes a number of bytes that were read."""


class Damage(CheckpointError):
    """A checkpoint is not what was written; what the error says comes after its path."""


class FileEntry(NamedTuple):
    """What is known of a file: its size, and its SHA-256 in hex."""

    size: int
    sha256: str


class Written:
    """The files that this rank has written into a folder: they are summed up on their way.

    Args:
        disk, folder: where.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk, self.folder = disk, folder
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A stream that is written from its beginning to its end."""
        with self.disk.create(f"{self.folder}/{name}") as raw:
            stream = _Summing(raw)
            yield stream
        self.files[name] = FileEntry(stream.tell(), stream.sha256())

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as stream:
            stream.write(data)


class _Summing:
    """A stream that knows the sum of what went through it."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._size, self._sum = raw, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._sum.update(data)
        self._raw.write(data)
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        """The file is closed by who opened it, when it is on the disk."""

    def sha256(self) -> str:
        return self._sum.hexdigest()


def difference(
    disk: Disk, path: str, entry: FileEntry, *, read: bool, progress: Progress | None = None
) -> str | None:
    """What is wrong with a file, None if nothing is.

    Args:
        read: compare the sum too, and not only the size.
    """
    try:
        size = disk.size(path)
        if size is None:
            return f"is missing, {entry.size} bytes were written"
        if size != entry.size:
            return f"has {size} bytes, {entry.size} bytes were written"
        if read and sum_of(disk, path, progress) != entry.sha256:
            return (
                "has the right size and other contents: its SHA-256 is not the one that was written"
            )
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def sum_of(disk: Disk, path: str, progress: Progress | None = None) -> str:
    """The SHA-256 of a file, in hex."""
    found = hashlib.sha256()
    with disk.open(path) as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
            if progress is not None:
                progress(len(block))
    return found.hexdigest()


def sealed(state: Mapping[str, Any]) -> bytes:
    """A state.json with this in it."""
    plain = json.loads(json.dumps({"format": FORMAT, **state}))
    return (json.dumps({**plain, "digest": _digest(plain)}, indent=1) + "\n").encode()


def opened(data: bytes) -> dict[str, Any]:
    """What was sealed; "files" as `FileEntry`s.

    Raises:
        Damage: it was changed since.
        CheckpointError: it is in a format of another version.
    """
    try:
        state = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise Damage(f"{STATE_FILE} is damaged: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        raise Damage(f"{STATE_FILE} is damaged: it does not say which files there are")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{STATE_FILE} is of format {state.get('format')}, and this version of pipemega reads "
            f"format {FORMAT}: load it with the version that saved it"
        )
    if state.pop("digest", None) != _digest(state):
        raise Damage(f"{STATE_FILE} is damaged: its digest is not that of its contents")
    state["files"] = {name: FileEntry(*entry) for name, entry in state["files"].items()}
    return state


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

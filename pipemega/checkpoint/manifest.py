"""state.json, the manifest of a checkpoint: the last file that is written.

It lists every other file with its size and its SHA-256, and contains a digest of itself.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import Storage

STATE_FILE = "state.json"
FORMAT = 2

_BLOCK = 4 << 20
# Bytes from which starting a thread is worth it.
_LARGE_WRITE = 1 << 20

Progress = Callable[[int], object]
"""Takes a number of bytes that were read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is missing, incomplete or differs from what was written."""


class FileEntry(NamedTuple):
    """The manifest's entry of a file: its size, and its SHA-256 in hex."""

    size: int
    sha256: str


class ChecksumWriter:
    """Writes files of this rank into a folder, and computes their checksums on the way.

    Args:
        storage, folder: where to write.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Return a stream that can only be written from beginning to end."""
        with (
            self.storage.create(f"{self.folder}/{name}") as raw,
            ThreadPoolExecutor(1, thread_name_prefix="checksum") as hashing,
        ):
            stream = _ChecksumStream(raw, hashing)
            yield stream
        self.files[name] = FileEntry(stream.tell(), stream.sha256())

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as stream:
            stream.write(data)


class _ChecksumStream:
    """Passes writes on to `raw`, and computes the SHA-256 of them.

    A large write is hashed in a thread while it is written: both release the interpreter lock.
    """

    def __init__(self, raw: IO[bytes], hashing: ThreadPoolExecutor) -> None:
        self._raw, self._size, self._hash, self._hashing = raw, 0, hashlib.sha256(), hashing

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < _LARGE_WRITE:
            self._hash.update(data)
            self._raw.write(data)
        else:
            hashed = self._hashing.submit(self._hash.update, data)
            try:
                self._raw.write(data)
            finally:
                # The memory of `data` is the caller's: it may change after this call.
                hashed.result()
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        """Do nothing: `Storage.create` syncs and closes the file."""

    def sha256(self) -> str:
        return self._hash.hexdigest()


def file_damage(
    storage: Storage,
    path: str,
    entry: FileEntry,
    *,
    checksum: bool,
    progress: Progress | None = None,
) -> str | None:
    """Return how a file differs from its manifest entry; None if it does not.

    Args:
        checksum: compare the SHA-256 too, and not only the size.
    """
    try:
        size = storage.size(path)
        if size is None:
            return f"is missing, {entry.size} bytes were written"
        if size != entry.size:
            return f"has {size} bytes, {entry.size} bytes were written"
        if checksum and sha256_of(storage, path, progress) != entry.sha256:
            return "has the right size but other content: its SHA-256 differs from the written one"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def sha256_of(storage: Storage, path: str, progress: Progress | None = None) -> str:
    """Return the SHA-256 of a file, in hex."""
    found = hashlib.sha256()
    with storage.open(path) as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
            if progress is not None:
                progress(len(block))
    return found.hexdigest()


def dump_state(state: Mapping[str, Any]) -> bytes:
    """Return the content of state.json for `state`, with format number and digest."""
    plain = json.loads(json.dumps({"format": FORMAT, **state}))
    return (json.dumps({**plain, "digest": _digest(plain)}, indent=1) + "\n").encode()


def parse_state(data: bytes) -> dict[str, Any]:
    """Return the state that `dump_state` wrote, with "files" as `FileEntry`s.

    Raises:
        DamagedCheckpoint: the content was changed after writing.
        CheckpointError: another version of pipemega wrote it, in another format.
    """
    try:
        state = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{STATE_FILE} is damaged: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        raise DamagedCheckpoint(f"{STATE_FILE} is damaged: it has no list of files")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{STATE_FILE} has format {state.get('format')}, and this version of pipemega reads "
            f"format {FORMAT}: load it with the version that saved it"
        )
    if state.pop("digest", None) != _digest(state):
        raise DamagedCheckpoint(f"{STATE_FILE} is damaged: its digest does not match its content")
    state["files"] = {name: FileEntry(*entry) for name, entry in state["files"].items()}
    return state


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

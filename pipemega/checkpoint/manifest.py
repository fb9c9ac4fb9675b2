"""state.json, the manifest of a checkpoint: the last file that is written.

It lists every other file with its size and the CRC-32 of each of its pieces, and contains a digest
of itself. CRC-32 finds damage at the speed of memory, and pieces can be read in several threads.
Format 2 has the SHA-256 of each file instead; it can still be read.

Collective file operations: all ranks raise the same error, or none does.

An operation that runs on one rank, or that can fail on some ranks only, is followed by an exchange
of the errors. So no rank waits for a failed one, and a caller who catches the error can continue.
"""

import errno
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, TypeVar

import torch.distributed as dist

from pipemega.distributed.mesh import Axis, gather_objects
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import Storage

try:
    # The same CRC-32 as zlib's, at 4 to 9 times its speed.
    from isal.isal_zlib import crc32
except ImportError:  # it has no wheel for every processor
    from zlib import crc32

STATE_FILE = "state.json"
FORMAT = 3

_READABLE_FORMATS = (2, 3)
_CRC32 = "crc32:"
# Bytes that have one checksum. A part of format 3.
_PIECE = 16 << 20
# Bytes of a read: few enough that they are still in the cache when their checksum is computed.
_BLOCK = 1 << 20
# Bytes from which starting a thread is worth it.
_LARGE_WRITE = 1 << 20
_MOST_READERS = 4

Progress = Callable[[int], object]
"""Takes a number of bytes that were read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is missing, incomplete or differs from what was written."""


class FileEntry(NamedTuple):
    """The manifest's entry of a file.

    Args:
        checksum: "crc32:" and the CRC-32 of each piece of 16 MiB in hex; or the SHA-256 in hex.
    """

    size: int
    checksum: str


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
        self.files[name] = FileEntry(stream.tell(), stream.checksum())

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as stream:
            stream.write(data)


class _PieceChecksums:
    """The CRC-32 of each piece of the bytes that are passed to `update`, in order."""

    def __init__(self) -> None:
        self._size, self._pieces = 0, [0]

    def update(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            if self._size and self._size % _PIECE == 0:
                self._pieces.append(0)
            part = rest[: _PIECE - self._size % _PIECE]
            self._pieces[-1] = crc32(part, self._pieces[-1])
            self._size, rest = self._size + len(part), rest[len(part) :]

    def hexdigest(self) -> str:
        return "".join(f"{piece:08x}" for piece in self._pieces)


class _ChecksumStream:
    """Passes writes on to `raw`, and computes their checksums.

    The checksum of a large write is computed in a thread while it is written: both release the
    interpreter lock.
    """

    def __init__(self, raw: IO[bytes], hashing: ThreadPoolExecutor) -> None:
        self._raw, self._size, self._hashing = raw, 0, hashing
        self._pieces = _PieceChecksums()

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < _LARGE_WRITE:
            self._pieces.update(data)
            self._raw.write(data)
        else:
            hashed = self._hashing.submit(self._pieces.update, data)
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
        """Do nothing: `Storage.create` flushes the file."""

    def close(self) -> None:
        """Do nothing: `Storage.create` syncs and closes the file."""

    def checksum(self) -> str:
        return _CRC32 + self._pieces.hexdigest()


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
        checksum: compare the checksum too, and not only the size.
    """
    try:
        size = storage.size(path)
        if size is None:
            return f"is missing; {entry.size} bytes were saved"
        if size != entry.size:
            return f"has {size} bytes; {entry.size} bytes were saved"
        if not checksum:
            return None
        if entry.checksum.startswith(_CRC32):
            kind, found = "CRC-32", _CRC32 + _crc32_of(storage, path, size, progress)
        else:
            kind, found = "SHA-256", _sha256_of(storage, path, progress)
        if found != entry.checksum:
            return f"has the right size but other content: its {kind} differs from the saved one"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def _crc32_of(storage: Storage, path: str, size: int, progress: Progress | None) -> str:
    """Return the CRC-32 of each piece of a file, in hex; several threads read it."""
    pieces = max(1, -(-size // _PIECE))
    readers = num_readers(pieces)
    bounds = [_PIECE * (pieces * reader // readers) for reader in range(readers)] + [size]
    lock = threading.Lock()

    def checksums(start: int, stop: int) -> str:
        found, buffer = _PieceChecksums(), memoryview(bytearray(min(_BLOCK, stop - start)))
        with storage.open(path) as stream:
            stream.seek(start)
            while start < stop:
                count = stream.readinto(buffer[: stop - start])  # type: ignore[attr-defined]
                if not count:
                    break
                found.update(buffer[:count])
                start += count
                if progress is not None:
                    with lock:
                        progress(count)
        return found.hexdigest()

    if readers == 1:
        return checksums(0, size)
    with ThreadPoolExecutor(readers, thread_name_prefix="checksum") as pool:
        return "".join(pool.map(checksums, *zip(*itertools.pairwise(bounds), strict=True)))


def num_readers(parts: int) -> int:
    """Return the threads that read `parts` parts of a checkpoint."""
    return max(1, min(parts, _MOST_READERS, len(os.sched_getaffinity(0))))


def _sha256_of(storage: Storage, path: str, progress: Progress | None) -> str:
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
    if state.get("format") not in _READABLE_FORMATS:
        first, last = _READABLE_FORMATS
        raise CheckpointError(
            f"{STATE_FILE} has format {state.get('format')}, and this version of pipemega reads "
            f"formats {first} and {last}: load it with the version that saved it"
        )
    if state.pop("digest", None) != _digest(state):
        raise DamagedCheckpoint(f"{STATE_FILE} is damaged: its digest does not match its content")
    state["files"] = {name: FileEntry(*entry) for name, entry in state["files"].items()}
    return state


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


class CollectiveIO:
    """Runs file operations on all ranks, or on rank 0; every method is collective.

    Args:
        world: the axis of all ranks.
        storage: the files; errors without a file name give the root of this storage.
    """

    def __init__(self, world: Axis, storage: Storage) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._storage = world, storage

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: _T) -> list[_T]:
        """Return the (small) `value` of every rank, by rank."""
        return gather_objects(value, self._world)

    def gather_to_rank0(self, value: _T) -> list[_T]:
        """Return the `value` of every rank, by rank, on rank 0; [] on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_rank0 else None
        dist.gather_object(value, values, dst=self._world.ranks[0], group=self._world.group)
        return values or []

    def run_on_all(self, action: Callable[[], _T]) -> _T:
        """Run `action` on every rank, and return this rank's result.

        Raises:
            CheckpointError: `action` raised it, or an OSError, on a rank; the message comes from
                the first such rank.
        """
        value: _T | None = None
        cause: CheckpointError | OSError | None = None
        try:
            value = action()
        except (CheckpointError, OSError) as error:
            cause = error
        failures = self.all_gather(None if cause is None else self._message(cause))
        first = next((rank for rank, text in enumerate(failures) if text is not None), None)
        if first is not None:
            prefix = "" if len(set(failures)) == 1 else f"rank {first}: "
            raise CheckpointError(f"{prefix}{failures[first]}", on_every_rank=True) from cause
        return value  # type: ignore[return-value]  # None only if `action` returned it

    def run_on_rank0(self, action: Callable[[], _T]) -> _T:
        """Run `action` on rank 0 only, and return its (picklable) result on all ranks.

        Raises:
            CheckpointError: `action` raised it, or an OSError. It has the same class on all ranks
                and no rank number, because it is about files that all ranks share.
        """
        values: list[Any] = [None, None]
        cause: CheckpointError | OSError | None = None
        if self.is_rank0:
            try:
                values[0] = action()
            except (CheckpointError, OSError) as error:
                cause = error
                kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
                values[1] = kind, self._message(error)
        if self.size > 1:
            source, group = self._world.ranks[0], self._world.group
            dist.broadcast_object_list(values, src=source, group=group)
        result: _T = values[0]
        if values[1] is not None:
            kind, message = values[1]
            raise kind(message, on_every_rank=True) from cause
        return result

    def _message(self, error: CheckpointError | OSError) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        text = f"{error.strerror or error} ({error.filename or self._storage.full_path()})"
        if error.errno in _DISK_FULL:
            with suppress(OSError):
                free = self._storage.free_bytes()
                left = "" if free is None else f"{free / 1e6:.0f} MB are free there: "
                text += f", {left}free some space, or keep fewer checkpoints (checkpoint.keep_last)"
        return text

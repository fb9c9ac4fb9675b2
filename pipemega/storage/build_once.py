"""Atomic files, and results that one process per file system builds.

The data package writes every file through `atomic_path`, and builds what every rank needs through
`build_once`, which locks per file system: ranks with a shared disk build once, nodes with local
disks build once each.
"""

import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipemega.errors import DataError
from pipemega.lazy_imports import deferred
from pipemega.storage.filesystem import LocalStorage, fsync_path
from pipemega.storage.locks import HeartbeatLock, Holder, LockObserver

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]
else:
    np = deferred("numpy")
    Array = Any

T = TypeVar("T")
Say = Callable[[str], None]

HEARTBEAT_SECONDS = 1.0
# A builder may hold the GIL for a while (numpy's shuffle does) and then sends no heartbeat. A
# take-over that comes too early costs only time, since every file is atomic.
SILENCE_SECONDS = 120.0
NOTICE_SECONDS = 2.0


def user_cache_folder() -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME/pipemega, or ~/.cache/pipemega.

    The only function of this package that reads the environment.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "pipemega"


def writable_folder(first: Path, otherwise: Path) -> Path:
    """Return `first` if it is writable (created if missing), else `otherwise`.

    Raises:
        DataError: neither is writable; the message names both.
    """
    reasons = []
    for folder in (first, otherwise):
        probe = folder / f".probe-{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            reasons.append(f"{folder} ({error.strerror})")
        else:
            return folder
    raise DataError(
        f"no folder for cached files is writable: {', '.join(reasons)}; set data.cache_path"
    )


def digest_of(description: Mapping[str, object]) -> str:
    """Return 32 hex digits that identify a JSON-serialisable mapping; key order is ignored."""
    text = json.dumps(description, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` at the end of the block.

    The block writes the temporary file. The file is flushed to disk before the rename, and removed
    if the block raises, so `path` is never partially written.

    Raises:
        DataError: the write failed (no space left, no permission); the message names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def notice_if_slow(message: str, say: Say | None) -> Iterator[None]:
    """Call `say(message)` once if the block takes longer than two seconds."""
    if say is None:
        yield
        return
    timer = threading.Timer(NOTICE_SECONDS, say, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _holder_is_gone(observer: LockObserver) -> bool:
    """Return whether the lock's holder has ended, or sends no heartbeat any more."""
    observer.look()
    process = observer.holder.process
    if process is not None and process.has_ended():
        return True
    return observer.silent_seconds >= SILENCE_SECONDS


_OF_LAUNCHERS = {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"}


def _name_of(holder: Holder) -> str:
    # Processes of one shell have one parent too.
    launched = not _OF_LAUNCHERS.isdisjoint(os.environ)
    if launched and holder.process is not None and holder.process.is_sibling():
        return f"another rank of this run ({holder})"
    return str(holder)


def build_once(
    lock_path: Path,
    *,
    find: Callable[[], T | None],
    build: Callable[[], T],
    what: str,
    deadline_seconds: float = 3600.0,
    say: Say | None = None,
) -> T:
    """Return the result of `find`, else build it; only one process builds at a time.

    Args:
        lock_path: the lock file; its folder must exist.
        find: returns the finished result, or None; it is called first, and again after each wait.
        build: builds the result. An error releases the lock, so the next process tries again.
        what: name of the work in messages.
        deadline_seconds: maximum wait for another builder.
        say: prints or logs the one line that this process shows if it has to wait.

    Raises:
        DataError: the other builder did not finish in time; names it, the lock and the remedy.
    """
    started = time.monotonic()
    storage, name = LocalStorage(lock_path.parent), lock_path.name
    observer = LockObserver(storage, name)
    said = False
    while True:
        found = find()
        if found is not None:
            return found
        lock = HeartbeatLock(storage, name, HEARTBEAT_SECONDS)
        if lock.acquire():
            try:
                # Another process may have finished between find() and acquire().
                found = find()
                return build() if found is None else found
            finally:
                lock.release()
        if _holder_is_gone(observer) and observer.remove():
            continue
        waited = time.monotonic() - started
        if waited > deadline_seconds:
            raise DataError(
                f"{_name_of(observer.holder)} has been building {what} for more than "
                f"{waited:.0f} s; "
                f"if it no longer runs, remove {lock_path}"
            )
        if say is not None and not said and waited > NOTICE_SECONDS:
            say(f"waiting for {_name_of(observer.holder)} to build {what}")
            said = True
        time.sleep(0.05)


def cached_arrays(
    folder: Path,
    stem: str,
    description: Mapping[str, object],
    names: Sequence[str],
    build: Callable[[], Mapping[str, Array]],
    *,
    what: str,
    say: Say | None = None,
) -> dict[str, Array]:
    """Return arrays that are built once, stored as .npy files and memory-mapped.

        <folder>/<digest>-<stem>-<name>.npy ...      one per name
        <folder>/<digest>-<stem>-description.txt     written last: if it exists, all arrays do

    Args:
        description: everything that the arrays depend on; its digest is in the file names.
        build: builds the arrays; called by one process per file system.

    Returns:
        name -> read-only memory map.
    """
    base = f"{digest_of(description)}-{stem}"
    mark = folder / f"{base}-description.txt"

    def path_of(name: str) -> Path:
        return folder / f"{base}-{name}.npy"

    def find() -> dict[str, Array] | None:
        if not mark.exists():
            return None
        try:
            # A truncated or missing .npy is detected here, and built again.
            wanted = json.loads(mark.read_text())["arrays"]
            found = {n: np.load(path_of(n), mmap_mode="r", allow_pickle=False) for n in names}
            if {n: _form(found[n]) for n in names} == {n: wanted[n] for n in names}:
                return found
        except Exception:  # numpy evaluates the header of a .npy as Python: any error is possible
            pass
        mark.unlink(missing_ok=True)
        return None

    def build_and_keep() -> dict[str, Array]:
        built = build()
        for name, array in built.items():
            with atomic_path(path_of(name)) as path, open(path, "wb") as file:
                np.save(file, array, allow_pickle=False)
        said = {**description, "arrays": {name: _form(array) for name, array in built.items()}}
        with atomic_path(mark) as path:
            path.write_text(json.dumps(said, indent=2, sort_keys=True, default=str) + "\n")
        kept = find()
        if kept is None:
            raise DataError(f"{what} was written to {folder}, but cannot be read back")
        return kept

    lock = folder / f"{base}.lock"
    with notice_if_slow(f"building {what} in {folder}", say):
        return build_once(lock, find=find, build=build_and_keep, what=what, say=say)


def _form(array: Array) -> list[object]:
    """Return dtype and shape, JSON-serialisable."""
    return [array.dtype.str, list(array.shape)]

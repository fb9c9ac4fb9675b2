"""Files that are whole or absent, and work that several processes need but only one does.

Everything that this room writes goes through `atomic_path`, and everything that every rank needs
through `build_once`, which locks per file system: ranks that share a disk build once, nodes with
disks of their own build once each, and nobody has to know which of the two is the case.
"""

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipemega.errors import DataError

T = TypeVar("T")
Say = Callable[[str], None]
Array = npt.NDArray[np.generic]

HEARTBEAT_SECONDS = 1.0
# A builder may hold Python's lock for a while (numpy's shuffle does), and then its heart does
# not beat; an early take-over would cost time and nothing else, since every file is atomic.
SILENCE_SECONDS = 120.0
SILENCE_OF_THE_DEAD_SECONDS = 3.0
NOTICE_SECONDS = 2.0


def user_cache_folder() -> Path:
    """The user's cache folder of pipemega: $XDG_CACHE_HOME/pipemega, or ~/.cache/pipemega.

    The one place of this room that reads the environment: XDG_CACHE_HOME is how a user (or a
    batch system with a small home folder) says where caches go, for all programs at once.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "pipemega"


def writable_folder(first: Path, otherwise: Path) -> Path:
    """`first` if it can be made and written to, else `otherwise`.

    Raises:
        DataError: neither can be written to; the message names both.
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
        f"no folder for cached files can be written to: {' nor '.join(reasons)}; "
        "name one with data.cache_path"
    )


def digest_of(description: Mapping[str, object]) -> str:
    """32 hex digits that stand for a JSON-able description, whatever the order of its keys."""
    text = json.dumps(description, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def flush_folder(folder: Path) -> None:
    """Make the renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; it becomes `path` when the block ends well.

    The block writes the temporary file. It is flushed to disk before it gets its name, and
    removed when the block raises, so `path` is never seen half-written.

    Raises:
        DataError: the disk refuses (no space left, no permission); the message names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def notice_if_slow(message: str, say: Say | None) -> Iterator[None]:
    """Say `message` once if the block takes longer than two seconds."""
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


class FileLock:
    """A file that one process at a time can create, and whose time stamp beats while it lives.

    The file names its holder, so that a dead holder on this host is known at once and one on
    another host by its silence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
        )
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self) -> bool:
        """True when this process now holds the lock; never waits."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            file.write(self._text)
        self._heart = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)
        self._heart.start()
        return True

    def release(self) -> None:
        """Give the lock back, unless somebody took it over meanwhile."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
        if _read(self.path) == self._text:
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self.path)
            except OSError:
                return  # taken over; release() sees it too


class _Watch:
    """Tells when the holder of a lock has gone silent, by the watcher's own clock.

    Time stamps are only compared with each other, never with this host's clock: the clocks of a
    cluster differ, and so may that of its file server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, str] | None = None
        self._since = time.monotonic()

    def take_over_if_silent(self) -> bool:
        """Remove the lock of a holder that is gone; True when it was removed."""
        try:
            now = (self.path.stat().st_mtime_ns, _read(self.path))
        except OSError:
            return False
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
            return False
        patience = SILENCE_OF_THE_DEAD_SECONDS if _is_dead(now[1]) else SILENCE_SECONDS
        if time.monotonic() - self._since < patience:
            return False
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:8]}.stale")
        try:
            os.rename(self.path, aside)
        except OSError:
            return False
        aside.unlink(missing_ok=True)
        return True

    def holder(self) -> str:
        """Who holds the lock, in words."""
        text = self._seen[1] if self._seen else _read(self.path)
        try:
            facts = json.loads(text)
            return f"process {facts['pid']} on {facts['host']}"
        except (ValueError, KeyError, TypeError):
            return "an unknown process"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_dead(lock_text: str) -> bool:
    """Whether the lock names a process of this host that no longer runs."""
    try:
        facts = json.loads(lock_text)
        if facts["host"] != socket.gethostname():
            return False
        os.kill(int(facts["pid"]), 0)
    except ProcessLookupError:
        return True
    except (ValueError, KeyError, TypeError, OSError):
        return False
    return False


def build_once(
    lock_path: Path,
    *,
    find: Callable[[], T | None],
    build: Callable[[], T],
    what: str,
    deadline_seconds: float = 3600.0,
    say: Say | None = None,
) -> T:
    """The result of `find`, or of `build` if nobody has built yet; one process builds.

    Args:
        lock_path: the lock; its folder must exist.
        find: gives the finished result, or None; called first, and again after every wait.
        build: makes it. An error of the builder frees the lock, so the next one meets it too.
        what: names the work in messages.
        deadline_seconds: how long to wait for another builder.
        say: takes one line when there is something to wait for.

    Raises:
        DataError: the other builder did not finish in time; names it, the lock and the way out.
    """
    started = time.monotonic()
    watch = _Watch(lock_path)
    said = False
    while True:
        found = find()
        if found is not None:
            return found
        lock = FileLock(lock_path)
        if lock.acquire():
            try:
                # Somebody may have finished between the look and the lock.
                found = find()
                return build() if found is None else found
            finally:
                lock.release()
        if watch.take_over_if_silent():
            continue
        waited = time.monotonic() - started
        if waited > deadline_seconds:
            raise DataError(
                f"{watch.holder()} has been building {what} for more than {waited:.0f} s; "
                f"if it no longer runs, remove {lock_path}"
            )
        if say is not None and not said and waited > NOTICE_SECONDS:
            say(f"waiting for {watch.holder()} to build {what}")
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
    """Arrays that are built once, kept as .npy, and read through the page cache ever after.

        <folder>/<digest>-<stem>-<name>.npy ...      one per name
        <folder>/<digest>-<stem>-description.txt     written last: with it, all are there

    Args:
        description: all that the arrays depend on; its digest is in the file names.
        build: makes the arrays; called by one process per file system.

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
            # A .npy that was cut or removed is found here, and then built again.
            wanted = json.loads(mark.read_text())["arrays"]
            found = {n: np.load(path_of(n), mmap_mode="r", allow_pickle=False) for n in names}
            if {n: _form(found[n]) for n in names} == {n: wanted[n] for n in names}:
                return found
        except Exception:  # numpy reads the header of a .npy as Python, and raises what that gives
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
            raise DataError(f"{what} was written to {folder} and cannot be read back")
        return kept

    lock = folder / f"{base}.lock"
    with notice_if_slow(f"building {what} in {folder}", say):
        return build_once(lock, find=find, build=build_and_keep, what=what, say=say)


def _form(array: Array) -> list[object]:
    """Its dtype and shape, JSON-able."""
    return [array.dtype.str, list(array.shape)]

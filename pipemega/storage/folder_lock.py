"""Locks of the folders that a run writes to, so that a second run does not write to them.

    run.lock    in the folder, while a run writes to it: see `heartbeat_lock`

Only one process of a run, rank 0, holds the lock. A folder that this process holds already can be
locked again. Reading needs no lock.
"""

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipemega.errors import FolderLockedError
from pipemega.storage.filesystem import LocalStorage, Storage
from pipemega.storage.heartbeat_lock import HeartbeatLock, Holder, LockObserver

LOCK_FILE = "run.lock"

HEARTBEAT_SECONDS = 10.0
# A process may hold Python's GIL, or a file server may not respond, for a while.
SILENCE_SECONDS = 120.0
# A file is complete at once, unless its process has ended while it wrote it.
INCOMPLETE_SECONDS = 1.5 * HEARTBEAT_SECONDS
_POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LockOptions:
    """How to lock a folder.

    Args:
        take_over: lock it even if another process holds it.
        wait_seconds: how long to observe a holder on another host before the folder is refused.
    """

    take_over: bool = False
    wait_seconds: float = math.inf


class FolderLocks:
    """The folders that this process has locked.

    Args:
        clock, sleep: in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        # With the pid: a forked process does not hold the locks of its parent.
        self._held: dict[tuple[int, str], HeartbeatLock] = {}
        self._mutex = threading.Lock()
        self._releases_at_exit = False

    def lock(self, storage: Storage, options: LockOptions | None = None) -> None:
        """Lock the root folder of `storage`, and create it first if needed.

        Raises:
            FolderLockedError: another run holds the lock, or has taken it over from this one.
            OSError: the lock file cannot be written.
        """
        with self._mutex:
            if _key(storage) in self._held:
                self._verify(storage)
                return
            target = storage
            if isinstance(storage, LocalStorage):
                storage.make_folder()
                # The script may change its working directory.
                target = LocalStorage(storage.root.resolve())
            lock = HeartbeatLock(target, LOCK_FILE, HEARTBEAT_SECONDS)
            self._acquire(lock, storage, options or LockOptions())
            self._held[_key(storage)] = lock
            if not self._releases_at_exit:
                atexit.register(self.release_all)
                self._releases_at_exit = True

    def verify(self, storage: Storage) -> None:
        """Check that this process has not lost the lock; does nothing if it never locked.

        Raises:
            FolderLockedError: another run has taken the lock over.
            OSError: the lock file cannot be read.
        """
        with self._mutex:
            self._verify(storage)

    def verify_heartbeats(self) -> None:
        """Check what the heartbeats have found out so far, for all folders; reads no file.

        Raises:
            FolderLockedError: another run has taken a lock over.
        """
        for (pid, folder), lock in self._held.items():
            if pid == os.getpid() and lock.lost_to is not None:
                raise _taken_over(folder, lock.lost_to)

    def release(self, storage: Storage) -> None:
        """Release the lock of a folder; does nothing if this process does not hold it."""
        with self._mutex:
            lock = self._held.pop(_key(storage), None)
        if lock is not None:
            with suppress(OSError):
                lock.release()

    def release_all(self) -> None:
        """Release the locks of all folders."""
        with self._mutex:
            mine = [key for key in self._held if key[0] == os.getpid()]
            locks = [self._held.pop(key) for key in mine]
        for lock in locks:
            with suppress(OSError):
                lock.release()

    def _verify(self, storage: Storage) -> None:
        lock = self._held.get(_key(storage))
        if lock is not None and not lock.is_held():
            assert lock.lost_to is not None
            raise _taken_over(storage.full_path(), lock.lost_to)

    def _acquire(self, lock: HeartbeatLock, storage: Storage, options: LockOptions) -> None:
        observer = LockObserver(storage, LOCK_FILE, self._clock)
        started, notified = self._clock(), False
        while not lock.acquire():
            observer.look()
            reason = "checkpoint.take_over is true" if options.take_over else _reason_gone(observer)
            if reason:
                held = _describe(observer)
                if observer.remove():
                    _log.warning("taking over %s from %s: %s", storage.full_path(), held, reason)
                continue
            waited = self._clock() - started
            if _is_alive(observer) or waited > options.wait_seconds:
                raise _in_use(storage, observer)
            if not notified:
                _log.info(
                    "%s was locked by %s: waiting up to %.0f s for its heartbeat",
                    storage.full_path(),
                    _describe(observer),
                    SILENCE_SECONDS,
                )
                notified = True
            self._sleep(_POLL_SECONDS)


folder_locks = FolderLocks()
"""The locks of this process."""


def _key(storage: Storage) -> tuple[int, str]:
    local = isinstance(storage, LocalStorage)
    return os.getpid(), os.path.realpath(storage.full_path()) if local else storage.full_path()


def _reason_gone(observer: LockObserver) -> str:
    """Return why the holder no longer runs; empty if it may run."""
    process = observer.holder.process
    if process is not None and process.has_ended():
        return "this process has ended"
    if process is None and observer.silent_seconds >= INCOMPLETE_SECONDS:
        return f"its lock is incomplete, and had no heartbeat for {INCOMPLETE_SECONDS:.0f} s"
    if observer.silent_seconds >= SILENCE_SECONDS:
        return f"no heartbeat for {SILENCE_SECONDS:.0f} s"
    return ""


def _is_alive(observer: LockObserver) -> bool:
    """Return whether the holder has sent a heartbeat meanwhile, or runs on this host."""
    process = observer.holder.process
    return observer.changes > 0 or (process is not None and process.is_running_here())


def _describe(observer: LockObserver) -> str:
    holder = observer.holder
    who = "an unknown process" if holder.process is None else holder.process.describe()
    since = f", since {holder.since}" if holder.since else ""
    seconds = observer.seconds_since_heartbeat
    return who + since + ("" if seconds is None else f", last heartbeat {_duration(seconds)} ago")


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _in_use(storage: Storage, observer: LockObserver) -> FolderLockedError:
    return FolderLockedError(
        f"another run uses {storage.full_path()}: {_describe(observer)}. Wait until it has ended, "
        f"or choose another folder (checkpoint.save); if you are certain that it no longer runs, "
        f"set checkpoint.take_over to true ({storage.full_path(LOCK_FILE)} is its lock)"
    )


def _taken_over(folder: str, by: Holder) -> FolderLockedError:
    who = "an unknown process" if by.process is None else by.process.describe()
    since = f" at {by.since}" if by.since else ""
    return FolderLockedError(
        f"another run took {folder} over{since}: {who}. This run writes nothing there any more; "
        f"its earlier checkpoints are complete"
    )

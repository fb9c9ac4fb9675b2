"""Locks of the folders that a run writes to, so that a second run does not write to them.

    run.lock    in the folder, while a run writes to it: see `heartbeat_lock`

Only one process of a run, rank 0, holds the lock. A folder that this process holds already can be
locked again. Reading needs no lock.

A lock file that survives crashes: its holder changes its time stamp every few seconds.

    holder     creates the file, which only one process can do, with its identity and a token
               refreshes the file every few seconds, from a thread; removes it at the end
    others     read who holds it. A holder on the same host that has ended is detected at once, and
               any other one by a version of the file that no longer changes

Versions are compared only with each other, never with this host's clock: the clocks of the hosts
and of the file server may differ.

Identity of a process: enough to decide later, on this or another host, whether it has ended.
"""

import atexit
import getpass
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from pipemega.errors import FolderLockedError
from pipemega.storage.filesystem import LocalStorage, Storage


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on a host, and the Slurm job that it belongs to.

    Args:
        host, pid, user: host name, process id and user name, as the system reports them.
        boot: id of the host's current boot.
        namespace: the pid namespace; containers on one host have different ones.
        start_ticks: start time of the process since boot, because pids are used again; 0: unknown.
        job: cluster and id of the Slurm job; empty without Slurm.
        requeues: how often Slurm has requeued the job.
    """

    host: str
    pid: int
    user: str = ""
    boot: str = ""
    namespace: str = ""
    start_ticks: int = 0
    job: str = ""
    requeues: int = 0

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """Return the identity of this process."""
        return cls._of(os.getpid())

    @classmethod
    def parent(cls) -> "ProcessIdentity":
        """Return the identity of the parent process, such as torchrun, in the same job."""
        return cls._of(os.getppid())

    @classmethod
    def _of(cls, pid: int) -> "ProcessIdentity":
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
        with suppress(OSError, KeyError, ImportError):
            user = getpass.getuser()
        environ = os.environ
        job = environ.get("SLURM_JOB_ID", "")
        requeues = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=socket.gethostname(),
            pid=pid,
            user=user,
            boot=_boot_id(),
            namespace=_pid_namespace(),
            start_ticks=_status_of(pid).start_ticks,
            job=f"{environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
            requeues=int(requeues) if requeues.isdigit() else 0,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ProcessIdentity":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: host or pid is missing, or a value has another type.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        known = {name: value for name, value in values.items() if name in kinds}
        wrong = [n for n, value in known.items() if type(value) is not kinds[n]]
        if wrong or not {"host", "pid"} <= known.keys():
            raise ValueError(f"not the identity of a process: {dict(values)}")
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def describe(self) -> str:
        """Return for example "process 4711 on node7 (user alice, Slurm job 12)"."""
        user = f"user {self.user}" if self.user else ""
        job = f"Slurm job {self.job.rpartition('/')[2]}" if self.job else ""
        more = ", ".join(filter(None, (user, job)))
        return f"{self} ({more})" if more else str(self)

    def has_ended(self) -> bool:
        """Return True if the process has certainly ended; False if it runs or is out of sight."""
        now = ProcessIdentity.current()
        if self.job and self.job == now.job and self.requeues < now.requeues:
            # Slurm ends all processes of a job before it requeues the job.
            return True
        return self._is_on_this_host(now) and not self._is_running()

    def is_running_here(self) -> bool:
        """Return True if the process runs, and can be seen from this process."""
        return self._is_on_this_host(ProcessIdentity.current()) and self._is_running()

    def is_sibling(self) -> bool:
        """Return True if the process runs here, with the same parent process as this one."""
        is_other = self.pid != os.getpid() and self.is_running_here()
        return is_other and _status_of(self.pid).parent == os.getppid()

    def _is_on_this_host(self, now: "ProcessIdentity") -> bool:
        return (self.host, self.boot, self.namespace) == (now.host, now.boot, now.namespace)

    def _is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            pass  # a process of another user
        status = _status_of(self.pid)
        ticks = self.start_ticks, status.start_ticks
        reused = all(ticks) and ticks[0] != ticks[1]
        # Z: it has ended, and its parent has not read its exit code yet.
        return status.state != "Z" and not reused


class _Status(NamedTuple):
    """State, parent and start time of a process; "" and 0: unknown."""

    state: str = ""
    parent: int = 0
    start_ticks: int = 0


def _status_of(pid: int) -> _Status:
    """Return the status of a process, from Linux's /proc."""
    try:
        # The name is in parentheses, and may contain spaces and parentheses.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _Status(values[0], int(values[1]), int(values[19]))
    except (OSError, ValueError, IndexError):
        return _Status()


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


@dataclass(frozen=True)
class Holder:
    """The content of a lock file.

    Args:
        process: who holds it; None if the file cannot be read, or is not complete yet.
        since: when the holder acquired it, as ISO text; empty if unknown.
        token: identifies this acquisition; empty if unknown.
    """

    process: ProcessIdentity | None
    since: str = ""
    token: str = ""

    @classmethod
    def parse(cls, data: bytes) -> "Holder":
        try:
            values: dict[str, Any] = json.loads(data)
            process = ProcessIdentity.from_dict(values)
            return cls(process, str(values.get("since", "")), str(values.get("token", "")))
        except (ValueError, AttributeError, RecursionError):
            return cls(None)

    def __str__(self) -> str:
        return "an unknown process" if self.process is None else str(self.process)


class HeartbeatLock:
    """The lock of this process on one file.

    Args:
        storage, name: the lock file.
        heartbeat_seconds: how often the file is refreshed.

    Attributes:
        lost_to: the process that has taken the lock over; None while this process holds it.
    """

    def __init__(self, storage: Storage, name: str, heartbeat_seconds: float) -> None:
        self._storage, self._name = storage, name
        self._heartbeat_seconds, self._beats = heartbeat_seconds, 0
        self._token = uuid.uuid4().hex
        self._facts = {
            **ProcessIdentity.current().to_dict(),
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "token": self._token,
        }
        self.lost_to: Holder | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> bool:
        """Try to create the lock file; return whether this process now holds it. Never waits.

        Raises:
            OSError: the file cannot be created.
        """
        if not self._storage.create_new(self._name, self._data()):
            return False
        # A daemon: it must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._send_heartbeats, name="lock-heartbeat", daemon=True
        )
        self._thread.start()
        return True

    def release(self) -> None:
        """Stop the heartbeat, and delete the lock file unless another process has taken it over.

        Raises:
            OSError: the file cannot be deleted.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._heartbeat_seconds)
        data = self._read()
        if data is not None and Holder.parse(data).token == self._token:
            self._storage.delete_if(self._name, data)

    def is_held(self) -> bool:
        """Read the lock file; return whether this process still holds it.

        A file that somebody has deleted is created again, so that its absence is no second loss.

        Raises:
            OSError: the file cannot be read.
        """
        if self.lost_to is not None:
            return False
        data = self._read()
        if data is None and self._storage.create_new(self._name, self._data()):
            return True
        holder = Holder.parse(data or self._read() or b"")
        if holder.token != self._token:
            self.lost_to = holder
        return self.lost_to is None

    def beat(self) -> None:
        """Refresh the file, unless another process has taken the lock over.

        Raises:
            OSError: the file cannot be read or refreshed.
        """
        if self.is_held():
            self._beats += 1
            self._storage.refresh(self._name, self._data())

    def _send_heartbeats(self) -> None:
        while self.lost_to is None and not self._stop.wait(self._heartbeat_seconds):
            try:
                self.beat()
            except OSError:
                # The file server may respond again before others see this holder as silent.
                continue

    def _data(self) -> bytes:
        return json.dumps({**self._facts, "beats": self._beats}).encode()

    def _read(self) -> bytes | None:
        try:
            return self._storage.read(self._name)
        except FileNotFoundError:
            return None


class LockObserver:
    """Observes the lock file of another process.

    Args:
        storage, name: the lock file.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, storage: Storage, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage, self._name, self._clock = storage, name, clock
        self._version: object | None = None
        self._data = b""
        self._changed_at = clock()
        self.changes = -1

    def look(self) -> None:
        """Read the file; count a change if it differs from the last look.

        Raises:
            OSError: the file cannot be read.
        """
        version = self._storage.version(self._name)
        if version == self._version:
            return
        self._version, self._changed_at = version, self._clock()
        self.changes += 1
        try:
            self._data = self._storage.read(self._name)
        except FileNotFoundError:
            self._data = b""

    @property
    def holder(self) -> Holder:
        """The holder at the last look."""
        return Holder.parse(self._data)

    @property
    def silent_seconds(self) -> float:
        """Seconds since this observer saw the file change."""
        return self._clock() - self._changed_at

    @property
    def seconds_since_heartbeat(self) -> float | None:
        """Seconds since the last heartbeat, if the storage tells; for messages only."""
        modified = self._storage.modified_at(self._name)
        return None if modified is None else max(0.0, time.time() - modified)

    def remove(self) -> bool:
        """Remove the file unless it changed after the last look; return whether it was removed."""
        return self._version is not None and self._storage.delete_if(self._name, self._data)


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
        clock: a monotonic clock, in seconds.
        sleep: waits for a number of seconds.
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

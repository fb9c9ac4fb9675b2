"""A lock file that survives crashes: its holder changes its time stamp every few seconds.

    holder     creates the file, which only one process can do, with its identity and a token
               refreshes the file every few seconds, from a thread; removes it at the end
    others     read who holds it. A holder on the same host that has ended is detected at once, and
               any other one by a version of the file that no longer changes

Versions are compared only with each other, never with this host's clock: the clocks of the hosts
and of the file server may differ.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pipemega.storage.filesystem import Storage
from pipemega.storage.process_identity import ProcessIdentity


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
        """Read the lock file; return whether it is still that of this process.

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
        """Remove the file if it is that of the last look; return whether it was removed."""
        return self._version is not None and self._storage.delete_if(self._name, self._data)

"""A sink in a thread of its own: neither its errors nor its slowness are the run's."""

import threading
import time
from collections import deque
from contextlib import suppress

from pipemega.monitor.records import Record
from pipemega.monitor.sinks import Sink, State

# What a sink may take for one call (a server that is asked for a run may be slow to answer), for
# the rest when the run is over, and how many records may wait for it.
PATIENCE_SECONDS = 120.0
CLOSE_SECONDS = 60.0
MOST_WAITING = 10_000

# How long a sink that was left behind gets to see that it is, in seconds.
_LAST_MOMENT = 0.5


class Background(Sink):
    """Opens, writes to and closes another sink in a thread; the run only hands records over.

    An error of the sink is raised by the next call, one that hangs is given up after a while and
    left behind: its thread does not keep the process from ending.

    Args:
        sink: not opened yet.
        patience_seconds: for opening it, and for one record.
        close_seconds: for all that still waits when the run is over.

    Raises:
        TimeoutError: on writing and closing, the sink hangs, or is far behind.
        Exception: what the sink raised.
    """

    def __init__(
        self,
        sink: Sink,
        patience_seconds: float = PATIENCE_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.name = sink.name
        self._sink = sink
        self._patience, self._close_within = patience_seconds, close_seconds
        self._waiting: deque[Record] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        # When it began with what it is at; None while it waits for records.
        self._since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._work, name=f"monitor-{sink.name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        with self._news:
            self._refuse_broken()
            self._waiting.append(record)
            self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._error is None and not self._hangs:
            self._thread.join(self._close_within)
        if self._thread.is_alive() and self._error is None:
            self._sink.abandon()
            # What it waited for may be gone now; and a thread that still writes to the terminal
            # when Python shuts down takes the process with it.
            self._thread.join(_LAST_MOMENT)
            raise TimeoutError(
                f"it is still busy after {self._close_within:g} s, and is left behind with "
                f"{len(self._waiting)} records to write"
            )
        if self._error is not None:
            raise self._error

    def state_dict(self) -> State:
        return self._sink.state_dict()

    @property
    def _hangs(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > self._patience

    def _refuse_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._hangs:
            raise TimeoutError(f"it has not come back for {self._patience:g} s")
        if len(self._waiting) >= MOST_WAITING:
            raise TimeoutError(f"it is {MOST_WAITING:,} records behind")

    def _work(self) -> None:
        try:
            self._sink.open()
            while (record := self._next()) is not None:
                self._sink.write(record)
            self._sink.close()
        except Exception as error:
            self._error = error
            with suppress(Exception):
                self._sink.close()
        finally:
            self._since = None

    def _next(self) -> Record | None:
        """The record that has waited for longest; None when the run is over."""
        with self._news:
            self._since = None
            while not self._waiting and not self._closed:
                self._news.wait()
            self._since = time.monotonic()
            return self._waiting.popleft() if self._waiting else None

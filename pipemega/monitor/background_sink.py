"""Runs a sink in a thread, so that a slow or broken sink does not delay or end the run."""

import threading
import time
from collections import deque
from contextlib import suppress

from pipemega.monitor.records import Record
from pipemega.monitor.sinks import Sink, State

# Timeout of one call of a sink (a server may be slow to create a run), timeout of the remaining
# records when the run is over, and the size of the queue.
CALL_SECONDS = 120.0
CLOSE_SECONDS = 60.0
MOST_QUEUED = 10_000

# After `abandon`, how long to wait for the thread to notice, in seconds.
_ABANDON_SECONDS = 0.5


class BackgroundSink(Sink):
    """Opens, writes to and closes another sink in a daemon thread; `write` only queues a record.

    The next call raises an error of the sink. A sink that hangs is abandoned after a timeout; its
    thread does not keep the process from ending.

    Args:
        sink: not opened yet.
        call_seconds: timeout of opening it, and of writing one record.
        close_seconds: timeout of writing all queued records when the run is over.

    Raises:
        TimeoutError: in `write` and `close`, if the sink hangs or the queue is full.
        Exception: what the sink raised.
    """

    def __init__(
        self,
        sink: Sink,
        call_seconds: float = CALL_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.name = sink.name
        self._sink = sink
        self._call_seconds, self._close_seconds = call_seconds, close_seconds
        self._queue: deque[Record] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        # Start of the current call of the sink; None while the thread waits for records.
        self._call_started: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"monitor-{sink.name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        with self._changed:
            self._raise_if_broken()
            self._queue.append(record)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._error is None and not self._hangs:
            self._thread.join(self._close_seconds)
        if self._thread.is_alive() and self._error is None:
            self._sink.abandon()
            # The abandoned call may return now. A thread that still writes to the terminal while
            # Python shuts down would crash the process.
            self._thread.join(_ABANDON_SECONDS)
            raise TimeoutError(
                f"it is still busy after {self._close_seconds:g} s; "
                f"{len(self._queue)} records were not written"
            )
        if self._error is not None:
            raise self._error

    def state_dict(self) -> State:
        return self._sink.state_dict()

    @property
    def _hangs(self) -> bool:
        started = self._call_started
        return started is not None and time.monotonic() - started > self._call_seconds

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._hangs:
            raise TimeoutError(f"it has not returned for {self._call_seconds:g} s")
        if len(self._queue) >= MOST_QUEUED:
            raise TimeoutError(f"its queue is full: {MOST_QUEUED:,} records wait")

    def _run(self) -> None:
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
            self._call_started = None

    def _next(self) -> Record | None:
        """Wait for and return the oldest queued record; None when the run is over."""
        with self._changed:
            self._call_started = None
            while not self._queue and not self._closed:
                self._changed.wait()
            self._call_started = time.monotonic()
            return self._queue.popleft() if self._queue else None

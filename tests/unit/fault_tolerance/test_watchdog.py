"""The thread that watches a rank."""

import threading
import time

import pytest

from pipemega.fault_tolerance import watchdog
from pipemega.fault_tolerance.failure_store import FailureStore


class SlowStore:
    """A store whose answer takes longer than two polls."""

    world_size = 2

    def __init__(self) -> None:
        self.asked = threading.Event()

    def failure_known(self) -> bool:
        self.asked.set()
        time.sleep(0.5)
        return False


def test_the_thread_has_ended_after_the_block_although_the_store_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a call of the store at the end of the interpreter, it aborted a rank that had finished."""
    store = SlowStore()
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(FailureStore, "connect", lambda: store)
    with watchdog.watchdog():
        assert store.asked.wait(10)
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]

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


def test_a_store_that_never_answers_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Rank 0 held the store and was suspended: the watchdog of another rank waited for an answer
    for ever, while its main thread waited for rank 0 in a call with a longer timeout."""
    answer, ends = threading.Event(), list[tuple[str, str]]()
    request.addfinalizer(answer.set)
    store = SlowStore()
    monkeypatch.setattr(store, "failure_known", answer.wait)
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "_timeout", lambda: 0.1)
    monkeypatch.setattr(watchdog, "_exit", lambda *words: ends.append(words))
    monkeypatch.setattr(FailureStore, "connect", lambda: store)
    with watchdog.watchdog():
        deadline = time.monotonic() + 30
        while not ends and time.monotonic() < deadline:
            time.sleep(0.05)
    ((cause, location),) = ends
    assert cause == "the store of the process group is gone or does not respond"
    assert "in test_a_store_that_never_answers_ends_the_process" in location

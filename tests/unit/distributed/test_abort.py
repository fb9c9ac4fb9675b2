"""Communicators are aborted all at once, and an abort that is stuck delays nothing."""

import threading
import time

import pytest

from pipemega.distributed import process_groups


class Backend:
    def __init__(self, calls: list[str], name: str, *, stuck: bool = False) -> None:
        self._calls, self._name, self._stuck = calls, name, stuck

    def _group_start(self) -> None:
        self._calls.append("start")

    def _group_end(self) -> None:
        self._calls.append("end")

    def abort(self) -> None:
        self._calls.append(self._name)
        if self._stuck:
            threading.Event().wait(3)
        raise RuntimeError("an error of one does not keep the others from their abort")


def test_all_communicators_are_aborted_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    backends = [Backend(calls, name) for name in "abc"]
    monkeypatch.setattr(process_groups, "_backends", lambda: backends)
    assert process_groups.abort_communicators()
    assert calls == ["start", "a", "b", "c", "end"]


def test_an_abort_that_is_stuck_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(process_groups, "ABORT_SECONDS", 0.1)
    monkeypatch.setattr(process_groups, "_backends", lambda: [Backend(calls, "a", stuck=True)])
    began = time.monotonic()
    assert not process_groups.abort_communicators()
    # A second call neither waits for the first nor disturbs it.
    assert process_groups.abort_communicators()
    assert time.monotonic() - began < 1.0
    assert calls == ["start", "a"]


def test_without_nccl_there_is_nothing_to_abort() -> None:
    assert process_groups.abort_communicators()

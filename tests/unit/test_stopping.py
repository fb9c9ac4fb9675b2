"""What a run that is asked to stop takes note of, in one process."""

import os
import signal
from unittest import mock

import pytest

from pipemega.failure import FailureBoard, Stopped
from pipemega.mesh import Axis
from pipemega.stopping import StopRequest, is_heeded

ALONE = Axis("world")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_signal_is_a_wish_and_the_handlers_stay(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = StopRequest(ALONE)
    try:
        with stop:
            assert is_heeded()
            assert not stop.wanted()
            os.kill(os.getpid(), number)
            assert stop.wanted()
        assert stop.reasons() == number.name
        assert f"{number.name}: the run ends after this step" in capfd.readouterr().err
        assert is_heeded(), "the process is about to end: the next signal must end it at once"
    finally:
        stop.let_go()
    assert not is_heeded()


def test_without_a_signal_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(ALONE):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_signal_ends_the_process_with_its_number(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stop = StopRequest(ALONE)
    try:
        with stop, mock.patch("os._exit") as end:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        end.assert_called_once_with(128 + signal.SIGTERM)
    finally:
        stop.let_go()
    assert "rank 0: SIGTERM after SIGUSR1: ended at once" in capfd.readouterr().err


def test_the_same_signal_twice_at_once_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler signals torchrun and its ranks, and torchrun hands its own on to them."""
    now = [100.0]
    monkeypatch.setattr("pipemega.stopping.time.monotonic", lambda: now[0])
    stop = StopRequest(ALONE)
    try:
        with stop, mock.patch("os._exit") as end:
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 1.0
            os.kill(os.getpid(), signal.SIGTERM)
            end.assert_not_called()
            now[0] += 5.0
            os.kill(os.getpid(), signal.SIGTERM)
        end.assert_called_once_with(128 + signal.SIGTERM)
    finally:
        stop.let_go()


def test_sigterm_after_another_rank_has_failed_is_no_wish() -> None:
    stop = StopRequest(ALONE)
    try:
        with (
            stop,
            mock.patch.object(FailureBoard, "is_told", return_value=True),
            pytest.raises(Stopped),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.wanted()
    finally:
        stop.let_go()


def test_minutes_are_counted_by_rank_0_alone() -> None:
    now = [100.0]
    first = StopRequest(ALONE, 2.0, clock=lambda: now[0], started=100.0)
    other = StopRequest(Axis("world", (0, 1), 1), 2.0, clock=lambda: now[0], started=100.0)
    now[0] += 119.0
    assert not first.wanted()
    now[0] += 1.0
    assert first.wanted()
    assert not other.wanted()
    assert first.reasons() == "training.exit_after_minutes is 2"

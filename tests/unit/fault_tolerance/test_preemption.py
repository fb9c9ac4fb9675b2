"""StopRequest in one process: signals and the time limit."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from pipemega.distributed.mesh import Axis
from pipemega.errors import Stopped
from pipemega.fault_tolerance.error_propagation import FailureReporter
from pipemega.fault_tolerance.preemption import StopRequest, handles_sigterm

ALONE = Axis("world")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_signal_is_a_stop_request_and_the_handlers_stay(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = StopRequest(ALONE)
    try:
        with stop:
            assert handles_sigterm()
            assert not stop.requested()
            os.kill(os.getpid(), number)
            assert stop.requested()
        assert stop.reasons() == number.name
        assert f"{number.name}: the run ends after this step" in capfd.readouterr().err
        assert handles_sigterm(), "the process is about to end: the next signal must end it at once"
    finally:
        stop.restore_handlers()
    assert not handles_sigterm()


def test_without_a_signal_the_earlier_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(ALONE):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_signal_exits_with_128_plus_its_number(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stop = StopRequest(ALONE)
    try:
        with stop, mock.patch("os._exit") as end:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        end.assert_called_once_with(128 + signal.SIGTERM)
    finally:
        stop.restore_handlers()
    assert "rank 0: SIGTERM after SIGUSR1: exiting at once" in capfd.readouterr().err


def test_the_same_signal_twice_within_two_seconds_is_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler signals torchrun and its ranks, and torchrun forwards its signal to them."""
    now = [100.0]
    monkeypatch.setattr("pipemega.fault_tolerance.preemption.time.monotonic", lambda: now[0])
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
        stop.restore_handlers()


def test_sigterm_after_the_failure_of_another_rank_is_not_a_stop_request() -> None:
    stop = StopRequest(ALONE)
    try:
        with (
            stop,
            mock.patch.object(FailureReporter, "failure_known", return_value=True),
            pytest.raises(Stopped),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested()
    finally:
        stop.restore_handlers()


def test_only_rank_0_checks_the_time_limit() -> None:
    now = [100.0]
    first = StopRequest(ALONE, 2.0, clock=lambda: now[0], started=100.0)
    other = StopRequest(Axis("world", (0, 1), 1), 2.0, clock=lambda: now[0], started=100.0)
    now[0] += 119.0
    assert not first.requested()
    now[0] += 1.0
    assert first.requested()
    assert not other.requested()
    assert first.reasons() == "training.exit_after_minutes is 2"


def test_the_kill_switch_file_is_a_stop_request_also_if_it_is_deleted_later(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    stop = StopRequest(ALONE, kill_switch=str(file))
    assert not stop.requested()
    assert stop.reason_at_start() == ""
    file.touch()
    assert stop.reason_at_start() == f"training.kill_switch_path: found {file}"
    assert stop.requested()
    file.unlink()
    assert stop.reasons() == f"training.kill_switch_path: found {file}"


def test_only_rank_0_looks_for_the_kill_switch_file(tmp_path: Path) -> None:
    other = Axis("world", rank=1, ranks=(0, 1))
    assert not StopRequest(other, kill_switch=str(tmp_path)).requested()

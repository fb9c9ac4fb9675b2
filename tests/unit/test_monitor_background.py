"""Sinks that fail, are slow, or never come back: the run goes on, at its pace, with one warning."""

import logging
import threading
import time
from pathlib import Path

import pytest

from pipemega.monitor import Background, CsvSink, JsonLinesSink, Monitor, Sink, WandbSink
from tests.unit.monitor_records import step_record
from tests.unit.test_monitor_sinks import rows
from tests.unit.test_monitor_wandb import Refused, StandIn

LOGGER = logging.getLogger("pipemega.test_monitor")


class Obstinate(Sink):
    """Does not come back from one of its methods until it is released, or raises there."""

    name = "obstinate"

    def __init__(self, where: str, raises: bool = False) -> None:
        self.where, self.raises = where, raises
        self.release = threading.Event()
        self.steps: list[int] = []
        self.abandoned = False

    def _pass(self, where: str) -> None:
        if where == self.where:
            if self.raises:
                raise OSError(28, "No space left on device")
            self.release.wait(20)

    def open(self) -> None:
        self._pass("open")

    def write(self, record) -> None:
        self._pass("write")
        self.steps.append(record.step)

    def close(self) -> None:
        self._pass("close")

    def abandon(self) -> None:
        self.abandoned = True


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= 30]


def run_with(sink: Sink, file: Path, patience: float = 0.15) -> tuple[list[dict], float]:
    """Twenty steps beside a sink that works; what that one wrote, and the seconds of it all."""
    background = Background(sink, patience_seconds=patience, close_seconds=0.2)
    monitor = Monitor([background, JsonLinesSink(file)], LOGGER)
    started = time.monotonic()
    for step in range(1, 21):
        monitor.write(step_record(step))
        time.sleep(0.02)  # a step of the training
    monitor.close()
    return rows(file), time.monotonic() - started


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_raises_in_its_thread_is_off_after_one_warning(where, tmp_path, caplog):
    written, _ = run_with(Obstinate(where, raises=True), tmp_path / "m.jsonl")
    assert [row["step"] for row in written] == list(range(1, 21))
    (warning,) = warnings_of(caplog)
    assert "'obstinate' failed" in warning
    assert "No space left on device" in warning


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_never_comes_back_costs_the_run_no_more_than_a_moment(where, tmp_path, caplog):
    sink = Obstinate(where)
    written, seconds = run_with(sink, tmp_path / "m.jsonl")
    assert [row["step"] for row in written] == list(range(1, 21))
    assert seconds < 20 * 0.02 + 1.5
    (warning,) = warnings_of(caplog)
    assert "TimeoutError: it " in warning
    assert sink.abandoned
    sink.release.set()


def test_no_step_waits_for_a_slow_sink_and_nothing_of_it_is_lost(tmp_path):
    class Slow(Obstinate):
        def write(self, record) -> None:
            time.sleep(0.02)
            super().write(record)

    sink = Slow("")
    background = Background(sink)
    started = time.monotonic()
    for step in range(1, 21):
        background.write(step_record(step))
    assert time.monotonic() - started < 0.2
    background.close()
    assert sink.steps == list(range(1, 21))


def test_a_sink_that_falls_far_behind_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr("pipemega.monitor.background.MOST_WAITING", 5)
    sink = Obstinate("write")
    monitor = Monitor([Background(sink, close_seconds=0.1)], LOGGER)
    for step in range(1, 11):
        monitor.write(step_record(step))
    assert "it is 5 records behind" in warnings_of(caplog)[0]
    sink.release.set()


def test_a_wandb_that_fails_in_each_of_its_calls_stops_nothing(tmp_path, caplog):
    class Failing(StandIn):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

        def init(self, **arguments):
            if self.where == "init":
                raise ValueError("not even one of wandb's own errors")
            return super().init(**arguments)

        def log(self, point):
            if self.where == "log":
                raise Refused("server on fire")
            super().log(point)

        def finish(self):
            if self.where == "finish":
                raise BrokenPipeError("the service is gone")
            super().finish()

    for where in ("init", "log", "finish"):
        caplog.clear()
        sink = WandbSink(tmp_path, logger=LOGGER, module=Failing(where))
        run_with(sink, tmp_path / f"{where}.jsonl")
        assert len(rows(tmp_path / f"{where}.jsonl")) == 20
        assert len(warnings_of(caplog)) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_csv_on_a_full_disk_is_off_after_one_warning(tmp_path, caplog):
    sink = CsvSink(tmp_path / "csv")
    (tmp_path / "csv" / "Train_Samples_train_loss.csv").symlink_to("/dev/full")
    run_with(sink, tmp_path / "m.jsonl")
    (warning,) = warnings_of(caplog)
    assert "'csv_monitor' failed" in warning
    assert "No space left on device" in warning

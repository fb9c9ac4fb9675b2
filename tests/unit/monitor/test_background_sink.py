"""Sinks that fail, are slow, or hang do not delay the run and cause one warning."""

import logging
import threading
import time
from pathlib import Path

import pytest

from pipemega.monitor import BackgroundSink, CsvSink, JsonLinesSink, Monitor, Sink, WandbSink
from tests.unit.monitor.sample_records import step_record
from tests.unit.monitor.test_sinks import rows
from tests.unit.monitor.test_wandb_sink import FakeWandb, Refused

LOGGER = logging.getLogger("pipemega.test_monitor")


class BrokenSink(Sink):
    """Hangs in one of its methods until it is released, or raises in it."""

    name = "broken"

    def __init__(self, where: str, raises: bool = False) -> None:
        self.where, self.raises = where, raises
        self.release = threading.Event()
        self.steps: list[int] = []
        self.abandoned = False

    def _fail_in(self, where: str) -> None:
        if where == self.where:
            if self.raises:
                raise OSError(28, "No space left on device")
            self.release.wait(20)

    def open(self) -> None:
        self._fail_in("open")

    def write(self, record) -> None:
        self._fail_in("write")
        self.steps.append(record.step)

    def close(self) -> None:
        self._fail_in("close")

    def abandon(self) -> None:
        self.abandoned = True


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= 30]


def run_with(
    sink: Sink, file: Path, call_seconds: float = 0.15, close_seconds: float = 0.2
) -> tuple[list[dict], float]:
    """Write 20 steps to `sink` and to a file; return the rows of the file and the seconds."""
    background = BackgroundSink(sink, call_seconds=call_seconds, close_seconds=close_seconds)
    monitor = Monitor([background, JsonLinesSink(file)], LOGGER)
    started = time.monotonic()
    for step in range(1, 21):
        monitor.write(step_record(step))
        time.sleep(0.02)  # a step of the training
    monitor.close()
    return rows(file), time.monotonic() - started


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_raises_in_its_thread_is_off_after_one_warning(where, tmp_path, caplog):
    written, _ = run_with(BrokenSink(where, raises=True), tmp_path / "m.jsonl", 20, 20)
    assert [row["step"] for row in written] == list(range(1, 21))
    (warning,) = warnings_of(caplog)
    assert "'broken' failed" in warning
    assert "No space left on device" in warning


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_hanging_sink_does_not_delay_the_run(where, tmp_path, caplog):
    sink = BrokenSink(where)
    written, seconds = run_with(sink, tmp_path / "m.jsonl")
    assert [row["step"] for row in written] == list(range(1, 21))
    assert seconds < 20  # the sink hangs that long
    (warning,) = warnings_of(caplog)
    assert "TimeoutError: it " in warning
    assert sink.abandoned
    sink.release.set()


def test_no_step_waits_for_a_slow_sink_and_all_its_records_are_written(tmp_path):
    sink = BrokenSink("write")
    background = BackgroundSink(sink)
    for step in range(1, 21):
        background.write(step_record(step))
    assert sink.steps == []
    sink.release.set()
    background.close()
    assert sink.steps == list(range(1, 21))


def test_a_sink_with_a_full_queue_is_switched_off(monkeypatch, caplog):
    monkeypatch.setattr("pipemega.monitor.sinks.MOST_QUEUED", 5)
    sink = BrokenSink("write")
    monitor = Monitor([BackgroundSink(sink, close_seconds=0.1)], LOGGER)
    for step in range(1, 11):
        monitor.write(step_record(step))
    assert "its queue is full: 5 records wait" in warnings_of(caplog)[0]
    sink.release.set()


def test_a_wandb_that_fails_in_any_call_does_not_stop_the_run(tmp_path, caplog):
    class Failing(FakeWandb):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

        def init(self, **arguments):
            if self.where == "init":
                raise ValueError("not a wandb error")
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
    (tmp_path / "csv" / "train_loss.csv").symlink_to("/dev/full")
    run_with(sink, tmp_path / "m.jsonl")
    (warning,) = warnings_of(caplog)
    assert "'csv_monitor' failed" in warning
    assert "No space left on device" in warning

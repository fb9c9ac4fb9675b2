"""Sinks that write records to files, and `Monitor`, which combines several sinks.

Runs a sink in a thread, so that a slow or broken sink does not delay or end the run.
"""

import csv
import json
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipemega.errors import ConfigError
from pipemega.monitor.records import (
    MetricNames,
    PictureRecord,
    Record,
    SampleRecord,
    TimelineRecord,
    in_names,
    metric_name,
)

State = dict[str, Any]


@dataclass(frozen=True)
class ResumePoint:
    """The last step of a resumed run's checkpoint; records after it are dropped and rewritten."""

    step: int
    consumed_samples: int


class Sink(ABC):
    """Writes records until it is closed. May raise; `Monitor` handles that."""

    name: str

    def open(self) -> None:  # noqa: B027 - most sinks do nothing
        """Do slow work, such as a request to a server; called once before the first record."""

    @abstractmethod
    def write(self, record: Record) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def abandon(self) -> None:  # noqa: B027 - most sinks do nothing
        """Release what keeps the process from ending; called if the sink hangs in its thread."""

    def state_dict(self) -> State:
        """Return what the sink of this name needs in a resumed run; {} for nothing."""
        return {}


class Monitor(Sink):
    """Writes each record to several sinks; their errors do not stop the training.

    A sink that raises is logged once and switched off; the other sinks and the run continue.

    Args:
        sinks: the sinks, in the order in which they get a record.
        logger: logs the errors.
        state: `state_dict()` of the run's checkpoint; also keeps the state of sinks that are off
            in this run, for a later one.
    """

    name = "monitor"

    def __init__(
        self,
        sinks: Sequence[Sink],
        logger: logging.Logger,
        state: Mapping[str, State] | None = None,
    ) -> None:
        self._sinks = list(sinks)
        self._logger = logger
        self._state = dict(state or {})
        self._keep_states()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sinks that are on."""
        return tuple(sink.name for sink in self._sinks)

    def write(self, record: Record) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:
                self._switch_off(sink, record.step, error)

    def close(self) -> None:
        self._keep_states()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._logger.warning(
                    "the monitor '%s' failed when it was closed: %s", sink.name, _describe(error)
                )
        self._sinks = []

    def state_dict(self) -> State:
        self._keep_states()
        return dict(self._state)

    def _keep_states(self) -> None:
        self._state |= {sink.name: state for sink in self._sinks if (state := sink.state_dict())}

    def _switch_off(self, sink: Sink, step: int, error: Exception) -> None:
        self._logger.warning(
            "the monitor '%s' failed at step %d and is off for the rest of this run, "
            "which continues: %s",
            sink.name,
            step,
            _describe(error),
        )
        self._keep_states()
        self._sinks.remove(sink)
        try:
            sink.close()
        except Exception:
            # The sink has already been reported as broken.
            self._logger.debug("closing the monitor '%s' failed too", sink.name, exc_info=True)


class JsonLinesSink(Sink):
    """Writes each record as one line of JSON and flushes it, so that `tail -f` and `jq` work.

    JSON has no NaN: a non-finite number is the string "nan", "inf" or "-inf", which Python's
    float() reads; null means that the number is unknown.

    Args:
        path: the file; missing folders are created.
        resume: the point from which the run continues. The file is then continued, without its
            lines after this point and without an incomplete last line. None starts a new file and
            renames an existing one to `metrics.1.jsonl` (or the next free number).
    """

    name = "jsonl"

    def __init__(self, path: str | Path, resume: ResumePoint | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume is None:
            _rename_existing(path)
        else:
            _keep_lines(path, lambda line: _json_step(line) <= resume.step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(_to_json(record.row()), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvSink(Sink):
    """Writes one CSV file per metric, as DeepSpeed's csv_monitor: consumed samples and value.

        output_path/job_name/train_loss.csv     step,loss
                                                64,9.0139

    The column of consumed samples has the heading "step", as in DeepSpeed. A resumed run continues
    the files without a second heading and drops the rows after the point that it resumes from.

    Args:
        folder: output_path/job_name.
        resume: the point from which the run continues; None for a new run.
        names: how the metrics are named.
    """

    name = "csv_monitor"

    def __init__(
        self,
        folder: str | Path,
        resume: ResumePoint | None = None,
        names: MetricNames = "grouped",
    ) -> None:
        self._folder, self._names = Path(folder), names
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume = resume
        self._files: dict[str, TextIO] = {}

    def write(self, record: Record) -> None:
        for tag, value in in_names(self._names, record.scalars()).items():
            if tag not in self._files:
                self._files[tag] = self._open(tag)
            csv.writer(self._files[tag]).writerow([record.consumed_samples, value])
            self._files[tag].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, tag: str) -> TextIO:
        path = self._folder / (tag.replace("/", "_").replace(" ", "_") + ".csv")
        if self._resume is None:
            _rename_existing(path)
        else:
            last = self._resume.consumed_samples
            _keep_lines(path, lambda row: _csv_samples(row) <= last)
        is_new = not path.exists()
        file = path.open("a", encoding="utf-8", newline="")
        if is_new:
            csv.writer(file).writerow(["step", tag.rsplit("/", maxsplit=1)[-1]])
        return file


class TensorboardSink(Sink):
    """Writes TensorBoard event files over consumed samples.

    Args:
        folder: output_path/job_name.
        resume: TensorBoard hides the points of earlier runs after it.
        names: how the metrics are named.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    name = "tensorboard"

    def __init__(
        self,
        folder: str | Path,
        resume: ResumePoint | None = None,
        names: MetricNames = "grouped",
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard.enabled is true, but TensorBoard is not installed: "
                "pip install -e '.[tensorboard]', or set tensorboard.enabled to false"
            ) from error
        self._folder, self._writer_of, self._names = str(folder), SummaryWriter, names
        self._purge = None if resume is None else resume.consumed_samples + 1

    def open(self) -> None:
        self._writer = self._writer_of(log_dir=self._folder, purge_step=self._purge)

    def write(self, record: Record) -> None:
        for tag, value in in_names(self._names, record.scalars()).items():
            self._writer.add_scalar(tag, value, record.consumed_samples)
        if isinstance(record, SampleRecord):
            text = record.prompt + record.text
            self._writer.add_text("eval/samples", text, record.consumed_samples)
        if isinstance(record, TimelineRecord | PictureRecord) and record.picture is not None:
            # matplotlib has drawn the picture, so it is installed.
            from matplotlib.image import imread

            picture, samples = imread(record.picture), record.consumed_samples
            name = metric_name(self._names, record.picture_name)
            self._writer.add_image(name, picture, samples, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


# Section of the config -> sink that writes into a folder of its own.
FILE_SINKS: Mapping[str, Callable[..., Sink]] = {
    "csv_monitor": CsvSink,
    "tensorboard": TensorboardSink,
}


def _to_json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return value


def _json_step(line: str) -> float:
    """Return the step of a JSON line; inf for a line without one, so that it is dropped."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _csv_samples(row: str) -> float:
    """Return the consumed samples of a CSV row; -inf for the heading, inf for a damaged row."""
    first, comma, _ = row.partition(",")
    if first == "step":
        return -math.inf
    return float(first) if comma and first.isdecimal() else math.inf


def _rename_existing(path: Path) -> None:
    """Rename an existing file: a new run must not overwrite the numbers of an old one."""
    if not path.is_file():  # such as /dev/stdout
        return
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)


def _keep_lines(path: Path, keep: Callable[[str], bool]) -> None:
    """Drop incomplete lines and those that `keep` rejects, atomically, if the file exists."""
    if not path.is_file():
        return
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("w", encoding="utf-8", newline="") as kept:
            with path.open(encoding="utf-8", errors="replace", newline="") as lines:
                kept.writelines(line for line in lines if line.endswith("\n") and keep(line))
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
        sink: the sink; it must not be open yet.
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

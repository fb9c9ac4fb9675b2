"""Where records go: files that a run leaves behind, and what holds several sinks together."""

import csv
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipemega.errors import ConfigError
from pipemega.monitor.records import Record, TimelineRecord

State = dict[str, Any]


@dataclass(frozen=True)
class ResumePoint:
    """The last step that counts when a run goes on; what was written after it is written again."""

    step: int
    consumed_samples: int


class Sink(ABC):
    """Takes records until it is closed.  May raise: a `Monitor` keeps that from the run."""

    name: str

    def open(self) -> None:  # noqa: B027 - most have nothing to do
        """What takes long, or asks somebody; once, before the first record."""

    @abstractmethod
    def write(self, record: Record) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def abandon(self) -> None:  # noqa: B027 - likewise
        """It hangs in another thread: let nothing of it keep the process from ending."""

    def state_dict(self) -> State:
        """What a resumed run must hand to the next sink of this name; {} for nothing."""
        return {}


class Monitor(Sink):
    """Several sinks as one, and a wall between them and the training.

    A sink that raises is reported once and switched off; the others, and the run, go on.

    Args:
        sinks: in the order in which they see a record.
        logger: takes the report.
        state: `state_dict()` of an earlier run; kept for sinks that are off in this one, so that
            the next one can still go on from it.
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
        """The sinks that are on."""
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
                    "the monitor '%s' failed when it was closed: %s", sink.name, _say(error)
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
            "which goes on: %s",
            sink.name,
            step,
            _say(error),
        )
        self._keep_states()
        self._sinks.remove(sink)
        try:
            sink.close()
        except Exception:
            # It has been reported as broken; that it does not close either is no news.
            self._logger.debug("closing the monitor '%s' failed too", sink.name, exc_info=True)


class JsonLinesSink(Sink):
    """One JSON object per line and record, flushed, so that `tail -f` and `jq` can follow.

    JSON has no NaN.  A number that is not finite is the string "nan", "inf" or "-inf", which
    Python's float() reads; null means that the number is not known.

    Args:
        path: the file; its folders are made.
        resume: None starts a file of its own, and one that is there gets the name
            `metrics.1.jsonl` (or the next number that is free).  Otherwise the file is continued,
            without its lines after this point, and without a line that was cut off.
    """

    name = "jsonl"

    def __init__(self, path: str | Path, resume: ResumePoint | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume is None:
            _set_aside(path)
        else:
            _keep_lines(path, lambda line: _json_step(line) <= resume.step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(_in_json(record.row()), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvSink(Sink):
    """DeepSpeed's csv_monitor: one file per tag, consumed samples against value.

        output_path/job_name/Train_Samples_train_loss.csv     step,train_loss
                                                              64,9.0139

    The column of consumed samples has the heading "step", as there; a resumed run continues the
    files with no second heading, and drops what was written after the point it resumes from.

    Args:
        folder: output_path/job_name.
        resume: as for `JsonLinesSink`.
    """

    name = "csv_monitor"

    def __init__(self, folder: str | Path, resume: ResumePoint | None = None) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume = resume
        self._files: dict[str, TextIO] = {}

    def write(self, record: Record) -> None:
        for tag, value in record.scalars().items():
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
            _set_aside(path)
        else:
            last = self._resume.consumed_samples
            _keep_lines(path, lambda row: _csv_samples(row) <= last)
        is_new = not path.exists()
        file = path.open("a", encoding="utf-8", newline="")
        if is_new:
            csv.writer(file).writerow(["step", tag.rsplit("/", maxsplit=1)[-1]])
        return file


class TensorboardSink(Sink):
    """TensorBoard's event files, consumed samples on the x axis, with DeepSpeed's tags.

    Args:
        folder: output_path/job_name.
        resume: points after it, in the files of the earlier run, are hidden by TensorBoard.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path, resume: ResumePoint | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard.enabled is true, but TensorBoard is not installed: "
                "pip install 'pipemega[tensorboard]', or set tensorboard.enabled to false"
            ) from error
        self._folder, self._writer_of = str(folder), SummaryWriter
        self._purge = None if resume is None else resume.consumed_samples + 1

    def open(self) -> None:
        self._writer = self._writer_of(log_dir=self._folder, purge_step=self._purge)

    def write(self, record: Record) -> None:
        for tag, value in record.scalars().items():
            self._writer.add_scalar(tag, value, record.consumed_samples)
        if isinstance(record, TimelineRecord) and record.picture is not None:
            self._add_picture(record.picture_tag, record.picture, record.consumed_samples)
        self._writer.flush()

    def _add_picture(self, tag: str, file: Path, at: int) -> None:
        # The picture was drawn by matplotlib, so that it is there.
        from matplotlib.image import imread

        self._writer.add_image(tag, imread(file), at, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def _in_json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _in_json(item) for key, item in value.items()}
    return value


def _json_step(line: str) -> float:
    """The step of a line of metrics; past every other for a line that is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _csv_samples(row: str) -> float:
    """The consumed samples of a row; before all others for the heading."""
    first, comma, _ = row.partition(",")
    if first == "step":
        return -math.inf
    return float(first) if comma and first.isdecimal() else math.inf


def _set_aside(path: Path) -> None:
    """Give a file that is there another name: a new run must not destroy an old one's numbers."""
    if not path.is_file():  # /dev/stdout has no earlier run in it
        return
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)


def _keep_lines(path: Path, keep: Callable[[str], bool]) -> None:
    """Leave only the whole lines that `keep` wants, in one atomic step; no file: nothing to do."""
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


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

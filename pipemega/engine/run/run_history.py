"""A run over its steps: what is due, times, counters, evaluations; `training.on_nonfinite`."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from pipemega.config import Config
from pipemega.errors import ConfigError, NonFiniteError
from pipemega.monitor import MultiTimer
from pipemega.storage.filesystem import is_remote


class RunTimes:
    """Seconds of training steps, evaluations and checkpoints, and of the whole run.

        with times("training"):
            ...

    Attributes:
        timers: "training", "evaluation" and "saving", of this process.
    """

    def __init__(self) -> None:
        self.timers = MultiTimer()
        self._earlier: dict[str, float] = {}  # of the processes before this one
        self._started: float | None = None

    def start(self) -> None:
        """Start to measure the whole run, at the first call."""
        if self._started is None:
            self._started = perf_counter()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that adds the seconds of its block to `name`."""
        return self.timers(name)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by name, over all restarts; "total": the seconds of the whole run."""
        total = 0.0 if self._started is None else perf_counter() - self._started
        own = {"total": total, **self.timers.totals()}
        return {k: own.get(k, 0.0) + self._earlier.get(k, 0.0) for k in {**own, **self._earlier}}

    def __str__(self) -> str:
        """Return for example "1:02:05 (training 59:10, evaluation 2:40, saving 15.0 s)"."""
        seconds = self.seconds()
        total = seconds.pop("total")
        parts = ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
        return f"{_duration(total)}{f' ({parts})' if parts else ''}"

    def state_dict(self) -> dict[str, float]:
        return self.seconds()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the times of the processes before this one; before `start`."""
        if self._started is None:  # else it is a rollback: its time has passed
            self._earlier = {name: float(value) for name, value in state.items()}


@dataclass
class EpochSums:
    """Sums over the steps of the epoch that is in progress.

    Args:
        steps, samples, seconds: steps of the epoch so far, their samples and their seconds.
        loss: sum of the steps' mean losses, each times its samples.
        loss_samples: number of samples in `loss`, which omits steps whose loss is inf or nan.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    loss_samples: int = 0

    def add(self, loss: float, samples: int, seconds: float) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += samples
        self.seconds += seconds
        if math.isfinite(loss):
            self.loss += loss * samples
            self.loss_samples += samples

    @property
    def mean_loss(self) -> float:
        """Mean over the samples; nan without any."""
        return self.loss / self.loss_samples if self.loss_samples else math.nan

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "EpochSums":
        """Restore `state_dict()`; {}, from an older version, starts an epoch here."""
        return cls(**state)


class Evaluation(NamedTuple):
    """The results of one evaluation.

    Attributes:
        step: the last training step before it.
        split: the name of the data.
        values: the loss, the perplexity of tokens, and metrics, by name.
    """

    step: int
    split: str
    values: dict[str, float]

    @classmethod
    def all_in(cls, state: Mapping[str, Any]) -> "list[Evaluation]":
        """Return the evaluations in the state of a run, which an older version may have saved."""
        older = [(step, "validation", {"loss": loss}) for step, loss in state.get("validation", [])]
        saved = state.get("evaluations", older)
        return [cls(int(step), split, dict(values)) for step, split, values in saved]


def _duration(seconds: float) -> str:
    """Return "1.50 s", from 10 s on "15.0 s", from a minute on "2:40", then "1:02:05"."""
    if seconds < 59.95:
        return f"{seconds:.{1 if seconds >= 9.995 else 2}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# Lines kept for error messages.
_MAX_LINES = 20


@dataclass
class RunStats:
    """Counters that are saved in checkpoints.

    Args:
        nan_steps: steps whose loss or gradient norm is not finite, including overflows of fp16's
            loss scale.
        spent: steps that were skipped or rolled back by `training.on_nonfinite`.
        rollbacks: rollbacks to a checkpoint by `training.on_nonfinite`.
        spikes: loss spikes.
        resumes: times that a process resumed the run from a checkpoint.
        nonfinite: a line for each of the latest steps with inf or nan.
    """

    nan_steps: int = 0
    spent: int = 0
    rollbacks: int = 0
    spikes: int = 0
    resumes: int = 0
    nonfinite: list[str] = field(default_factory=list)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; counters that an older checkpoint lacks start at 0."""
        start = asdict(RunStats())
        for name, value in start.items():
            setattr(self, name, state.get(name, value))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add_nonfinite(self, line: str) -> None:
        """Keep a line about a step with inf or nan."""
        self.nonfinite = [*self.nonfinite, line][-_MAX_LINES:]

    def summary(self, skipped: int) -> str:
        """Return "skipped 1, rolled back 0, loss spikes 2, nan 1, resumed 3"."""
        return (
            f"skipped {skipped}, rolled back {self.rollbacks}, loss spikes {self.spikes}, "
            f"nan {self.nan_steps}, resumed {self.resumes}"
        )


class NonFinitePolicy:
    """Decides about each such step and counts the budget; the same on every rank.

        policy      the step                                        uses the budget
        null        as bf16.check_grad_overflow or fp16 require     no
        skip        changes nothing; training continues with the
                    next batch                                      yes
        rollback    the newest checkpoint is loaded; training
                    continues with the batch after this one         yes
        stop        raises an error                                 -

    Args:
        config: the config of the run.
        history: counts the budget over restarts.
        warn: logs a warning, on one rank.
    """

    def __init__(self, config: Config, history: RunStats, warn: Callable[[str], None]) -> None:
        self._policy = config.training.on_nonfinite.policy
        self._budget = config.training.on_nonfinite.budget
        self._history, self._warn = history, warn

    def on_skip(self, what: str, origin: str) -> None:
        """Handle a step that was skipped for inf or nan (with fp16: in its loss).

        Raises:
            NonFiniteError: the policy does not allow to skip it, or the budget is used up.
        """
        error = NonFiniteError(what, origin=origin, on_every_rank=True)
        if self._policy in ("stop", "rollback"):
            raise error
        self._history.add_nonfinite(str(error))
        if self._policy is None:
            self._warn(f"{error}. The step is skipped")
            return
        self._use_budget()
        self._warn(f"{error}. The step is skipped ({self._used()})")

    def on_error(self, error: NonFiniteError) -> None:
        """Return if the run is to be rolled back after `error`.

        Raises:
            NonFiniteError: `error` itself if the policy is not "rollback"; an error with all such
                steps if the budget is used up.
        """
        if self._policy != "rollback":
            raise error
        self._history.add_nonfinite(f"{error.what}: {error.origin}")
        self._use_budget()
        self._warn(f"{error.what}: {error.origin}. Rolling back ({self._used()})")

    def _use_budget(self) -> None:
        self._history.spent += 1
        if self._history.spent > self._budget:
            lines = "\n  ".join(self._history.nonfinite)
            raise NonFiniteError(
                f"{self._history.spent} steps of this run had inf or nan, and "
                f"training.on_nonfinite.budget is {self._budget}:\n  {lines}\nLower the learning "
                "rate, resume from an older checkpoint (checkpoint.load_tag), or look for the "
                "cause in the layers that these lines name",
                on_every_rank=True,
            )

    def _used(self) -> str:
        return f"{self._history.spent} of training.on_nonfinite.budget {self._budget} used"


def describes_run(config: Config) -> bool:
    """Return whether the config has a key that `train_batch` acts on, besides the training."""
    training = config.training
    return (
        keeps_files(config)
        or ("steps_per_print" in config.model_fields_set and config.steps_per_print is not None)
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or training.exit_after_minutes is not None
        or training.exit_interval is not None
        or training.kill_switch_path is not None
        or training.on_nonfinite.policy is not None
        or training.check_replicas_every > 0
        or not training.model_fields_set.isdisjoint({"loss_spikes", "stragglers"})
    )


def keeps_files(config: Config) -> bool:
    """Return whether the run has files of its own besides what it prints."""
    trace = config.monitor.trace
    return (
        config.checkpoint.save is not None
        or config.has_sinks
        or config.monitor.jsonl is not None
        or bool(trace.steps or trace.every)
    )


def check_units(config: Config, epochs: int | None) -> None:
    """Refuse intervals in epochs if the run has no epochs.

    Raises:
        ConfigError: names the key; on every rank.
    """
    units = {"training.eval_by": config.training.eval_by, "checkpoint.by": config.checkpoint.by}
    for key, unit in units.items():
        if unit == "epoch" and epochs is None:
            raise ConfigError(
                f"{key} is 'epoch', and the run has no epochs: set it to 'step'; or set "
                "training.epochs, or give Trainer(epochs=...), in place of training.train_steps",
                on_every_rank=True,
            )


class RunPosition(NamedTuple):
    """Where a run is between two steps.

    Args:
        steps, epoch: completed steps and epochs.
        ended_epoch: the last step ended an epoch.
        completed: it was the last step of the run.
    """

    steps: int
    epoch: int
    ended_epoch: bool
    completed: bool


class Due(NamedTuple):
    """What is due after a step, in this order; see `due_at`."""

    replica_check: bool
    evaluation: bool
    checkpoint: bool
    exit: bool


def due_at(config: Config, at: RunPosition) -> Due:
    """Return what the config asks for at this position."""
    training, saves = config.training, config.checkpoint
    return Due(
        _is_multiple(at.steps, training.check_replicas_every),
        evaluation_is_due(config, at),
        at.completed or _is_due(at, saves.interval, saves.by),
        not at.completed and _is_multiple(at.steps, training.exit_interval),
    )


def evaluation_is_due(config: Config, at: RunPosition) -> bool:
    """Return whether an evaluation is due; with an interval in steps also before the first one."""
    training = config.training
    if training.eval_interval is None:
        return at.ended_epoch
    at_end = training.eval_interval > 0 and at.completed
    return at_end or _is_due(at, training.eval_interval, training.eval_by)


def _is_multiple(step: int, interval: int | None) -> bool:
    """Return whether `step` is a multiple of `interval`; 0 and None: never."""
    return interval is not None and interval > 0 and step % interval == 0


def _is_due(at: RunPosition, interval: int, by: Literal["step", "epoch"]) -> bool:
    if by == "epoch":
        return at.ended_epoch and _is_multiple(at.epoch, interval)
    return _is_multiple(at.steps, interval)


class _Save(NamedTuple):
    step: int | None  # None: the run has changed since
    path: Path | str | None  # None: the user has saved it


class SavedSteps:
    """Remembers the last step of each folder of checkpoints, so that no step is saved twice."""

    def __init__(self) -> None:
        self._saves: dict[str, _Save] = {}

    def add(self, folder: str | Path, step: int, path: Path | str | None = None) -> None:
        """Note a checkpoint of `step`.

        Args:
            path: the path of a checkpoint that the run has saved by itself; None for any other.
        """
        self._saves[_key(folder)] = _Save(step, path)

    def outdate(self, folder: str | Path) -> None:
        """Note that the run has changed since the last checkpoint in `folder`, at the same step."""
        self._saves[_key(folder)] = _Save(None, None)

    def has_step(self, folder: str | Path, step: int) -> bool:
        """Return whether the last checkpoint in `folder` was saved at `step`."""
        return folder in self and self._saves[_key(folder)].step == step

    def own_path(self, folder: str | Path, step: int) -> Path | str | None:
        """Return the path of the checkpoint of `step`, if the run has saved it by itself."""
        return self._saves[_key(folder)].path if self.has_step(folder, step) else None

    def __contains__(self, folder: str | Path) -> bool:
        return _key(folder) in self._saves


def _key(folder: str | Path) -> str:
    """Return the same text for the same folder."""
    text = os.fspath(folder)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)

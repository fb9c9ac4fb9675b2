"""Times, epochs and evaluations of a run, over all its restarts."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, NamedTuple

from pipemega.monitor import MultiTimer


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
        """Return the seconds by name, over all restarts; those of the whole run are "total"."""
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
        steps, samples, seconds: of all its steps.
        loss: sum of the steps' mean losses, each times its samples.
        loss_samples: their number, without steps whose loss is inf or nan.
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

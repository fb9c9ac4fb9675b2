"""Times, counters and evaluations of a run over all its restarts; `training.on_nonfinite`."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from pipemega.config import Config
from pipemega.errors import NonFiniteError
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
        config: of the run.
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

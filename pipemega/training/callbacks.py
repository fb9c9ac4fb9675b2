"""Callbacks that are ready to use."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipemega.config.name_suggestions import did_you_mean
from pipemega.errors import ConfigError
from pipemega.monitor import EpochRecord, get_logger
from pipemega.printing import counted
from pipemega.training.metrics import Mode
from pipemega.training.trainer import Callback, Trainer


class _WatchesValue(Callback):
    """Keeps the best value of one number of the evaluations.

    Args:
        value: "loss" or a metric of the first validation set, or "name/top1" of set `name`.
        mode: "min" or "max": which values are better; None: known from the metric.
        min_delta: a value is better if it differs by more than this.
        name: see `Callback`.

    Attributes:
        best: the best value so far; None before the first evaluation.
    """

    def __init__(self, value: str, mode: Mode | None, min_delta: float, name: str) -> None:
        if mode not in (None, "min", "max"):
            raise ConfigError(f"mode is {mode!r}: use 'min' or 'max'", on_every_rank=True)
        self.value, self.name = value, name
        self._mode, self._min_delta = mode, min_delta
        self.best: float | None = None

    def before_fit(self, trainer: Trainer) -> None:
        self._mode_in(trainer)

    def _mode_in(self, trainer: Trainer) -> Mode:
        """Return which values are better.

        Raises:
            ConfigError: the evaluations of the trainer do not have the value, or it is not known.
        """
        what, names = f"{type(self).__name__}({self.value!r})", trainer.value_names
        if not names:
            raise ConfigError(
                f"{what} needs evaluations: give Trainer(engine, valid), and do not set "
                "training.eval_interval to 0",
                on_every_rank=True,
            )
        # A metric with several numbers gives "name/part", known only after an evaluation.
        if self.value not in names and self.value.rpartition("/")[0] not in names:
            raise ConfigError(
                f"{what}: an evaluation has no such value{did_you_mean(self.value, names)}",
                on_every_rank=True,
            )
        mode = self._mode or trainer.mode_of(self.value)
        if mode is None:
            raise ConfigError(
                f"{what}: it is not known whether larger values are better: give mode='max' or "
                "mode='min'",
                on_every_rank=True,
            )
        return mode

    def is_best(self, trainer: Trainer, values: Mapping[str, float]) -> bool:
        """Return whether the value is better than all before, and keep it then."""
        sign = 1 if self._mode_in(trainer) == "max" else -1
        if self.value not in values:
            raise ConfigError(
                f"the evaluation has no value {self.value!r}{did_you_mean(self.value, values)}",
                on_every_rank=True,
            )
        new = values[self.value]
        if math.isnan(new):
            return False
        if self.best is not None and not sign * (new - self.best) > self._min_delta:
            return False
        self.best = new
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class SaveBest(_WatchesValue):
    """Saves a checkpoint whenever an evaluation has a new best value.

    It is saved in `checkpoint.save` and replaces the one before. It is not the checkpoint that a
    run resumes from by default, and `checkpoint.keep_last` does not delete it:
    `"checkpoint": {"load": ..., "load_tag": "best"}` loads it.

    Args:
        value: "loss" or a metric of the first validation set, or "name/top1" of set `name`.
        mode: "min" or "max": which values are better; None: known from the metric.
        tag: name of the checkpoint.
    """

    def __init__(
        self, value: str = "loss", mode: Mode | None = None, *, tag: str = "best", name: str = ""
    ) -> None:
        super().__init__(value, mode, 0.0, name)
        self.tag = tag

    def before_fit(self, trainer: Trainer) -> None:
        super().before_fit(trainer)
        if trainer.config.checkpoint.save is None:
            raise ConfigError(
                f"SaveBest({self.value!r}) saves in checkpoint.save, which is not set: set it to a "
                "folder",
                on_every_rank=True,
            )

    def after_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        # Before the first step nothing has been trained.
        if trainer.engine.global_steps and self.is_best(trainer, values):
            trainer.save(self.tag)


class EarlyStopping(_WatchesValue):
    """Ends the run when `patience` evaluations in a row have no new best value.

    The run is saved as after any other stop, and `trainer.stopped` has the reason.

    Args:
        value: "loss" or a metric of the first validation set, or "name/top1" of set `name`.
        mode: "min" or "max": which values are better; None: known from the metric.
        patience: number of evaluations.
        min_delta: a value is better if it differs by more than this.
    """

    def __init__(
        self,
        value: str = "loss",
        mode: Mode | None = None,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        name: str = "",
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise ConfigError(
                f"EarlyStopping(patience={patience}, min_delta={min_delta}): patience must be at "
                "least 1, and min_delta at least 0",
                on_every_rank=True,
            )
        super().__init__(value, mode, min_delta, name)
        self._patience = patience
        self.waited = 0

    def after_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.waited = 0 if self.is_best(trainer, values) else self.waited + 1
        if self.waited >= self._patience:
            best = "nan" if self.best is None else f"{self.best:.6g}"
            trainer.stop(
                f"EarlyStopping: no {self.value} better than {best} in "
                f"{counted(self.waited, 'evaluation')}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"]


class LRLogger(Callback):
    """Records the learning rate of each parameter group: `train/lr_group0`, `train/lr_group1`, ...

    The record of a step has the rate of the first group only.

    Args:
        every: steps between records.
    """

    def __init__(self, every: int = 1, *, name: str = "") -> None:
        if every < 1:
            raise ConfigError(f"LRLogger(every={every}): use at least 1", on_every_rank=True)
        self._every, self.name = every, name
        self._rates: dict[str, float] = {}

    def before_fit(self, trainer: Trainer) -> None:
        self._rates = _learning_rates(trainer)

    def after_load(self, trainer: Trainer) -> None:
        # A rollback restores the rates of an earlier step.
        self._rates = _learning_rates(trainer)

    def after_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.engine.global_steps % self._every == 0:
            trainer.log(self._rates)
        # After a step the groups have the rates of the next one.
        self._rates = _learning_rates(trainer)


def _learning_rates(trainer: Trainer) -> dict[str, float]:
    optimizer = trainer.engine.optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    return {f"train/lr_group{i}": float(group["lr"]) for i, group in enumerate(groups)}


class SampleText(Callback):
    """Generates a text after each evaluation of a trained model, and records it.

    After the evaluation before the first step it generates none: it would delay that step, and
    the words would be random.

    Args:
        generate: returns (prompt, text); called on every rank.
    """

    def __init__(self, generate: Callable[[], tuple[str, str]], *, name: str = "") -> None:
        self._generate, self.name = generate, name
        self._text: tuple[str, str] | None = None

    def after_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        if trainer.engine.global_steps == 0:
            return
        self._text = self._generate()
        trainer.engine.run.add_sample(*self._text)

    def last_text(self) -> tuple[str, str]:
        """Return the (prompt, text) of the last evaluation; without one, generate it now."""
        self._text = self._text or self._generate()
        return self._text


class Timing(Callback):
    """Logs and records the times of training steps, evaluations and checkpoints.

        times step 200 | training s 3.12 | step ms 15.60 | evaluation s 0.51 | saving s 0.20

    A line after each epoch and at the end, with the times since the line before. Records:
    `perf/training_seconds`, `perf/evaluation_seconds`, `perf/saving_seconds`. `trainer.timers` has
    the times of this process.
    """

    def __init__(self, *, name: str = "") -> None:
        self.name = name
        # At the last line.
        self._step = 0
        self._seconds: dict[str, float] = {}

    def before_fit(self, trainer: Trainer) -> None:
        self._step, self._seconds = trainer.engine.global_steps, trainer.timers.totals()

    def after_epoch(self, trainer: Trainer, epoch: EpochRecord) -> None:
        self._log(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        if trainer.engine.global_steps > self._step:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        step, totals = trainer.engine.global_steps, trainer.timers.totals()
        seconds = {name: total - self._seconds.get(name, 0.0) for name, total in totals.items()}
        parts = [f"{name} s {value:.2f}" for name, value in seconds.items()]
        if step > self._step and "training" in seconds:
            mean = seconds["training"] / (step - self._step)
            parts.insert(1, f"step ms {1e3 * mean:.2f}")
        get_logger(trainer.engine.mesh.rank).info(" | ".join([f"times step {step}", *parts]))
        trainer.log({f"perf/{name}_seconds": value for name, value in seconds.items()})
        self._step, self._seconds = step, totals

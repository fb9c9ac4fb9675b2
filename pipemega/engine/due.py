"""What is due after a step, what a config asks of a run, and which steps were saved."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

from pipemega.config import Config
from pipemega.errors import ConfigError
from pipemega.storage.filesystem import is_remote


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
        or config.csv_monitor.enabled
        or config.tensorboard.enabled
        or config.wandb.enabled
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
        steps, epoch: completed ones.
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
            path: of a checkpoint that the run has saved by itself; None for any other.
        """
        self._saves[_key(folder)] = _Save(step, path)

    def outdate(self, folder: str | Path) -> None:
        """Note that the run has changed since the last checkpoint in `folder`, at the same step."""
        self._saves[_key(folder)] = _Save(None, None)

    def has_step(self, folder: str | Path, step: int) -> bool:
        """Return whether the last checkpoint in `folder` is that of `step`."""
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

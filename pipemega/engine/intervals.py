"""When a run evaluates, saves and exits: intervals in steps or epochs."""

from typing import Literal

from pipemega.engine.step_engine import StepEngine
from pipemega.errors import ConfigError


def check_units(engine: StepEngine) -> None:
    """Refuse intervals in epochs if the run has no epochs.

    Raises:
        ConfigError: names the key; on every rank.
    """
    config = engine.config
    units = {"training.eval_by": config.training.eval_by, "checkpoint.by": config.checkpoint.by}
    for key, unit in units.items():
        if unit == "epoch" and engine.epochs is None:
            raise ConfigError(
                f"{key} is 'epoch', and the run has no epochs: set it to 'step'; or set "
                "training.epochs, or give Trainer(epochs=...), in place of training.train_steps",
                on_every_rank=True,
            )


def evaluates(engine: StepEngine) -> bool:
    """Return whether evaluations are due in this run."""
    return engine.config.training.evaluates(engine.epochs)


def evaluation_is_due(engine: StepEngine, *, ended_epoch: bool, completed: bool) -> bool:
    """Return whether an evaluation is due after a step; in steps also before the first one.

    Args:
        ended_epoch: the step ended an epoch.
        completed: it was the last step of the run.
    """
    settings = engine.config.training
    if settings.eval_interval is None:
        return ended_epoch
    return _is_due(engine, settings.eval_interval, settings.eval_by, ended_epoch) or (
        settings.eval_interval > 0 and completed
    )


def evaluation_was_missed(engine: StepEngine, epoch_steps: int) -> bool:
    """Return whether an evaluation is due before the next step.

    The run begins (unless `training.eval_on_start` is false), or it was stopped before this
    evaluation.

    Args:
        epoch_steps: steps of the epoch that is in progress.
    """
    if engine.global_steps == 0 and not engine.config.training.eval_on_start:
        return False
    ended_epoch = engine.epochs is not None and epoch_steps == 0 and engine.global_steps > 0
    return evaluation_is_due(engine, ended_epoch=ended_epoch, completed=engine.is_complete)


def save_is_due(engine: StepEngine, *, ended_epoch: bool, completed: bool) -> bool:
    """Return whether a checkpoint is due after a step, as `evaluation_is_due`."""
    settings = engine.config.checkpoint
    return completed or _is_due(engine, settings.interval, settings.by, ended_epoch)


def is_multiple(step: int, interval: int | None) -> bool:
    """Return whether `step` is a multiple of `interval`; 0 and None: never."""
    return interval is not None and interval > 0 and step % interval == 0


def _is_due(
    engine: StepEngine, interval: int, by: Literal["step", "epoch"], ended_epoch: bool
) -> bool:
    if by == "epoch":
        return ended_epoch and is_multiple(engine.epoch, interval)
    return is_multiple(engine.global_steps, interval)

"""When a run evaluates: `training.eval_interval` and `training.eval_by`."""

from pipemega.engine.step_engine import StepEngine


def evaluates(engine: StepEngine) -> bool:
    """Return whether evaluations are due in this run."""
    interval = engine.config.training.eval_interval
    return engine.epochs is not None if interval is None else interval > 0


def evaluates_at_start(engine: StepEngine) -> bool:
    """Return whether an evaluation is due before the first step: if they are counted in steps."""
    settings = engine.config.training
    return bool(settings.eval_interval) and settings.eval_by == "step"


def evaluation_is_due(engine: StepEngine, *, ended_epoch: bool, is_last: bool) -> bool:
    """Return whether an evaluation is due after the last step.

    Args:
        ended_epoch: this step ended an epoch.
        is_last: it is the last step of the run.
    """
    settings = engine.config.training
    interval = settings.eval_interval
    if interval is None:
        return ended_epoch
    if interval == 0 or is_last:
        return interval > 0
    if settings.eval_by == "epoch":
        return ended_epoch and engine.epoch % interval == 0
    return engine.global_steps % interval == 0

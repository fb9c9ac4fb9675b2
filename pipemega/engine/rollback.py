"""Rollback: after inf or nan, the newest checkpoint of the run is loaded."""

from pipemega.checkpoint import newest
from pipemega.distributed.mesh import from_first
from pipemega.engine.checkpointed_engine import CheckpointedEngine
from pipemega.engine.run_logger import RunLogger
from pipemega.engine.saved_steps import SavedSteps
from pipemega.errors import CheckpointError, NonFiniteError
from pipemega.monitor import get_logger


def roll_back(
    engine: CheckpointedEngine,
    logger: RunLogger,
    saved: SavedSteps,
    error: NonFiniteError,
    before: int,
) -> None:
    """Load the newest checkpoint; continue with the data after the batch of `error`.

    What has been recorded stays; evaluations and callbacks continue from the checkpoint.

    Args:
        saved: the checkpoints of this run.
        before: `global_steps` before the failed call. The engine may now count one more (fp16
            skips the step and continues) or one less (post-validation: the step before failed).

    Raises:
        NonFiniteError: the policy is not "rollback", the budget is used up, or this run has no
            checkpoint.
    """
    history = logger.history
    failed = min(before, engine.global_steps) + 1
    is_counted = engine.global_steps > before
    try:
        logger.policy.on_error(error)
    except NonFiniteError as final:
        logger.event("nonfinite", {}, str(final))
        raise
    assert engine.config.checkpoint.save is not None, "the config has been checked"
    folder = engine.config.checkpoint.save
    try:
        engine.finish_saving()
    except CheckpointError as failed_save:
        if not failed_save.on_every_rank:
            raise
        # It has been logged, and earlier checkpoints are complete.
    # Only checkpoints of this run, not of an earlier one, may be rolled back to.
    if folder not in saved or from_first(engine.mesh.world, lambda: newest(folder)) is None:
        raise NonFiniteError(
            error.what,
            origin=error.origin,
            advice=f"training.on_nonfinite.policy is 'rollback', and {folder} has no complete "
            "checkpoint of this run yet: lower checkpoint.interval",
            on_every_rank=True,
        ) from error
    records = logger.state_dict()
    engine.reload(folder)
    saved.outdate(folder)  # the position in the data is a later one
    logger.load_state_dict(records)
    history.rollbacks += 1
    history.nan_steps += not is_counted
    text = f"rolled back from step {failed} to step {engine.global_steps}"
    get_logger(engine.mesh.rank).info(f"{text}; the data continues after the failed batch")
    values = {"from_step": failed, "number": history.rollbacks}
    logger.event("rollback", values, f"{text}: {error.what}: {error.origin}")

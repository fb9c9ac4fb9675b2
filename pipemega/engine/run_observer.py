"""RunObserver: what a loop around an engine adds to its run."""

from collections.abc import Mapping
from typing import Any

from pipemega.monitor import EpochRecord


class RunObserver:
    """Called by a `TrainingRun` at fixed points, on every rank; here each method does nothing.

    Points of one step, in this order:

        after_step      the step has been trained and recorded
        after_epoch     it ended an epoch
        evaluate        an evaluation is due
        before_save     a checkpoint follows

    `after_load` follows the loading of a checkpoint that continues a run; for a checkpoint that
    was loaded before `TrainingRun.take_over`, when the run begins.
    """

    def after_step(self, loss: float) -> None:
        """Handle the end of a step."""

    def after_epoch(self, epoch: EpochRecord) -> None:
        """Handle the end of an epoch."""

    def evaluate(self) -> None:
        """Evaluate the model."""

    def before_save(self) -> None:
        """Prepare the state for a checkpoint."""

    def after_load(self) -> None:
        """Handle the state of a checkpoint, after `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return state that is saved with each checkpoint, as JSON values; that of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` of the run that saved; {} from a run without an observer.

        Raises:
            CheckpointError: the state is not that of this observer; on every rank.
        """

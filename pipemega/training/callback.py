"""Callback: what a user adds to the loop of a Trainer."""

from collections.abc import Mapping
from typing import Any, Literal

from pipemega.monitor import EpochRecord

Mode = Literal["min", "max"]
"""Which values are better."""


class Callback:
    """Called by a Trainer at fixed points, on every rank; here each method does nothing.

    Override the points that you need; docs/trainer.md has their order. `trainer` is the
    `pipemega.Trainer`. At each point the callbacks
    are called in the order of the list. All points but `on_exception` may run collectives, such as
    `trainer.save()`; then all ranks must do so.

    Attributes:
        name: in errors and checkpoints; empty: the name of the class.
    """

    name: str = ""

    def before_fit(self, trainer: Any) -> None:
        """Called once per process, before the first evaluation and the first step."""

    def after_step(self, trainer: Any, loss: float) -> None:
        """Called after each step; `loss` is the mean over its whole batch."""

    def after_epoch(self, trainer: Any, epoch: EpochRecord) -> None:
        """Called after `after_step` of a step that ended an epoch."""

    def after_evaluation(self, trainer: Any, values: Mapping[str, float]) -> None:
        """Called after each evaluation of all validation sets.

        Args:
            values: "loss" and the metrics of the first set; those of set `name` as "name/loss".
        """

    def before_save(self, trainer: Any) -> None:
        """Called before each checkpoint is saved, also one that a callback saves."""

    def after_load(self, trainer: Any) -> None:
        """Called after `load_state_dict`: before `before_fit` if resumed, and after a rollback."""

    def on_exception(self, trainer: Any, error: Exception) -> None:
        """Called if `fit` ends with an error. Not collective: other ranks may have ended.

        An exception that this method raises is logged, and does not replace `error`.
        """

    def after_fit(self, trainer: Any) -> None:
        """Called after the last step, also if `trainer.stopped` says why the run ended early."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values; that of rank 0 is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; not called for checkpoints of a run without this callback."""

"""Callback: what a user adds to the loop of a Trainer.

CallbackList: calls the callbacks of a Trainer, and keeps their states in checkpoints.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pipemega.engine.train_step import StepFeature
from pipemega.errors import (
    CheckpointError,
    ConfigError,
    PipelineError,
    PipemegaError,
    StopTraining,
)
from pipemega.monitor import EpochRecord, get_logger

Mode = Literal["min", "max"]
"""Which values are better."""


class Callback:
    """Called by a Trainer at fixed points, on every rank; here each method does nothing.

    Override the points that you need; docs/trainer.md has their order. `trainer` is the
    `pipemega.Trainer`. At each point the callbacks
    are called in the order of the list. All points but `on_exception` may run collectives, such as
    `trainer.save()`; then all ranks must do so.

    Attributes:
        name: name of the callback in errors and checkpoints; empty: the name of the class.
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
            values: "loss" and the metrics of the first set; values of set `name` as "name/loss".
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
        """Return what a resumed run needs, as JSON values; the state of rank 0 is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; not called for checkpoints of a run without this callback."""


class CallbackList(StepFeature):
    """The callbacks of one Trainer, as a feature of its run.

    Args:
        trainer: the `pipemega.Trainer`, which the callbacks get.
        callbacks: the callbacks, in the order in which they are called; also an attribute.

    Attributes:
        names_with_state: names of the callbacks that have state.

    Raises:
        ConfigError: an entry is no callback, or two with state have one name; on every rank.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Any]) -> None:
        if isinstance(callbacks, Callback):
            raise ConfigError(
                f"callbacks is a {type(callbacks).__name__}: give a list", on_every_rank=True
            )
        self._trainer = trainer
        self.callbacks: tuple[Callback, ...] = tuple(callbacks)
        self._log = get_logger(trainer.engine.mesh.rank)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                what = f"the class {callback.__name__}" if isinstance(callback, type) else callback
                raise ConfigError(
                    f"callbacks must be objects of pipemega.training.Callback, and one is {what!s}"
                    f"{': call it' if isinstance(callback, type) else ''}",
                    on_every_rank=True,
                )
        self.names_with_state = names = [_name(c) for c in self.callbacks if _has_state(c)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{names.count(name)} callbacks with state are named {name!r}, and checkpoints "
                    f"keep one state per name: give each a name, as in {name}(..., name='other')",
                    on_every_rank=True,
                )

    def before_fit(self) -> None:
        """Call the point `before_fit`."""
        self._call("before_fit", lambda callback: callback.before_fit(self._trainer))

    def after_fit(self) -> None:
        """Call the point `after_fit`."""
        self._call("after_fit", lambda callback: callback.after_fit(self._trainer))

    def on_exception(self, error: Exception) -> None:
        """Call the point `on_exception`; what it raises is logged only."""
        for callback in self.callbacks:
            try:
                callback.on_exception(self._trainer, error)
            except Exception as second:
                self._log.warning(_failure(callback, "on_exception", second))

    def after_evaluation(self, values: Mapping[str, float]) -> None:
        """Call the point `after_evaluation`."""
        trainer = self._trainer
        self._call("after_evaluation", lambda c: c.after_evaluation(trainer, values))

    # Points that the run calls

    def evaluate(self) -> None:
        self._trainer.evaluate()

    def after_record(self, loss: float) -> None:
        self._call("after_step", lambda callback: callback.after_step(self._trainer, loss))

    def after_epoch(self, epoch: EpochRecord) -> None:
        self._call("after_epoch", lambda callback: callback.after_epoch(self._trainer, epoch))

    def before_save(self) -> None:
        self._call("before_save", lambda callback: callback.before_save(self._trainer))

    def after_load(self) -> None:
        self._call("after_load", lambda callback: callback.after_load(self._trainer))

    def _call(self, point: str, call: Callable[[Callback], object]) -> None:
        """Call a point of all callbacks.

        Raises:
            PipelineError: a callback raised an error; the message names the callback. Errors of
                pipemega stay as they are: the policies of the run depend on their class.
        """
        for callback in self.callbacks:
            try:
                call(callback)
            except PipemegaError:
                raise
            except StopTraining as error:
                # Else it would look like a stop after which the run was saved.
                remedy = "to end the run, call trainer.stop(reason)"
                raise PipelineError(f"{_failure(callback, point, error)}: {remedy}") from error
            except Exception as error:
                raise PipelineError(_failure(callback, point, error)) from error

    # State

    def state_dict(self) -> dict[str, Any]:
        states = {}
        for callback in self.callbacks:
            if not _has_state(callback):
                continue
            try:
                state = callback.state_dict()
            except Exception as error:
                raise PipelineError(_failure(callback, "state_dict", error)) from error
            try:
                states[_name(callback)] = json.loads(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the state of the callback {_name(callback)!r} cannot be saved: {error}. "
                    "state_dict() returns JSON values: numbers, strings, lists and dicts; keep "
                    "tensors in engine.client_state"
                ) from error
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = {_name(callback): callback for callback in self.callbacks if _has_state(callback)}
        allowed = self._trainer.config.checkpoint.allow_changes
        for name in state:
            if name in own or {"callbacks", f"callbacks.{name}"} & set(allowed):
                continue
            raise CheckpointError(
                f"the checkpoint has the state of the callback {name!r}, and this Trainer has no "
                f"such callback with state (it has: {', '.join(own) or 'none'}): add it, or set "
                f'checkpoint.allow_changes ["callbacks.{name}"] to drop its state',
                on_every_rank=True,
            )
        for name, callback in own.items():
            if name in state:
                self._restore(callback, state[name])

    def _restore(self, callback: Callback, state: Any) -> None:
        try:
            callback.load_state_dict(state)
        except Exception as error:
            raise PipelineError(_failure(callback, "load_state_dict", error)) from error


def _name(callback: Callback) -> str:
    return callback.name or type(callback).__name__


def _has_state(callback: Callback) -> bool:
    return type(callback).state_dict is not Callback.state_dict


def _failure(callback: Callback, point: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"callback {_name(callback)!r} failed in {point}: {reason}"

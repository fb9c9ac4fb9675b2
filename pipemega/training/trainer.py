"""The training loop: train steps or epochs, evaluate, and call callbacks; see docs/trainer.md.

Records, checkpoints, resume and the end of the run belong to the engine, in a Trainer as in the
user's own loop: `pipemega.engine.training_run`; see docs/long_runs.md.

Callback: what a user adds to the loop of a Trainer.

CallbackList: calls the callbacks of a Trainer, and keeps their states in checkpoints.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipemega.distributed.mesh import gather_objects
from pipemega.engine.engine import Engine
from pipemega.engine.run.run_history import Evaluation, RunStats
from pipemega.engine.train_step import StepFeature
from pipemega.errors import (
    CheckpointError,
    ConfigError,
    PipelineError,
    PipemegaError,
    StopTraining,
)
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor import EpochRecord, Monitor, MultiTimer, get_logger
from pipemega.training.metrics import Mode
from pipemega.training.validation import ValidationSets


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


class Trainer:
    """Trains an engine to the end of its run, and evaluates it in between.

        Trainer(engine, valid, train=dataset, epochs=2,
                metrics={"top1": Accuracy(), "top5": Accuracy(k=5)},
                callbacks=[SaveBest("top1")]).fit()

    Args:
        engine: the engine that `pipemega.initialize` returned.
        valid: a validation dataset or DataLoader, or several by name; None: no evaluation.
        train: training data, if `initialize` got none.
        epochs: passes over the training data; None: the number in the config.
        metrics: metrics of each evaluation by name: `pipemega.training.Metric`, or of torchmetrics.
        callbacks: the callbacks, which are called in this order at each point.
        tokens_per_sample, flops_per_token: numbers for tokens/s, TFLOP/s and MFU; 0: do not record
            them.
        flops_per_sample: the same for samples that are not tokens, such as images.

    Attributes:
        callbacks: the callbacks that the Trainer got.
        history: counters of the run, over all its restarts.
        evaluations: the step, the name of the data and the values of each evaluation so far.
        validation: (step, loss) of each evaluation of the first validation set.
        timers: the timers "training", "evaluation" and "saving" of this process.
        stopped: why `fit` ended before the last step; empty if it did not.

    Raises:
        ConfigError: data, epochs or steps are given twice; a name, metric or callback is not valid.
        CheckpointError: the run was resumed, and a callback whose state was saved is missing.
    """

    def __init__(
        self,
        engine: Engine,
        valid: Any = None,
        *,
        train: Any = None,
        epochs: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        tokens_per_sample: int = 0,
        flops_per_token: float = 0.0,
        flops_per_sample: float = 0.0,
    ) -> None:
        self.engine, self.config, self._run = engine, engine.config, engine.run
        self.stopped = ""
        logger = self._run.logger
        logger.tokens_per_sample = tokens_per_sample or logger.tokens_per_sample
        logger.flops_per_sample = flops_per_sample or flops_per_token * logger.tokens_per_sample
        if epochs is not None:
            engine.set_epochs(epochs)
        if train is not None:
            engine.set_training_data(train)
        with failure_reporter().propagate_errors("Trainer"):
            self._valid = ValidationSets(engine, valid, metrics)
            self._points = CallbackList(self, callbacks)
            self._refuse_other_ranks_parts()
            self._run.take_over(self._points)

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        return self._points.callbacks

    def _refuse_other_ranks_parts(self) -> None:
        """Check that all ranks have the same validation sets, metrics and states; collective.

        Raises:
            ConfigError: names the ranks and both lists; on every rank.
        """
        parts = {
            "validation sets": self._valid.names,
            "metrics": self._valid.metric_names,
            "callbacks with state": self._points.names_with_state,
        }
        first, *others = gather_objects(parts, self.engine.mesh.world)
        for rank, other in enumerate(others, start=1):
            for what, names in first.items():
                if names != other[what]:
                    here, there = (", ".join(n) or "none" for n in (names, other[what]))
                    raise ConfigError(
                        f"the ranks have different {what}: rank 0 has {here}, rank {rank} has "
                        f"{there}: give every rank the same ones",
                        on_every_rank=True,
                    )

    @property
    def history(self) -> RunStats:
        return self._run.logger.history

    @property
    def evaluations(self) -> list[Evaluation]:
        return self._run.evaluations

    @property
    def validation(self) -> list[tuple[int, float]]:
        first = self._valid.names[0] if self._valid.names else "validation"
        return [(e.step, e.values["loss"]) for e in self.evaluations if e.split == first]

    @property
    def timers(self) -> MultiTimer:
        return self._run.times.timers

    @property
    def monitor(self) -> Monitor:
        """Writes the records; on rank 0 only."""
        return self._run.logger.monitor

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics."""
        return self._valid.metric_names

    @property
    def value_names(self) -> list[str]:
        """Names of the values of `Callback.after_evaluation`; [] if the run does not evaluate."""
        return self._valid.value_names if self.config.training.evaluates(self.engine.epochs) else []

    def mode_of(self, value: str) -> Mode | None:
        """Return "min" or "max", whichever is better for a value; None if that is not known."""
        return self._valid.mode_of(value)

    def fit(self) -> float:
        """Train to the end of the run; return the last training loss.

        A signal, `training.exit_after_minutes`, a callback or the end of the data stops it earlier,
        after a checkpoint; `stopped` has the reason.

        Raises:
            ConfigError: the run has no length, or no epochs to count intervals in.
            NonFiniteError: a step had inf or nan that `training.on_nonfinite` does not allow.
            ReplicaError: copies of a parameter differ (`training.check_replicas_every`).
            PipelineError: a callback or a metric failed; with its name.
        """
        engine = self.engine
        if engine.total_steps is None and engine.epochs is None:
            raise ConfigError(
                "the run has no length: set training.train_steps (or training.train_samples, or "
                "training.epochs), or give Trainer(epochs=...)",
                on_every_rank=True,
            )
        self.stopped = ""
        try:
            with failure_reporter().propagate_errors("Trainer.fit"):
                self._run.begin()
                try:
                    self._fit()
                finally:
                    self._run.release()
        except Exception as error:
            self._points.on_exception(error)
            raise
        return engine.last_step.loss if engine.last_step else math.nan

    def _fit(self) -> None:
        self._points.before_fit()
        self._run.make_missed_evaluation()
        self.stopped = self._run.stopped
        while not self.engine.is_complete and not self.stopped:
            self._advance()
        self.engine.finish_saving()
        self._points.after_fit()
        self._run.log_end()

    def _advance(self) -> None:
        """Train one step, or find out why the run ends."""
        try:
            self.train_step()
        except StopTraining as stop:
            self.stopped = stop.reason
        except StopIteration:
            self._run.end_early("the training data ended")
            self.stopped = self._run.stopped

    def train_step(self) -> float:
        """Train one step, and record, evaluate and save it if due; return the loss."""
        return float(self.engine.train_batch())

    def evaluate(self) -> float:
        """Evaluate all validation sets; return the loss of the first one.

        `training.eval_steps` limits the batches of each set.
        """
        if not self._valid.names:
            return math.nan
        values = self._valid.evaluate()
        with failure_reporter().propagate_errors("Trainer.evaluate"):
            self._points.after_evaluation(values)
        return values["loss"]

    def stop(self, reason: str) -> None:
        """End the run with a checkpoint; one rank is enough.

        In `after_epoch` and `after_evaluation` at once, in `after_step` after the next step.
        """
        self._run.request_stop(reason)

    def log(self, values: Mapping[str, float]) -> None:
        """Record numbers by name; a name without "/" gets the group "train"."""
        self._run.add_scalars(values)

    def save(self, tag: str | None = None) -> None:
        """Save a checkpoint in `checkpoint.save`, if the config has that folder.

        If a callback calls this in a step, the save follows when all callbacks have handled it.

        Args:
            tag: name of the checkpoint; a run does not resume from it by default. None: save as
                `checkpoint.interval` does, unless this step is saved already.
        """
        self._run.save(tag)

"""A training run: what follows each step, in a Trainer and in the user's own loop.

The features are in other modules: `run_logger`, `resume`, `nan_policy`,
`pipemega.diagnostics` and `pipemega.fault_tolerance.preemption`; see docs/long_runs.md.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from pipemega.checkpoint import newest
from pipemega.config import Config
from pipemega.distributed.mesh import from_first
from pipemega.engine.resume import refuse_other_run
from pipemega.engine.run_logger import RunLogger
from pipemega.engine.step_callbacks import StepCallback, TrainStep
from pipemega.engine.step_engine import StepEngine
from pipemega.errors import CheckpointError, NonFiniteError
from pipemega.fault_tolerance.preemption import StopRequest
from pipemega.monitor import EvalRecord, SampleRecord, get_logger
from pipemega.optimizer import StepReport
from pipemega.storage.filesystem import is_remote


class _Save(NamedTuple):
    """The last checkpoint of a folder that this process has saved or loaded."""

    step: int
    path: Path | str | None  # None: the user has saved it


class TrainingRun(StepCallback):
    """Records, checks and saves the steps of an engine, and ends the run; collective.

    It is active if the config has a key of `describes_run`, or in a Trainer. Otherwise it only
    counts the ranks' requests to stop.

    Args:
        engine: its steps are the run.

    Attributes:
        logger: writes the records.
        validation: (step, loss) of each evaluation so far.
        stopped: why the run has ended before its last step; empty if it has not.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine, self._config = engine, engine.config
        self._log = get_logger(engine.mesh.rank)
        self._active = describes_run(self._config)
        self._handles_signals = self._config.checkpoint.save is not None
        self._stop = StopRequest(engine.mesh.world, self._config.training.exit_after_minutes)
        self._evaluate: Callable[[], object] | None = None
        self._saves: dict[str, _Save] = {}
        self._first_step: int | None = None  # None: `begin` was not called
        self._has_ended = False
        self._warn_of_iterators = False
        self.logger = RunLogger(engine, self._log, keeps_files=keeps_files(self._config))
        self.validation: list[tuple[int, float]] = []
        self.stopped = ""
        engine.add_callback(self)

    def take_over(self, evaluate: Callable[[], object] | None) -> None:
        """Make the run active for a Trainer.

        Args:
            evaluate: called every `training.eval_interval` steps and after the last step; None:
                no evaluation.
        """
        self._active = self._handles_signals = True
        self._evaluate = evaluate
        self.logger.take_over()

    def request_stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint. One rank is enough."""
        self._stop.request(reason)

    # Callbacks

    def before_step(self, step: TrainStep) -> None:
        step.should_stop = self._stop.requested

    def on_report(self, report: StepReport) -> None:
        if self._active:
            self.logger.add_report(report)

    # Steps

    def begin(self) -> None:
        """Open the sinks, and handle signals from now on; before the first step or evaluation.

        Raises:
            CheckpointError: `checkpoint.save` has checkpoints of another run, or is in use.
        """
        folder = self._config.checkpoint.save
        if folder is not None and _key(folder) not in self._saves:
            refuse_other_run(self._config, self._engine)
        self._first_step, self._has_ended = self._engine.global_steps, False
        self.logger.open()
        if self._handles_signals:
            self._stop.__enter__()

    def train_step(
        self, train: Callable[[], float], data_iter: object = None, *, has_next: bool = True
    ) -> float:
        """Train one step and do what is due after it; return the loss.

        Args:
            train: trains one step, each call with the next batch.
            data_iter: the caller's iterator, if the engine reads one.
            has_next: `train` can be called again, after a step that was rolled back. Otherwise, or
                if no step is left, nan is returned for such a step.

        Raises:
            NonFiniteError: a step had inf or nan that `training.on_nonfinite` does not allow.
        """
        self.stopped = ""
        if not self._active:
            loss = train()
            if self._engine.stop_requested:
                self.end_early(self._stop.reasons())
            return loss
        if self._first_step is None:
            self.begin()
        self._warn_of_iterator(data_iter)
        while True:
            before, started = self._engine.global_steps, perf_counter()
            try:
                loss = train()
                self.logger.add(loss, perf_counter() - started)
                self._after_step()
                return loss
            except NonFiniteError as error:
                self._roll_back(error, before)
                if self._engine.is_complete:  # the batch of the error was the last one
                    self._after_step()
                elif has_next:
                    continue
                return math.nan

    def _after_step(self) -> None:
        engine, settings = self._engine, self._config.training
        last = engine.is_complete
        if engine.stop_requested and not last:
            self.end_early(self._stop.reasons())
            return
        if self._is_due(settings.check_replicas_every):
            engine.check_replicas()
        interval = settings.eval_interval
        if self._evaluate is not None and interval and (last or self._is_due(interval)):
            self._evaluate()
        if last or self._is_due(self._config.checkpoint.interval):
            self.save()
        if last:
            self.finish_steps()

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self._engine.global_steps % interval == 0

    def finish_steps(self) -> None:
        """Make the last step final and write all records up to it."""
        self._engine.settle()
        self.logger.write_final_steps()

    def _warn_of_iterator(self, data_iter: object) -> None:
        """Log, once after a resume, that the position of the caller's data is not restored."""
        reads_iterator = data_iter is not None or self._engine.loader is None
        if self._warn_of_iterators and reads_iterator:
            self._log.info(
                f"resumed at step {self._engine.global_steps}: train_batch reads the caller's "
                "iterator, whose position is not in the checkpoint. The caller must skip the "
                f"{self._engine.consumed_samples} samples that the run has consumed "
                "(engine.consumed_samples)"
            )
        self._warn_of_iterators = False

    # Evaluation

    def settle_before_evaluation(self) -> None:
        """Complete the last step; in the user's own loop, roll it back if it has inf or nan."""
        if not self._active:
            return
        before = self._engine.global_steps
        try:
            self.finish_steps()
        except NonFiniteError as error:
            if self._evaluate is not None:  # in a Trainer: `train_step` rolls back
                raise
            self._roll_back(error, before)

    def add_evaluation(self, loss: float, seconds: float, split: str) -> None:
        """Record the loss of an evaluation."""
        if not self._active or self._has_ended:
            return
        if self._first_step is None:
            self.begin()
        engine = self._engine
        self.validation.append((engine.global_steps, loss))
        self.logger.monitor.write(
            EvalRecord(
                step=engine.global_steps,
                consumed_samples=engine.consumed_samples,
                loss=loss,
                seconds=seconds,
                split=split,
            )
        )

    def add_sample(self, prompt: str, text: str) -> None:
        """Record a text that the model has generated."""
        if not self._active or self._has_ended:
            return
        step, samples = self._engine.global_steps, self._engine.consumed_samples
        self.logger.monitor.write(
            SampleRecord(step=step, consumed_samples=samples, prompt=prompt, text=text)
        )

    # Checkpoints

    def save(self) -> None:
        """Save in `checkpoint.save`, if it is set and this step is not saved there yet."""
        folder = self._config.checkpoint.save
        if folder is None:
            return
        self.finish_steps()
        saved = self._saves.get(_key(folder))
        if saved is None or saved.step != self._engine.global_steps:
            path = self._engine.save_checkpoint(folder)
            self._saves[_key(folder)] = _Save(self._engine.global_steps, path)

    def saved_automatically(self, folder: str | Path) -> Path | str | None:
        """Return the checkpoint of this step that `save` wrote in `folder`, if it did."""
        saved = self._saves.get(_key(folder))
        if saved is None or saved.step != self._engine.global_steps:
            return None
        return saved.path

    def record_save(self, folder: str | Path) -> None:
        """Note that the current step is saved in `folder`."""
        self._saves[_key(folder)] = _Save(self._engine.global_steps, None)

    def record_load(self, folder: str | Path) -> None:
        """Note that the run continues from a checkpoint in `folder`."""
        self.record_save(folder)
        self._warn_of_iterators = True
        if self._first_step is None:
            self.logger.history.resumes += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from, as JSON values."""
        if not self._active:
            return {}
        return {**self.logger.state_dict(), "validation": self.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, after the engine has loaded its checkpoint."""
        self.validation = [(int(s), float(loss)) for s, loss in state.get("validation", [])]
        self.logger.load_state_dict(state)

    def _roll_back(self, error: NonFiniteError, before: int) -> None:
        """Load the newest checkpoint; continue with the data after the batch of `error`.

        Args:
            before: `global_steps` before the failed call. The engine may now count one more (fp16
                skips the step and continues) or one less (post-validation: the step before failed).

        Raises:
            NonFiniteError: the policy is not "rollback", the budget is used up, or this run has no
                checkpoint.
        """
        engine, history = self._engine, self.logger.history
        failed = min(before, engine.global_steps) + 1
        is_counted = engine.global_steps > before
        try:
            self.logger.policy.on_error(error)
        except NonFiniteError as final:
            self.logger.event("nonfinite", {}, str(final))
            raise
        assert self._config.checkpoint.save is not None, "the config has been checked"
        folder = self._config.checkpoint.save
        try:
            engine.finish_saving()
        except CheckpointError as failed_save:
            if not failed_save.on_every_rank:
                raise
            # It has been logged, and earlier checkpoints are complete.
        # Only checkpoints of this run, not of an earlier one, may be rolled back to.
        known = _key(folder) in self._saves
        if not known or from_first(engine.mesh.world, lambda: newest(folder)) is None:
            raise NonFiniteError(
                error.what,
                origin=error.origin,
                advice=f"training.on_nonfinite.policy is 'rollback', and {folder} has no complete "
                "checkpoint of this run yet: lower checkpoint.interval",
                on_every_rank=True,
            ) from error
        state = self.state_dict()
        engine.reload(folder)
        self.load_state_dict(state)
        self._warn_of_iterators = False
        history.rollbacks += 1
        history.nan_steps += not is_counted
        self.validation = [(s, loss) for s, loss in self.validation if s <= engine.global_steps]
        text = f"rolled back from step {failed} to step {engine.global_steps}"
        self._log.info(f"{text}; the data continues after the failed batch")
        values = {"from_step": failed, "number": history.rollbacks}
        self.logger.event("rollback", values, f"{text}: {error.what}: {error.origin}")

    # The end of the run

    def end_early(self, reason: str) -> None:
        """Save, and set `stopped`."""
        self.finish_steps()
        self.save()
        self.stopped = reason
        if self._active:
            self.logger.event(
                "stop", {}, f"stopped after step {self._engine.global_steps}: {reason}"
            )

    def close(self) -> None:
        """End the run of the user's own loop: save if a step was trained, and close the sinks."""
        if self._first_step is None:
            return
        self.finish_steps()
        if self._engine.global_steps != self._first_step:
            self.save()
            self.log_end()
        self.release()

    def log_end(self) -> None:
        """Log the last line of the run, with its counters."""
        steps, total = self._engine.global_steps, self._engine.total_steps
        end = f"stopped ({self.stopped}) after" if self.stopped else "finished"
        of = "" if total is None else f" of {total}"
        first = self._first_step or 0
        here = f", {steps - first} of them in this process" if first else ""
        summary = self.logger.history.summary(self._engine.skipped_steps)
        self._log.info(f"{end} step {steps}{of}{here}: {summary}")
        if self.stopped and self._config.checkpoint.save is None:
            self.logger.warn("the run was not saved: checkpoint.save is not set")

    def release(self) -> None:
        """Close the sinks, unlock the run folder and stop handling signals. Not collective."""
        self.logger.close()
        self.logger.folder.close()
        self._stop.__exit__()
        self._first_step, self._has_ended = None, True


def describes_run(config: Config) -> bool:
    """Return whether the config has a key that `train_batch` acts on, besides the training."""
    training = config.training
    return (
        keeps_files(config)
        or ("steps_per_print" in config.model_fields_set and config.steps_per_print is not None)
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or training.exit_after_minutes is not None
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


def _key(folder: str | Path) -> str:
    """Return the same text for the same folder."""
    text = os.fspath(folder)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)

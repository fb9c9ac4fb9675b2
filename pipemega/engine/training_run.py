"""A training run: what follows each step, in a Trainer and in the user's own loop.

The records are in `run_logger`, the intervals in `due`, the policy for inf and nan in `nan_policy`,
signals in `pipemega.fault_tolerance.preemption`; see docs/long_runs.md.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from pipemega.checkpoint import Checkpointer, Counters, LoadOptions, any_checkpoint, newest
from pipemega.diagnostics.replica_check import check_replicas
from pipemega.distributed.mesh import from_first, gather_objects
from pipemega.engine.run.run_history import (
    EpochSums,
    Evaluation,
    RunPosition,
    RunTimes,
    SavedSteps,
    check_units,
    describes_run,
    due_at,
    evaluation_is_due,
    keeps_files,
)
from pipemega.engine.run_logger import RunLogger
from pipemega.engine.step_runner import StepRunner
from pipemega.engine.train_step import StepFeature
from pipemega.errors import CheckpointError, NonFiniteError
from pipemega.fault_tolerance.error_propagation import RunProgress, failure_reporter
from pipemega.fault_tolerance.preemption import StopRequest
from pipemega.monitor import EvalRecord, SampleRecord, ScalarRecord, get_logger

_Trained = TypeVar("_Trained")


class TrainingRun:
    """Records, checks and saves the steps of an engine, and ends the run; collective.

    It is active if the config has a key of `describes_run`, or in a Trainer. Otherwise it only
    counts requests to stop.

    Args:
        steps: runs the steps.

    Attributes:
        logger: writes the records.
        checkpointer: saves and loads.
        client_state: the state of the caller, in each checkpoint.
        times: seconds of training, evaluations and checkpoints.
        evaluations: all evaluations of the run so far.
        stopped: why the run has ended before its last step; empty if it has not.
        saved_in: the last folder of checkpoints.
    """

    def __init__(self, steps: StepRunner) -> None:
        self._steps, self._config, self._mesh = steps, steps.config, steps.mesh
        config, mesh = self._config, self._mesh
        self._log = get_logger(mesh.rank)
        self.checkpointer = Checkpointer(
            config, mesh, steps.model, steps.optimizer_step, steps.loader, steps.data.total_steps
        )
        self.client_state: Any = None
        self.saved_in: str | None = config.checkpoint.save
        self._active = describes_run(config)
        self._handles_signals = config.checkpoint.save is not None
        training = config.training
        self._stop = StopRequest(mesh.world, training.exit_after_minutes, training.kill_switch_path)
        self._loop: StepFeature | None = None  # of a Trainer
        # Of the last loaded checkpoint, for a loop that takes over later.
        self._loop_state: dict[str, Any] = {}
        self._loop_has_loaded = True
        self._saved = SavedSteps()
        self._first_step: int | None = None  # None: `begin` was not called
        self._has_ended = self._warn_of_iterators = False
        # Tags of the checkpoints that a feature wants within a step; None: not within a step.
        self._wanted_saves: list[str | None] | None = None
        self.logger = RunLogger(steps, self._log, keeps_files=keeps_files(config))
        self.times = RunTimes()
        self._epoch = EpochSums()  # of the epoch that is in progress
        self.evaluations: list[Evaluation] = []
        self.stopped = ""
        if self._active:
            steps.features.append(self.logger)

    def take_over(self, loop: StepFeature) -> None:
        """Make the run active for a loop, and call `loop` from now on.

        Raises:
            CheckpointError: the run was loaded with the state of another loop.
        """
        # A step before this is not recorded.
        self.settle()
        if self._loop is None:
            loop.load_state_dict(self._loop_state)
        else:
            self._steps.features.remove(self._loop)
        if not self._active:
            self._steps.features.append(self.logger)
        self._active = self._handles_signals = True
        self._loop = loop
        self._steps.features.append(loop)
        self.logger.take_over()

    def request_stop(self, reason: str) -> None:
        """End the run after this step, in `after_epoch` and `evaluate` at once; on any rank."""
        self._stop.request(reason)

    def should_stop(self) -> bool:
        """Return whether this rank requests the end of the run. Not collective."""
        return self._stop.requested()

    def _call(self, point: Callable[[StepFeature], None]) -> None:
        for feature in [*self._steps.features]:
            point(feature)

    # Steps

    def begin(self) -> None:
        """Open the sinks, and handle signals from now on; before the first step or evaluation.

        Raises:
            ConfigError: an interval is in epochs, and the run has none.
            CheckpointError: `checkpoint.save` has checkpoints of another run, or is in use.
        """
        check_units(self._config, self._steps.data.epochs)
        folder = self._config.checkpoint.save
        if folder is not None and folder not in self._saved:
            self._refuse_other_run(folder)
        self._first_step, self._has_ended = self._steps.global_steps, False
        self.times.start()
        self.logger.open()
        if self._handles_signals:
            self._stop.__enter__()
        self.stopped = self._stop.reason_at_start()
        if self._loop is not None and not self._loop_has_loaded:
            self._loop_has_loaded = True
            self._loop.after_load()

    def _refuse_other_run(self, folder: str) -> None:
        """Refuse to replace the checkpoints of an earlier run, or to delete them as old.

        Raises:
            CheckpointError: the folder has checkpoints, and `checkpoint.overwrite` is false.
        """
        if self._config.checkpoint.overwrite:
            return
        tag = from_first(self._mesh.world, lambda: any_checkpoint(folder))
        if tag is not None:
            raise CheckpointError(
                f"checkpoint.save ({folder}) has {tag} of an earlier run, and this run does not "
                "continue it: set training.resume to 'auto' to continue it, choose another "
                "checkpoint.save to keep it, or set checkpoint.overwrite to true to replace it",
                on_every_rank=True,
            )

    def train_step(
        self,
        train: Callable[[], tuple[float, _Trained]],
        data_iter: object = None,
        *,
        has_next: bool = True,
        started: float | None = None,
    ) -> tuple[float, _Trained | None]:
        """Train one step and do what is due after it; return what `train` returns.

        Args:
            train: trains one step, each call with the next batch; returns its loss and more.
            data_iter: the caller's iterator, if the steps read one.
            has_next: `train` can be called again, after a step that was rolled back. Otherwise, or
                if no step is left, the loss of such a step is nan.
            started: the clock reading from which the seconds of the step count; None: now.

        Raises:
            NonFiniteError: a step had inf or nan that `training.on_nonfinite` does not allow.
        """
        steps = self._steps
        self.stopped = ""
        if not self._active:
            trained = train()
            if steps.stop_requested:
                self.end_early(self._stop.reasons())
            return trained
        if self._first_step is None:
            self.begin()
            if self.stopped:
                return math.nan, None
        if self._warn_of_iterators and (data_iter is not None or steps.loader is None):
            self._log_iterator_position()
        self._warn_of_iterators = False
        while True:
            before, epoch = steps.global_steps, steps.epoch
            # The caller's own loop may continue after the last step of the run.
            was_complete = steps.is_complete
            try:
                return self._train_and_record(train, was_complete, started)
            except NonFiniteError as error:
                self._roll_back(error, before)
            finally:
                self._wanted_saves = None
            if steps.data.epochs is not None and steps.epoch > epoch:
                # The batch that failed was the last one of its epoch.
                self._end_epoch()
                self._do_what_is_due(was_complete, ended_epoch=True)
            # A rank of a middle stage gets no batch.
            has_next = all(gather_objects(has_next, self._mesh.world))
            if not has_next or steps.is_complete or self.stopped:
                return math.nan, None

    def _log_iterator_position(self) -> None:
        """Log that the position of the caller's iterator is not restored."""
        self._log.info(
            f"resumed at step {self._steps.global_steps}: train_batch reads the caller's iterator, "
            "whose position is not in the checkpoint. The caller must skip the "
            f"{self._steps.consumed_samples} samples that the run has consumed "
            "(engine.consumed_samples)"
        )

    def _train_and_record(
        self,
        train: Callable[[], tuple[float, _Trained]],
        was_complete: bool,
        started: float | None,
    ) -> tuple[float, _Trained]:
        steps = self._steps
        samples, epoch = steps.consumed_samples, steps.epoch
        started = perf_counter() if started is None else started
        with self.times("training"):
            trained = train()
        loss = trained[0]
        seconds, samples = perf_counter() - started, steps.consumed_samples - samples
        has_epochs = steps.data.epochs is not None
        if has_epochs:
            self._epoch.add(loss, samples, seconds)
        self.logger.add(loss, seconds, samples, epoch + 1 if has_epochs else None)
        self._wanted_saves = []
        self._call(lambda feature: feature.after_record(loss))
        ended_epoch = has_epochs and steps.epoch > epoch
        if ended_epoch:
            self._end_epoch()
        self._do_what_is_due(was_complete, ended_epoch)
        return trained

    def _end_epoch(self) -> None:
        self.finish_steps()
        record = self.logger.add_epoch(self._epoch)
        self._epoch = EpochSums()
        self._call(lambda feature: feature.after_epoch(record))

    def _do_what_is_due(self, was_complete: bool, ended_epoch: bool) -> None:
        steps = self._steps
        completed = steps.is_complete and not was_complete
        if steps.stop_requested and not completed:
            self._save_wanted()
            self.end_early(self._stop.reasons())
            return
        due = due_at(
            self._config, RunPosition(steps.global_steps, steps.epoch, ended_epoch, completed)
        )
        if due.replica_check:
            self.check_replicas()
        if due.evaluation:
            self._call(lambda feature: feature.evaluate())
        self._save_wanted()
        # Also after the last step: a rank whose evaluation failed reaches the other ranks here.
        if (due.evaluation or ended_epoch) and self._stops_now() and not completed:
            self.end_early(self._stop.reasons())
            return
        if due.checkpoint:
            self.save()
        if completed:
            self.finish_steps()
        elif due.exit:
            self.end_early(f"training.exit_interval is {self._config.training.exit_interval}")

    def _stops_now(self) -> bool:
        """Return whether a rank requests the end of the run; collective."""
        requested = self._stop.requested()
        return self._loop is not None and any(gather_objects(requested, self._mesh.world))

    def check_replicas(self) -> None:
        """Compare all copies of each parameter; see `Engine.check_replicas`."""
        self._steps.settle()
        check_replicas(self._steps.model, self._mesh)

    def settle(self) -> None:
        """Make the last step final; an error about inf and nan names its origin."""
        reporter = failure_reporter()
        with reporter.propagate_errors("settle"), self._steps.locator.add_origin_to_errors():
            self._steps.settle()

    def finish_steps(self) -> None:
        """Make the last step final and write all records up to it."""
        self.settle()
        self.logger.write_final_steps()

    # Evaluation

    def make_missed_evaluation(self) -> None:
        """Evaluate if that is due before the next step; the run may end there.

        It is due if the run begins, unless `training.eval_on_start` is false, or if it was stopped
        before this evaluation.
        """
        steps = self._steps
        step = steps.global_steps
        if self.stopped or any(evaluation.step == step for evaluation in self.evaluations):
            return
        if step == 0 and not self._config.training.eval_on_start:
            return
        ended_epoch = steps.data.epochs is not None and self._epoch.steps == 0 and step > 0
        at = RunPosition(step, steps.epoch, ended_epoch, steps.is_complete)
        if not evaluation_is_due(self._config, at):
            return
        self._wanted_saves = []
        self._call(lambda feature: feature.evaluate())
        self._save_wanted()
        if self._stops_now():
            self.end_early(self._stop.reasons())

    def settle_before_evaluation(self) -> None:
        """Complete the last step; in the user's own loop, roll it back if it has inf or nan."""
        if not self._active:
            return
        before = self._steps.global_steps
        try:
            self.finish_steps()
        except NonFiniteError as error:
            if self._loop is not None:  # in a Trainer: `train_step` rolls back
                raise
            self._roll_back(error, before)

    def add_evaluation(
        self, loss: float, seconds: float, split: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Record an evaluation; `metrics` are more numbers about it, by name."""
        if not self._active or self._has_ended:
            return
        if self._first_step is None:
            self.begin()
        record = EvalRecord(
            step=self._steps.global_steps,
            consumed_samples=self._steps.consumed_samples,
            loss=loss,
            seconds=seconds,
            split=split,
            has_tokens=self.logger.tokens_per_sample > 0,
            metrics=metrics or {},
        )
        self.evaluations.append(Evaluation(record.step, split, record.values))
        self.logger.monitor.write(record)

    def add_scalars(self, values: Mapping[str, float]) -> None:
        """Record numbers by name; a name without "/" gets the group "train"."""
        if self._active and not self._has_ended:
            self.logger.write(ScalarRecord, values={n: float(v) for n, v in values.items()})

    def add_sample(self, prompt: str, text: str) -> None:
        """Record a text that the model has generated."""
        if self._active and not self._has_ended:
            self.logger.write(SampleRecord, prompt=prompt, text=text)

    # Checkpoints

    def save(self, tag: str | None = None) -> None:
        """Save in `checkpoint.save`, if it is set.

        At a feature's point of a step, the checkpoint follows when all of them have been called.

        Args:
            tag: the name of a checkpoint that is not loaded by default. None: the name of this
                step, if it is not saved there yet.
        """
        folder = self._config.checkpoint.save
        if folder is None:
            return
        if self._wanted_saves is not None:
            self._wanted_saves.append(tag)
            return
        self.finish_steps()
        step = self._steps.global_steps
        if tag is None and self._saved.has_step(folder, step):
            return
        with self.times("saving"):
            path = self.save_checkpoint(folder, tag, save_latest=tag is None)
        if tag is None:
            self._saved.add(folder, step, path)

    def _save_wanted(self) -> None:
        """Save what features wanted at the points of this step."""
        wanted, self._wanted_saves = self._wanted_saves or [], None
        for tag in dict.fromkeys(wanted):
            self.save(tag)

    def saved_automatically(self, folder: str | Path) -> Path | str | None:
        """Return this step's checkpoint that `save` wrote in `folder`, if it did."""
        return self._saved.own_path(folder, self._steps.global_steps)

    def save_checkpoint(
        self,
        folder: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> Path | str:
        """Save a checkpoint, as `Engine.save_checkpoint`, even if this step is saved already."""
        self.saved_in, steps = os.fspath(folder), self._steps
        state = self.client_state if client_state is None else client_state
        with failure_reporter().propagate_errors("save_checkpoint"):
            if self._loop is not None:
                self.finish_steps()
                self._call(lambda feature: feature.before_save())
            self.logger.write_loads()
            steps.settle()
            counters = Counters(steps.global_steps, steps.consumed_samples, self.state_dict())
            self.checkpointer.model = steps.model
            path = self.checkpointer.save(folder, tag, state, counters, set_latest=save_latest)
        if save_latest:
            self._saved.add(folder, steps.global_steps)
        return path

    def load_checkpoint(
        self, folder: str | Path, tag: str | None = None, **parts: bool
    ) -> tuple[Path | str, Any]:
        """Load a checkpoint, as `Engine.load_checkpoint`; `parts`: as for `LoadOptions`."""
        steps, settings = self._steps, self._config.checkpoint
        options = LoadOptions(verify=settings.verify, allow_changes=settings.allow_changes, **parts)
        steps.settle()
        self.checkpointer.model = steps.model
        loaded = self.checkpointer.load(folder, tag, options)
        if loaded.counters is not None:
            steps.global_steps = loaded.counters.global_steps
            steps.consumed_samples = loaded.counters.consumed_samples
            steps.epoch = steps.data.start()
            self.load_state_dict(loaded.counters.run)
        self.client_state = loaded.client
        if not options.module_only:
            self._continue_from(folder)
        return loaded.path, loaded.client

    def _continue_from(self, folder: str | Path) -> None:
        """Note that the run continues from a checkpoint in `folder`."""
        self._saved.add(folder, self._steps.global_steps)
        self._warn_of_iterators = True
        if self._first_step is None:
            self.logger.history.resumes += 1
        self._loop_has_loaded = self._loop is not None
        self._call(lambda feature: feature.after_load())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from, as JSON values."""
        if not self._active:
            return {}
        if self._loop is not None:
            self._loop_state = self._loop.state_dict()
        return {
            **self.logger.run_state(),
            "evaluations": self.evaluations,
            "epoch": self._epoch.state_dict(),
            "seconds": self.times.state_dict(),
            "callbacks": self._loop_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, after the checkpoint was loaded."""
        self.evaluations = Evaluation.all_in(state)
        self._epoch = EpochSums.from_state(state.get("epoch", {}))
        self.times.load_state_dict(state.get("seconds", {}))
        self.logger.load_run_state(state)
        self._loop_state = state.get("callbacks", {})
        if self._loop is not None:
            self._loop.load_state_dict(self._loop_state)

    # Inf and nan

    def _roll_back(self, error: NonFiniteError, before: int) -> None:
        """Load the newest checkpoint; continue with the data after the batch of `error`.

        What has been recorded stays; evaluations and callbacks continue from the checkpoint.

        Args:
            before: `global_steps` before the failed call. The run may now count one more (fp16
                skips the step and continues) or one less (post-validation: the step before failed).

        Raises:
            NonFiniteError: the policy is not "rollback", the budget is used up, or this run has no
                checkpoint.
        """
        steps, logger, epoch = self._steps, self.logger, self._epoch
        failed = min(before, steps.global_steps) + 1
        is_counted = steps.global_steps > before
        try:
            logger.policy.on_error(error)
        except NonFiniteError as final:
            logger.event("nonfinite", {}, str(final))
            raise
        assert self._config.checkpoint.save is not None, "the config has been checked"
        folder = self._config.checkpoint.save
        try:
            self.checkpointer.wait()
        except CheckpointError as failed_save:
            if not failed_save.on_every_rank:
                raise
            # It has been logged, and earlier checkpoints are complete.
        # Only checkpoints of this run, not of an earlier one, may be rolled back to.
        if (
            folder not in self._saved
            or from_first(self._mesh.world, lambda: newest(folder)) is None
        ):
            raise NonFiniteError(
                error.what,
                origin=error.origin,
                advice=f"training.on_nonfinite.policy is 'rollback', and {folder} has no complete "
                "checkpoint of this run yet: lower checkpoint.interval",
                on_every_rank=True,
            ) from error
        records = logger.run_state()
        steps.data.reload(lambda: self.load_checkpoint(folder))
        steps.end_epochs()
        self._saved.outdate(folder)  # the position in the data is a later one
        logger.load_run_state(records)
        logger.history.rollbacks += 1
        logger.history.nan_steps += not is_counted
        text = f"rolled back from step {failed} to step {steps.global_steps}"
        self._log.info(f"{text}; the data continues after the failed batch")
        values = {"from_step": failed, "number": logger.history.rollbacks}
        logger.event("rollback", values, f"{text}: {error.what}: {error.origin}")
        self._epoch = epoch  # recorded steps stay; the checkpoint may be of an earlier epoch
        self._warn_of_iterators = False

    # The end of the run

    def end_early(self, reason: str) -> None:
        """Save, and set `stopped`."""
        self.finish_steps()
        self.save()
        self.stopped = reason
        if self._active:
            step = self._steps.global_steps
            self.logger.event("stop", {}, f"stopped after step {step}: {reason}")

    def close(self) -> None:
        """End the run of the user's own loop: save if a step was trained, and close the sinks."""
        if self._first_step is None:
            return
        self.finish_steps()
        if self._steps.global_steps != self._first_step:
            self.save()
            self.log_end()
        self.release()

    def log_end(self) -> None:
        """Log the last line of the run, with its counters."""
        self.logger.log_end(self._first_step or 0, self.stopped, self.times)

    def release(self) -> None:
        """Close the sinks, unlock the run folder and stop handling signals. Not collective."""
        self.logger.close()
        self.logger.folder.close()
        self._stop.__exit__()
        self._first_step, self._has_ended = None, True

    def progress(self) -> RunProgress:
        """Return what an error message says about this run."""
        config = self._config
        resumes = config.training.resume == "auto" and self.saved_in == config.checkpoint.save
        return RunProgress(self._steps.global_steps, self.saved_in, resumes)

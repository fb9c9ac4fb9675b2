"""A training run: what follows each step, in a Trainer and in the user's own loop.

The features are in other modules: `run_logger`, `resume`, `nan_policy`,
`pipemega.diagnostics` and `pipemega.fault_tolerance.preemption`; see docs/long_runs.md.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from pipemega.distributed.mesh import gather_objects
from pipemega.engine import intervals
from pipemega.engine.checkpointed_engine import CheckpointedEngine
from pipemega.engine.resume import log_iterator_position, refuse_other_run
from pipemega.engine.rollback import roll_back
from pipemega.engine.run_history import EpochSums, Evaluation, RunTimes
from pipemega.engine.run_keys import describes_run, keeps_files
from pipemega.engine.run_logger import RunLogger
from pipemega.engine.run_observer import RunObserver
from pipemega.engine.saved_steps import SavedSteps
from pipemega.engine.step_callbacks import StepCallback, TrainStep
from pipemega.errors import NonFiniteError
from pipemega.fault_tolerance.preemption import StopRequest
from pipemega.monitor import EvalRecord, SampleRecord, ScalarRecord, get_logger
from pipemega.optimizer import StepReport


class TrainingRun(StepCallback):
    """Records, checks and saves the steps of an engine, and ends the run; collective.

    It is active if the config has a key of `describes_run`, or in a Trainer. Otherwise it only
    counts requests to stop.

    Args:
        engine: its steps are the run.

    Attributes:
        logger: writes the records.
        times: of the run.
        evaluations: all so far.
        stopped: why the run has ended before its last step; empty if it has not.
    """

    def __init__(self, engine: CheckpointedEngine) -> None:
        self._engine, self._config = engine, engine.config
        self._log = get_logger(engine.mesh.rank)
        self._active = describes_run(self._config)
        self._handles_signals = self._config.checkpoint.save is not None
        world, keys = engine.mesh.world, self._config.training
        self._stop = StopRequest(world, keys.exit_after_minutes, keys.kill_switch_path)
        self._observer: RunObserver | None = None
        # Of the last loaded checkpoint, for an observer that takes over later.
        self._observer_state: dict[str, Any] = {}
        self._observer_has_loaded = True
        self._saved = SavedSteps()
        self._first_step: int | None = None  # None: `begin` was not called
        self._has_ended = self._was_complete = self._warn_of_iterators = False
        # Tags of the checkpoints that the observer wants within a step; None: not within a step.
        self._wanted_saves: list[str | None] | None = None
        self.logger = RunLogger(engine, self._log, keeps_files=keeps_files(self._config))
        self.times = RunTimes()
        self._epoch = EpochSums()  # of the epoch that is in progress
        self.evaluations: list[Evaluation] = []
        self.stopped = ""
        engine.add_callback(self)

    def take_over(self, observer: RunObserver) -> None:
        """Make the run active for a loop, and call `observer` from now on.

        Raises:
            CheckpointError: the run was loaded with the state of another observer.
        """
        if self._observer is None:
            observer.load_state_dict(self._observer_state)
        self._active = self._handles_signals = True
        self._observer = observer
        self.logger.take_over()

    def request_stop(self, reason: str) -> None:
        """End the run after this step, in `after_epoch` and `evaluate` at once; on any rank."""
        self._stop.request(reason)

    def make_missed_evaluation(self) -> None:
        """Evaluate if that is due before the next step; the run may end there."""
        step = self._engine.global_steps
        done = self.stopped or any(evaluation.step == step for evaluation in self.evaluations)
        if done or not intervals.evaluation_was_missed(self._engine, self._epoch.steps):
            return
        self._wanted_saves = []
        if self._observer is not None:
            self._observer.evaluate()
        self._save_wanted()
        if self._stops_now():
            self.end_early(self._stop.reasons())

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
            ConfigError: an interval is in epochs, and the run has none.
            CheckpointError: `checkpoint.save` has checkpoints of another run, or is in use.
        """
        intervals.check_units(self._engine)
        folder = self._config.checkpoint.save
        if folder is not None and folder not in self._saved:
            refuse_other_run(self._config, self._engine)
        self._first_step, self._has_ended = self._engine.global_steps, False
        self.times.start()
        self.logger.open()
        if self._handles_signals:
            self._stop.__enter__()
        self.stopped = self._stop.reason_at_start()
        if self._observer is not None and not self._observer_has_loaded:
            self._observer_has_loaded = True
            self._observer.after_load()

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
            if self.stopped:
                return math.nan
        engine = self._engine
        if self._warn_of_iterators and (data_iter is not None or engine.loader is None):
            log_iterator_position(engine, self._log)
        self._warn_of_iterators = False
        while True:
            before, epoch = engine.global_steps, engine.epoch
            # The caller's own loop may continue after the last step of the run.
            self._was_complete = engine.is_complete
            try:
                return self._train_and_record(train)
            except NonFiniteError as error:
                self._roll_back(error, before)
            finally:
                self._wanted_saves = None
            if engine.epochs is not None and engine.epoch > epoch:
                # The batch that failed was the last one of its epoch.
                self._end_epoch()
                self._after_step(ended_epoch=True)
            # A rank of a middle stage gets no batch.
            has_next = all(gather_objects(has_next, engine.mesh.world))
            if not has_next or engine.is_complete or self.stopped:
                return math.nan

    def _train_and_record(self, train: Callable[[], float]) -> float:
        engine = self._engine
        samples, epoch, started = engine.consumed_samples, engine.epoch, engine.step_started()
        with self.times("training"):
            loss = train()
        seconds, samples = perf_counter() - started, engine.consumed_samples - samples
        has_epochs = engine.epochs is not None
        if has_epochs:
            self._epoch.add(loss, samples, seconds)
        self.logger.add(loss, seconds, samples, epoch + 1 if has_epochs else None)
        self._wanted_saves = []
        if self._observer is not None:
            self._observer.after_step(loss)
        ended_epoch = has_epochs and engine.epoch > epoch
        if ended_epoch:
            self._end_epoch()
        self._after_step(ended_epoch)
        return loss

    def _end_epoch(self) -> None:
        self.finish_steps()
        record = self.logger.add_epoch(self._epoch)
        self._epoch = EpochSums()
        if self._observer is not None:
            self._observer.after_epoch(record)

    def _after_step(self, ended_epoch: bool) -> None:
        engine, settings = self._engine, self._config.training
        completed = engine.is_complete and not self._was_complete
        due = {"ended_epoch": ended_epoch, "completed": completed}
        if engine.stop_requested and not completed:
            self._save_wanted()
            self.end_early(self._stop.reasons())
            return
        if intervals.is_multiple(engine.global_steps, settings.check_replicas_every):
            engine.check_replicas()
        is_due = intervals.evaluation_is_due(engine, **due)
        if is_due and self._observer is not None:
            self._observer.evaluate()
        self._save_wanted()
        # Also after the last step: a rank whose evaluation failed reaches the other ranks here.
        if (is_due or ended_epoch) and self._stops_now() and not completed:
            self.end_early(self._stop.reasons())
            return
        if intervals.save_is_due(engine, **due):
            self.save()
        if completed:
            self.finish_steps()
        elif intervals.is_multiple(engine.global_steps, settings.exit_interval):
            self.end_early(f"training.exit_interval is {settings.exit_interval}")

    def _stops_now(self) -> bool:
        """Return whether a rank requests the end of the run; collective."""
        world, requested = self._engine.mesh.world, self._stop.requested()
        return self._observer is not None and any(gather_objects(requested, world))

    def finish_steps(self) -> None:
        """Make the last step final and write all records up to it."""
        self._engine.settle()
        self.logger.write_final_steps()

    # Evaluation

    def settle_before_evaluation(self) -> None:
        """Complete the last step; in the user's own loop, roll it back if it has inf or nan."""
        if not self._active:
            return
        before = self._engine.global_steps
        try:
            self.finish_steps()
        except NonFiniteError as error:
            if self._observer is not None:  # in a Trainer: `train_step` rolls back
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
        engine = self._engine
        record = EvalRecord(
            step=engine.global_steps,
            consumed_samples=engine.consumed_samples,
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

        At an observer's points of a step, the checkpoint follows when all of them have been called.

        Args:
            tag: of a checkpoint that is not loaded by default. None: that of this step, if it is
                not saved there yet.
        """
        folder = self._config.checkpoint.save
        if folder is None:
            return
        if self._wanted_saves is not None:
            self._wanted_saves.append(tag)
            return
        self.finish_steps()
        step = self._engine.global_steps
        if tag is None and self._saved.has_step(folder, step):
            return
        with self.times("saving"):
            path = self._engine.save_checkpoint(folder, tag, save_latest=tag is None)
        if tag is None:
            self._saved.add(folder, step, path)

    def _save_wanted(self) -> None:
        """Save what the observer wanted at the points of this step."""
        wanted, self._wanted_saves = self._wanted_saves or [], None
        for tag in dict.fromkeys(wanted):
            self.save(tag)

    def saved_automatically(self, folder: str | Path) -> Path | str | None:
        """Return this step's checkpoint that `save` wrote in `folder`, if it did."""
        return self._saved.own_path(folder, self._engine.global_steps)

    def before_save(self) -> None:
        """Let the observer prepare its state; a checkpoint follows."""
        if self._observer is not None:
            self.finish_steps()
            self._observer.before_save()

    def record_save(self, folder: str | Path) -> None:
        """Note that the current step is saved in `folder`."""
        self._saved.add(folder, self._engine.global_steps)

    def record_load(self, folder: str | Path) -> None:
        """Note that the run continues from a checkpoint in `folder`."""
        self.record_save(folder)
        self._warn_of_iterators = True
        if self._first_step is None:
            self.logger.history.resumes += 1
        self._observer_has_loaded = self._observer is not None
        if self._observer is not None:
            self._observer.after_load()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from, as JSON values."""
        if not self._active:
            return {}
        if self._observer is not None:
            self._observer_state = self._observer.state_dict()
        return {
            **self.logger.state_dict(),
            "evaluations": self.evaluations,
            "epoch": self._epoch.state_dict(),
            "seconds": self.times.state_dict(),
            "callbacks": self._observer_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, after the engine has loaded its checkpoint."""
        self.evaluations = Evaluation.all_in(state)
        self._epoch = EpochSums.from_state(state.get("epoch", {}))
        self.times.load_state_dict(state.get("seconds", {}))
        self.logger.load_state_dict(state)
        self._observer_state = state.get("callbacks", {})
        if self._observer is not None:
            self._observer.load_state_dict(self._observer_state)

    def _roll_back(self, error: NonFiniteError, before: int) -> None:
        epoch = self._epoch
        roll_back(self._engine, self.logger, self._saved, error, before)
        self._epoch = epoch  # recorded steps stay; the checkpoint may be of an earlier epoch
        self._warn_of_iterators = False

    # The end of the run

    def end_early(self, reason: str) -> None:
        """Save, and set `stopped`."""
        self.finish_steps()
        self.save()
        self.stopped = reason
        if self._active:
            step = self._engine.global_steps
            self.logger.event("stop", {}, f"stopped after step {step}: {reason}")

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
        self.logger.log_end(self._first_step or 0, self.stopped, self.times)

    def release(self) -> None:
        """Close the sinks, unlock the run folder and stop handling signals. Not collective."""
        self.logger.close()
        self.logger.folder.close()
        self._stop.__exit__()
        self._first_step, self._has_ended = None, True

"""The loop that users script: train, evaluate, show, save.

What may befall a run of weeks has rooms of its own: `resuming`, `nonfinite`, `spikes`,
`stragglers`, and `pipemega.stopping`. docs/long_runs.md tells how they play together.
"""

import math
import time
from itertools import islice
from typing import Any

from pipemega.checkpoint import newest
from pipemega.data.loader import BatchLoader
from pipemega.engine import Engine
from pipemega.errors import CheckpointError, ConfigError, NonFiniteError
from pipemega.mesh import from_first
from pipemega.monitor import EvalRecord, Monitor, get_logger
from pipemega.stopping import StopRequest
from pipemega.training.history import RunHistory
from pipemega.training.journal import Journal, run_folder
from pipemega.training.resuming import resume


class Trainer:
    """Trains an engine for `training.train_steps` steps, from where it stands.

    Args:
        engine: from `pipemega.initialize`, with training data.
        valid: held-out data of the same kind; None skips evaluation.
        tokens_per_sample, flops_per_token: for tokens/s, TFLOP/s and MFU; 0 leaves them out.

    Attributes:
        validation: (step, loss) of each evaluation so far.
        stopped: why `fit` ended before its last step; empty if it did not.
    """

    def __init__(
        self,
        engine: Engine,
        valid: Any = None,
        *,
        tokens_per_sample: int = 0,
        flops_per_token: float = 0.0,
    ) -> None:
        self.engine, self.config = engine, engine.config
        self.stopped = ""
        self._valid = valid
        self._log = get_logger(engine.mesh.rank)
        self._stop = StopRequest(engine.mesh.world, self.config.training.exit_after_minutes)
        resumed = resume(engine, self._log)
        state = resumed or {}
        self.validation = [(int(s), float(loss)) for s, loss in state.get("validation", [])]
        self._keep_config()
        self._journal = Journal(
            engine,
            state,
            self._log,
            tokens_per_sample=tokens_per_sample,
            flops_per_token=flops_per_token,
        )
        self.history.resumes += resumed is not None
        # Whether what lies in checkpoint.save is of this run, and may be gone back to.
        saving = self.config.checkpoint
        goes_on = self.config.training.resume == "auto" or saving.load == saving.save
        self._has_saved = resumed is not None and goes_on
        self._first_step = engine.global_steps

    @property
    def history(self) -> RunHistory:
        """What has befallen the run so far, over all its restarts."""
        return self._journal.history

    @property
    def monitor(self) -> Monitor:
        """Where records go; on rank 0 only."""
        return self._journal.monitor

    def _keep_config(self) -> None:
        """The resolved config beside what the run writes, so that it can be run again."""
        if self.engine.mesh.rank == 0:
            folder = run_folder(self.config)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(self.config.to_json() + "\n", encoding="utf-8")

    def fit(self) -> float:
        """Runs to `training.train_steps`; returns the last training loss.

        A signal, `training.exit_after_minutes` and the end of the data end it before, with a
        checkpoint; `stopped` says so.

        Raises:
            ConfigError: training.train_steps is missing.
            NonFiniteError: a step had inf or nan, and `training.on_nonfinite` does not bear it.
            ReplicaError: copies of a parameter differ (`training.check_replicas_every`).
        """
        settings, engine = self.config.training, self.engine
        if settings.train_steps is None:
            raise ConfigError("training.train_steps is missing: how many steps shall be trained?")
        loss = math.nan
        with self._stop:
            try:
                if self._valid is not None and settings.eval_interval and not self.validation:
                    self.evaluate()
                while engine.global_steps < settings.train_steps and not self.stopped:
                    before = engine.global_steps
                    try:
                        loss = self._advance(settings.train_steps)
                    except NonFiniteError as error:
                        self._roll_back(error, before)
                engine.finish_saving()
                self._say_the_end(settings.train_steps)
            finally:
                self.monitor.close()
        return loss

    def _advance(self, train_steps: int) -> float:
        """One step, and what is due after it; returns the loss."""
        engine, settings = self.engine, self.config.training
        try:
            loss = self.train_step()
        except StopIteration:
            self._end_early("the training data ended")
            return math.nan
        last = engine.global_steps == train_steps
        if engine.stop_wished and not last:
            self._end_early(self._stop.reasons())
            return loss
        if self._due(settings.check_replicas_every):
            engine.check_replicas()
        if self._due(settings.eval_interval) or (last and settings.eval_interval):
            self.evaluate()
        if self._due(self.config.checkpoint.interval) or last:
            self.save()
        if last:
            self.settle()
        return loss

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.engine.global_steps % interval == 0

    def train_step(self) -> float:
        """One optimizer step and its record; returns the loss."""
        started = time.perf_counter()
        loss = self.engine.train_batch(wants_to_stop=self._stop.wanted)
        self._journal.add(loss, time.perf_counter() - started)
        return loss

    def settle(self) -> None:
        """Writes the records of all steps so far, the last one included."""
        self.engine.settle()
        self._journal.write_decided()

    # The end

    def _end_early(self, reason: str) -> None:
        self.settle()
        self.save()
        self.stopped = reason

    def _say_the_end(self, train_steps: int) -> None:
        steps = self.engine.global_steps
        how = f"stopped ({self.stopped}) after" if self.stopped else "done with"
        of_them = f", {steps - self._first_step} of them in this process"
        self._log.info(
            f"{how} step {steps} of {train_steps}{of_them if self._first_step else ''}: "
            f"{self.history.in_words(self.engine.skipped_steps)}"
        )
        if self.stopped and self.config.checkpoint.save is None:
            self._journal.warn("nothing of this run is saved: checkpoint.save is not given")

    def _roll_back(self, error: NonFiniteError, before: int) -> None:
        """Loads the newest checkpoint, and goes on with the data behind the batch of `error`.

        Args:
            before: steps that were done when the one under way began. The engine may count one
                more (fp16, which skips a step and goes on) or one less (a guess that was wrong).

        Raises:
            NonFiniteError: the policy is another, the budget is spent, or there is no checkpoint.
        """
        engine = self.engine
        failed = min(before, engine.global_steps) + 1
        is_noted = engine.global_steps > before
        self._journal.policy.roll_back(error)
        assert self.config.checkpoint.save is not None, "the config has been checked"
        folder = self.config.checkpoint.save
        try:
            engine.finish_saving()
        except CheckpointError as failed_save:
            if not failed_save.on_every_rank:
                raise
            # It has been said, and what was saved before is whole.
        if not self._has_saved or from_first(engine.mesh.world, lambda: newest(folder)) is None:
            raise NonFiniteError(
                error.what,
                origin=error.origin,
                advice=f"training.on_nonfinite.policy is 'rollback', and {folder} has no complete "
                "checkpoint of this run yet to go back to: lower checkpoint.interval",
                on_every_rank=True,
            ) from error
        position = None if engine.loader is None else engine.loader.state_dict()
        engine.load_checkpoint(folder)
        if engine.loader is not None and position is not None:
            engine.loader.load_state_dict(position)
        self.history.rollbacks += 1
        self.history.nan_steps += not is_noted
        self.validation = [(s, loss) for s, loss in self.validation if s <= engine.global_steps]
        self._journal.go_back()
        text = f"rolled back from step {failed} to step {engine.global_steps}"
        self._log.info(f"{text}; the data goes on behind the batch that failed")
        values = {"from_step": failed, "number": self.history.rollbacks}
        self._journal.event("rollback", values, f"{text}: {error.what}: {error.origin}")

    # Evaluating and saving

    def evaluate(self) -> float:
        """The validation loss on the first `training.eval_steps` batches; the same each time."""
        self.settle()
        engine, started = self.engine, time.perf_counter()
        count = self.config.training.eval_steps * engine.batch.num_microbatches
        loader = self._validation_loader()
        try:
            loss = float(engine.eval_batch(islice(loader, count), count))
        finally:
            loader.close()
        self.validation.append((engine.global_steps, loss))
        self.monitor.write(
            EvalRecord(
                step=engine.global_steps,
                consumed_samples=engine.consumed_samples,
                loss=loss,
                seconds=time.perf_counter() - started,
            )
        )
        return loss

    def _validation_loader(self) -> BatchLoader:
        batch, mesh = self.engine.batch, self.engine.mesh
        return BatchLoader(
            self._valid,
            train_batch_size=batch.train_batch_size,
            micro_batch_size=batch.micro_batch_size,
            data_rank=mesh.data.rank,
            data_size=mesh.data.size,
            shuffle=False,
            timeout_seconds=mesh.data_timeout_seconds,
        )

    def save(self) -> None:
        """Writes a checkpoint into `checkpoint.save`, if the config names a folder."""
        folder = self.config.checkpoint.save
        if folder is None:
            return
        self.settle()
        state = {**self._journal.state_dict(), "validation": self.validation}
        self.engine.save_checkpoint(folder, client_state={"trainer": state})
        self._has_saved = True

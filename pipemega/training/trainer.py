"""The training loop of a GPT run: train until the last step, and evaluate.

Records, checkpoints, resume and the end of the run belong to the engine, in a Trainer as in the
user's own loop: `pipemega.engine.training_run`; see docs/long_runs.md.
"""

import math
from collections.abc import Callable
from typing import Any

from pipemega.engine.engine import Engine
from pipemega.engine.run_stats import RunStats
from pipemega.errors import ConfigError, StopTraining
from pipemega.monitor import Monitor


class Trainer:
    """Trains an engine until step `training.train_steps`, and evaluates it in between.

    Args:
        engine: from `pipemega.initialize`, with training data.
        valid: validation dataset; None: no evaluation.
        tokens_per_sample, flops_per_token: for tokens/s, TFLOP/s and MFU; 0: do not record them.
        generate_text: returns (prompt, text) on every rank; called after each evaluation. None: no
            text.

    Attributes:
        history: counters of the run, over all its restarts.
        validation: (step, loss) of each evaluation so far.
        stopped: why `fit` ended before the last step; empty if it did not.
    """

    def __init__(
        self,
        engine: Engine,
        valid: Any = None,
        *,
        tokens_per_sample: int = 0,
        flops_per_token: float = 0.0,
        generate_text: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        self.engine, self.config, self._run = engine, engine.config, engine.run
        self.stopped = ""
        self._valid, self._generate_text = valid, generate_text
        self._text: tuple[str, str] | None = None
        self._run.take_over(None if valid is None else self.evaluate)
        logger = self._run.logger
        logger.tokens_per_sample = tokens_per_sample or logger.tokens_per_sample
        logger.flops_per_token = flops_per_token

    @property
    def history(self) -> RunStats:
        return self._run.logger.history

    @property
    def validation(self) -> list[tuple[int, float]]:
        return self._run.validation

    @property
    def monitor(self) -> Monitor:
        """Writes the records; on rank 0 only."""
        return self._run.logger.monitor

    def fit(self) -> float:
        """Train until `training.train_steps`; return the last training loss.

        A signal, `training.exit_after_minutes` or the end of the data stops it earlier, after a
        checkpoint; `stopped` has the reason.

        Raises:
            ConfigError: training.train_steps is missing.
            NonFiniteError: a step had inf or nan that `training.on_nonfinite` does not allow.
            ReplicaError: copies of a parameter differ (`training.check_replicas_every`).
        """
        settings, engine = self.config.training, self.engine
        if settings.train_steps is None and settings.epochs is None:
            raise ConfigError(
                "training.train_steps and training.epochs are missing: one of them is the length "
                "of the run"
            )
        self._run.begin()
        try:
            if self._valid is not None and settings.eval_interval and not self.validation:
                self.evaluate()
            while not engine.is_complete and not self.stopped:
                self._advance()
            engine.finish_saving()
            self._run.log_end()
        finally:
            self._run.release()
        return engine.last_step.loss if engine.last_step else math.nan

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
        """Return the validation loss on the first `training.eval_steps` batches."""
        loss = self.engine.evaluate(self._valid, self.engine.eval_batches)
        if self._generate_text is not None:
            self._text = self._generate_text()
            self._run.add_sample(*self._text)
        return loss

    def last_text(self) -> tuple[str, str] | None:
        """Return the (prompt, text) of the last evaluation; without one, generate it now."""
        if self._text is None and self._generate_text is not None:
            self._text = self._generate_text()
        return self._text

    def save(self) -> None:
        """Save a checkpoint in `checkpoint.save`, if the config has that folder."""
        self._run.save()

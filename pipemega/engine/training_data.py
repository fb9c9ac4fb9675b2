"""The training data of an engine, and the length of the run: in steps, or in passes over them."""

from collections.abc import Callable
from typing import Any

from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh
from pipemega.engine.build_loader import refuse_epochs, training_loader
from pipemega.errors import ConfigError
from pipemega.optimizer import LRSchedule


class TrainingData:
    """The loader of the training data, if the engine reads them itself, and the epochs of the run.

    Args:
        config, mesh: of the engine.
        loader: None: the caller passes iterators or batches, or calls `set`.

    Attributes:
        epochs: passes over the data in the whole run; None: the run has a number of steps.
        epoch: completed passes after the last batch that was read. Without `epochs` they are
            counted for map-style data only.
    """

    def __init__(self, config: Config, mesh: Mesh, loader: BatchLoader | None) -> None:
        self._config, self._mesh = config, mesh
        self.loader, self.epochs, self.epoch = loader, config.training.epochs, 0

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None: not known."""
        steps = self._config.training.train_steps
        if steps is not None or self.epochs is None or self.loader is None:
            return steps
        per_epoch = self.loader.steps_per_epoch
        return None if per_epoch is None else self.epochs * per_epoch

    def check_schedule(self, schedule: LRSchedule | None) -> None:
        """Refuse a schedule that no epoch would advance.

        Raises:
            ConfigError: on every rank.
        """
        if schedule is not None and schedule.by == "epoch" and self.epochs is None:
            raise ConfigError(
                "scheduler.by is 'epoch', and the run has no epochs, so the learning rate would "
                "never change: set training.epochs, or scheduler.by to 'step'",
                on_every_rank=True,
            )

    def set(self, data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> BatchLoader:
        """Build and return the loader of `data`.

        Raises:
            ConfigError: there is a loader already; or as `training_loader`.
        """
        if self.loader is not None:
            raise ConfigError(
                f"the engine has training data already ({self.loader.name}): give it once, to "
                "initialize(), engine.set_training_data() or Trainer(train=...)",
                on_every_rank=True,
            )
        self.loader = training_loader(self._config, self._mesh, data, collate_fn, self.epochs)
        return self.loader

    def set_epochs(self, epochs: int, *, after_step: bool) -> None:
        """Set the epochs of the run; no step of them has samples of two epochs.

        Args:
            after_step: this process has trained a step.

        Raises:
            ConfigError: a step was trained, the config has another length, the number is not
                positive, or the data can be read only once.
        """
        if after_step:
            raise ConfigError(
                f"set_epochs({epochs}) is called after a step: call it before the first one",
                on_every_rank=True,
            )
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(
                f"epochs must be an integer of at least 1, not {epochs!r}", on_every_rank=True
            )
        training = self._config.training
        for key, length in (("train_steps", training.train_steps), ("epochs", training.epochs)):
            if length is not None and (key, length) != ("epochs", epochs):
                raise ConfigError(
                    f"epochs={epochs} is given, and training.{key} is {length}: both set the "
                    "length of the run; keep one",
                    on_every_rank=True,
                )
        if self.loader is not None:
            refuse_epochs(self.loader, epochs)
            self.loader.end_steps_with_epochs()
        self.epochs = epochs

    def check_source(self, given: bool) -> None:
        """Refuse a run of epochs whose data the engine does not read itself.

        Args:
            given: the caller passes an iterator or a batch.

        Raises:
            ConfigError: the passes over its data cannot be counted.
        """
        if self.epochs is None or not (given or self.loader is None):
            return
        source = "train_batch() got an iterator or a batch" if given else "it has none"
        raise ConfigError(
            f"training.epochs ({self.epochs}) counts passes over the training data of the engine, "
            f"but {source}: give the data to initialize(), engine.set_training_data() or "
            "Trainer(train=...), or set training.train_steps instead",
            on_every_rank=self.loader is None,
        )

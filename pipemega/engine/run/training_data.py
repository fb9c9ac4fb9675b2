"""The training data of an engine, and the length of the run: in steps, or in passes over them.

Loaders of one data rank: of the training data, and of validation data.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipemega.config import Config
from pipemega.config.sections.scheduler_section import RunLength
from pipemega.data.loader import BatchLoader, is_map_style
from pipemega.data.sample_reader import Cyclic, Share
from pipemega.data.sample_sources import LoaderOptions
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.engine.run.batch_reader import StepData
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger
from pipemega.optimizer import LRSchedule


def share_of(config: Config, mesh: Mesh) -> Share:
    """Return the sizes of a training step after a ramp-up, and the share of this data rank."""
    batch = config.batch(mesh.data.size)
    return Share(batch.train_batch_size, batch.micro_batch_size, mesh.data.rank, mesh.data.size)


def training_loader(
    config: Config,
    mesh: Mesh,
    data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    epochs: int | None,
) -> BatchLoader:
    """Return the loader of the training data.

    Args:
        epochs: passes over the data; None: the run has a number of steps.

    Raises:
        ConfigError, DataError: as `BatchLoader`, or `refuse_epochs`.
    """
    sizes, order = config.batch_sizes(mesh.data.size), config.data.dataloader_type
    share = replace(share_of(config, mesh), ramp=sizes if sizes.changes else None)
    cyclic = None
    if order == "cyclic":
        size = len(data) if is_map_style(data) else 0
        sharding = config.data.data_sharding
        cyclic = Cyclic(size, share.micro_batch_size, share.data_size, sharding)
    options = LoaderOptions(
        seed=config.seed,
        shuffle=False if order == "single" else None,
        cyclic=cyclic,
        drop_last=config.dataloader_drop_last,
        by_epoch=epochs is not None,
        prefetch=config.data.prefetch,
        num_workers=config.data.num_workers,
        timeout_seconds=mesh.data_timeout_seconds,
        memory=HostMemory(mesh.device),
    )
    loader = BatchLoader(data, share, options, collate_fn=collate_fn)
    refuse_epochs(loader, epochs)
    if loader.is_map_style and not loader.reads_ahead:
        get_logger(mesh.rank).info(
            f"training data: {loader.name} may draw random numbers, so it is read when a step "
            "needs it; to read ahead, set data.num_workers, or deterministic = True on the dataset "
            "if a sample depends only on its index"
        )
    return loader


def refuse_epochs(loader: BatchLoader, epochs: int | None) -> None:
    """Refuse several passes over data that can be read only once.

    Raises:
        ConfigError: `epochs` is above 1, and the data is an iterator.
    """
    if epochs is not None and epochs > 1 and not loader.repeats:
        raise ConfigError(
            f"training.epochs is {epochs}, but {loader.name} is an iterator, which can be read "
            "only once: give a dataset whose __iter__ returns a new iterator, or set "
            "training.epochs to 1"
        )


def evaluation_loader(config: Config, mesh: Mesh, data: Any, *, whole: bool) -> BatchLoader:
    """Return a loader of validation data, in the order of the data.

    Args:
        whole: read the data once, with a partial batch at its end; False: it repeats.

    Raises:
        ConfigError, DataError: as `BatchLoader`.
    """
    options = LoaderOptions(
        seed=config.seed,
        shuffle=False,
        repeat=not whole,
        drop_last=not whole,
        by_epoch=whole,
        prefetch=config.data.prefetch,
        num_workers=config.data.num_workers if is_map_style(data) else 0,
        timeout_seconds=mesh.data_timeout_seconds,
        memory=HostMemory(mesh.device),
    )
    return BatchLoader(data, share_of(config, mesh), options)


class TrainingData:
    """The loader of the training data, if the engine reads them itself, and the epochs of the run.

    Args:
        config, mesh: the config and the device mesh of the engine.
        loader: the loader of the training data; None: the caller passes iterators
            or batches, or calls `set`.

    Attributes:
        epochs: passes over the data in the whole run; None: the run has a number of steps.
        epoch: completed passes after the last batch that was read. Without `epochs` they are
            counted for map-style data only.
        sizes: the number of samples of each step.
        loaded_samples: samples read from the loader in the whole run, also in steps that a
            rollback has discarded; the same on all ranks.
    """

    def __init__(self, config: Config, mesh: Mesh, loader: BatchLoader | None) -> None:
        self._config, self._mesh = config, mesh
        self.loader, self.epochs, self.epoch = loader, config.training.epochs, 0
        self.sizes, self.loaded_samples = config.batch_sizes(mesh.data.size), 0

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None: not known."""
        return self.length.steps

    @property
    def length(self) -> RunLength:
        """The length of the run in all units, as far as it is known."""
        length = self.sizes.run_length(self._config.training)._replace(epochs=self.epochs)
        per_epoch = self.loader.steps_per_epoch if self.loader is not None else None
        if length.steps is None and self.epochs is not None and per_epoch is not None:
            return length._replace(steps=self.epochs * per_epoch)
        return length

    def is_complete(self, steps: int, samples: int) -> bool:
        """Return whether a run of steps or samples ends after these steps and samples."""
        end = self._config.training.train_samples
        if end is not None:
            return samples + self.sizes.at(self.position(samples)) > end
        return self.total_steps is not None and steps >= self.total_steps

    def position(self, consumed: int, *, given: bool = False) -> int:
        """Return the samples before the next step, on which its size depends.

        Args:
            consumed: samples of the steps of the run.
            given: the caller passes the data of the step.
        """
        return consumed if given or self.loader is None else self.loaded_samples

    def start(self) -> int:
        """Continue at the position of the loader; return its epoch."""
        self.epoch = self.loaded_samples = 0
        if self.loader is not None:
            self.epoch, self.loaded_samples = self.loader.epoch, self.loader.consumed_samples
        return self.epoch

    def count(self, data: StepData, *, given: bool) -> None:
        """Count the data of a step."""
        self.epoch = self.epoch if data.epoch is None else data.epoch
        if not given:
            self.loaded_samples += data.num_samples

    def reload(self, load: Callable[[], object]) -> None:
        """Call `load`, which loads a checkpoint; the data continue after the last batch read."""
        loader, before = self.loader, (self.epoch, self.loaded_samples)
        position = None if loader is None else loader.state_dict()
        load()
        if loader is not None and position is not None:
            loader.load_state_dict(position)
            self.epoch, self.loaded_samples = before

    def check_schedule(self, schedule: LRSchedule | None) -> None:
        """Refuse a schedule that no epoch would advance.

        Raises:
            ConfigError: the schedule counts epochs and the run has none; on every rank.
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
        for key, length in self._config.training.lengths.items():
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

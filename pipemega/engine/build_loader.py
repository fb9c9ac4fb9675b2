"""Loaders of one data rank: of the training data, and of validation data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipemega.config import Config
from pipemega.data.loader import BatchLoader, is_map_style
from pipemega.data.sample_order import Cyclic, Share
from pipemega.data.sources import LoaderOptions
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger


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

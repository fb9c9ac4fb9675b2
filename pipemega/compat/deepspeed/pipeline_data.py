"""Micro-batches of a DeepSpeed script, as the engine reads them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pipemega.config import Config
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError

BatchFn = Callable[[Any], Any]


class ScriptBatches:
    """Iterator over (inputs, labels), from an iterator of the user; lists become tuples.

    Args:
        source: yields (inputs, labels), or what `batch_fn` makes such a pair of. None: `batch_fn`
            gets None, as on tensor ranks that receive their data from another one.
        batch_fn: of `set_batch_fn`.

    Attributes:
        inputs_may_differ: DeepSpeed uses the inputs of the first stage only, so those of other
            stages may be random. The labels must agree: they show that the samples are the same.
    """

    inputs_may_differ = True

    def __init__(self, source: Iterator[Any] | None, batch_fn: BatchFn | None) -> None:
        self._source, self._batch_fn = source, batch_fn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = None if self._source is None else next(self._source)
        if self._batch_fn is not None:
            batch = self._batch_fn(batch)
        if not isinstance(batch, tuple | list) or not batch:
            return batch  # the engine names its type
        # Without a loss_fn there may be no labels.
        inputs, labels = batch[0], batch[1] if len(batch) > 1 else None
        return _tupled(inputs), _tupled(labels)


def _tupled(part: Any) -> Any:
    """Return a list of tensors, which torch's DataLoader makes of a tuple, as a tuple."""
    return tuple(part) if isinstance(part, list) else part


def training_loader_of(
    dataset: Any, config: Config, mesh: Mesh, collate_fn: Callable[[list[Any]], Any] | None
) -> DataLoader[Any]:
    """Return DeepSpeed's loader of training data: in order, every data-th sample of each rank.

    Raises:
        ConfigError: the data has no length.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"initialize(training_data=...) is a {type(dataset).__name__} without a length: pass "
            "an iterator over micro-batches to train_batch(data_iter) instead",
            on_every_rank=True,
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=mesh.data.size, rank=mesh.data.rank, shuffle=False
    )
    return DataLoader(
        dataset,
        batch_size=config.batch(mesh.data.size).micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        num_workers=config.data.num_workers,
        pin_memory=torch.cuda.is_available(),
    )

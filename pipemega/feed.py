"""What one rank reads of a batch: inputs where the first stage is, labels where the last one is."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.data.loader import BatchLoader
from pipemega.errors import ConfigError, DataError
from pipemega.mesh import Mesh


class Feed:
    """Micro-batches for the stages of one rank, from the caller's iterators or from a loader.

    Args:
        mesh: whose ranks agree on how many micro-batches there are.
        num_microbatches: that a training step takes.
        loader: over the training data; None where the caller brings iterators.
        reads_inputs: the first stage is on this rank.
        reads_labels: the last stage is on this rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        num_microbatches: int,
        loader: BatchLoader | None,
        *,
        reads_inputs: bool,
        reads_labels: bool,
    ) -> None:
        self._mesh, self._num_microbatches, self._loader = mesh, num_microbatches, loader
        self._reads_inputs, self._reads_labels = reads_inputs, reads_labels
        self.seconds = 0.0
        """That the last `batch` took."""

    def batch(self, data_iter: Iterator[Any] | None) -> tuple[list[Any], list[Any]]:
        """The (inputs, labels) of the next training step, from `data_iter` or the loader.

        Raises:
            StopIteration, DataError: as `read`.
            ConfigError: there is neither.
        """
        started = time.perf_counter()
        try:
            return self._batch(data_iter)
        finally:
            self.seconds = time.perf_counter() - started

    def _batch(self, data_iter: Iterator[Any] | None) -> tuple[list[Any], list[Any]]:
        if data_iter is not None:
            return self.read(data_iter, self._num_microbatches)
        if self._loader is None and not (self._reads_inputs or self._reads_labels):
            # Between the first and the last stage there is nothing to read, so nothing to pass.
            return self.read(iter(()), self._num_microbatches)
        if self._loader is None:
            raise ConfigError(
                "train_batch() has no data: give initialize() training_data, or call "
                "train_batch(iterator over (inputs, labels))"
            )
        if not self._loader.is_map_style:
            return self.read(self._loader, self._num_microbatches)
        # It begins another epoch at the end, on every rank alike: there is nothing to agree on.
        if not (self._reads_inputs or self._reads_labels):
            return [None] * self._num_microbatches, []
        return self._pairs(self._loader.next_step())

    def read(self, data_iter: Iterator[Any], count: int) -> tuple[list[Any], list[Any]]:
        """The next `count` micro-batches; all ranks agree on whether there are so many.

        Raises:
            StopIteration: there are none; on every rank.
            DataError: there are some, but too few; on every rank.
        """
        reads = self._reads_inputs or self._reads_labels
        got = list(itertools.islice(data_iter, count)) if reads else [None] * count
        fewest = self._smallest(len(got))
        if fewest == count:
            return self._pairs(got) if reads else (got, [])
        if fewest == 0 and self._smallest(-len(got) if reads else 0) == 0:
            raise StopIteration
        raise DataError(
            f"the data ended within a batch: {count} micro-batches are needed, and the iterator of "
            f"a data rank had {fewest} left (this rank: {len(got)}); give a multiple of {count}, "
            f"or drop the rest",
            on_every_rank=True,
        )

    def _smallest(self, number: int) -> int:
        if self._mesh.world.size == 1:
            return number
        tensor = torch.tensor(number, device=self._mesh.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._mesh.world.group)
        return int(tensor.item())

    def _pairs(self, batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        for at, batch in enumerate(batches):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise DataError(
                    f"micro-batch {at} is a {type(batch).__name__}, and must be a pair "
                    f"(inputs, labels); each of them may be any tree of tensors"
                )
        inputs = [batch[0] for batch in batches]
        labels = [batch[1] for batch in batches]
        return (
            self.to_device(inputs) if self._reads_inputs else [None] * len(batches),
            self.to_device(labels) if self._reads_labels else [],
        )

    def to_device(self, tree: Any) -> Any:
        """The same tree with its tensors on the device of this rank."""
        device = self._mesh.device
        return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), tree)

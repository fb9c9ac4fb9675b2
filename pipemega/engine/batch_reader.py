"""Batch reader: inputs on the ranks of the first stage, labels on the ranks of the last stage."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh
from pipemega.engine.data_comparison import DataComparison
from pipemega.errors import ConfigError, DataError
from pipemega.host_memory import HostMemory


class BatchReader:
    """Reads micro-batches for the stages of one rank, from the caller's iterators or a loader.

    Args:
        mesh: its ranks agree on the number of micro-batches that are left.
        rank_of_stage: the pipeline rank of each stage.
        num_microbatches: of a training step.
        loader: of the training data; None if the caller passes iterators.
        compare_every: how often to compare what the ranks have read; config key
            data.compare_every.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank_of_stage: Sequence[int],
        num_microbatches: int,
        loader: BatchLoader | None,
        compare_every: int,
    ) -> None:
        self._mesh, self._num_microbatches, self._loader = mesh, num_microbatches, loader
        self._memory = HostMemory(mesh.device)
        self._training_data = DataComparison(mesh, compare_every, "train_batch")
        self._evaluation_data = DataComparison(mesh, compare_every, "eval_batch")
        self._reads_inputs = mesh.pipeline.rank == rank_of_stage[0]
        self._reads_labels = mesh.pipeline.rank == rank_of_stage[-1]
        self._reads = self._reads_inputs or self._reads_labels

    def next_step(self, data_iter: Iterator[Any] | None) -> tuple[list[Any], list[Any]]:
        """Return the (inputs, labels) of the next training step, from `data_iter` or the loader.

        Raises:
            StopIteration, DataError: as `next_evaluation`.
            ConfigError: neither exists, or `data_iter` is not an iterator.
        """
        loader, count = self._loader, self._num_microbatches
        if data_iter is not None:
            _refuse_restarting(data_iter)
            return self._read(data_iter, count, self._training_data)
        if loader is None and not self._reads:
            # On other ranks the caller passes iterators; this rank only joins their collectives.
            return self._read(iter(()), count, self._training_data)
        if loader is None:
            raise ConfigError(
                "train_batch() has no data: give initialize() training_data, or call "
                "train_batch(iterator over (inputs, labels))"
            )
        if not loader.is_map_style:
            return self._read(loader, count, self._training_data)
        # A map-style loader repeats its epochs and never ends: no agreement needed.
        pairs = loader.next_step() if self._reads else None
        if loader.is_compared:
            self._training_data.check(pairs, count)
        return self._split(pairs, count)

    def next_evaluation(self, data_iter: Iterator[Any], count: int) -> tuple[list[Any], list[Any]]:
        """Return the next `count` micro-batches as (inputs, labels); collective.

        Raises:
            StopIteration: no micro-batch is left; on every rank.
            DataError: fewer than `count` are left, or the ranks of a data rank have read different
                data; on every rank. Or one is not a pair.
        """
        return self._read(data_iter, count, self._evaluation_data)

    def _read(
        self, data_iter: Iterator[Any], count: int, comparison: DataComparison
    ) -> tuple[list[Any], list[Any]]:
        pairs = list(itertools.islice(data_iter, count)) if self._reads else None
        had = count if pairs is None else len(pairs)
        fewest = self._min_over_ranks(had)
        if fewest == count:
            _check_pairs(pairs or ())
            if not isinstance(data_iter, BatchLoader):
                comparison.check(pairs, count)
            elif data_iter.is_compared:
                comparison.check(pairs, count, must_differ=data_iter.must_differ)
            return self._split(pairs, count)
        if fewest == 0 and self._min_over_ranks(-had if self._reads else 0) == 0:
            raise StopIteration(
                "the iterator has no micro-batch left: end the loop there (except StopIteration), "
                "or make the data repeat, for example by giving initialize() the dataset"
            )
        raise DataError(
            f"the data ended within a batch: {count} micro-batches are needed, and the iterator of "
            f"a data rank had {fewest} left (this rank: {had}); give a multiple of {count}, "
            f"or drop the rest",
            on_every_rank=True,
        )

    def _min_over_ranks(self, number: int) -> int:
        if self._mesh.world.size == 1:
            return number
        # In host memory: a number of the device could be read only after all work before it.
        tensor = torch.tensor(number, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._mesh.world.group)
        return int(tensor)

    def _split(self, pairs: Sequence[Any] | None, count: int) -> tuple[list[Any], list[Any]]:
        """Keep what the stages of this rank read, on its device."""
        if pairs is None:
            return [None] * count, []
        inputs = [pair[0] if self._reads_inputs else None for pair in pairs]
        labels = [pair[1] for pair in pairs] if self._reads_labels else []
        return self.to_device(inputs), self.to_device(labels)

    def to_device(self, tree: Any) -> Any:
        """Copy the tensors of a pytree to the device of this rank, from pinned memory.

        A loader has pinned its data in its thread; that of a caller's iterator is pinned here.
        """

        def copied(tensor: Tensor) -> Tensor:
            return self._memory.pinned(tensor).to(self._mesh.device, non_blocking=True)

        return pytree.tree_map_only(Tensor, copied, tree)


def _refuse_restarting(data_iter: Any) -> None:
    """Refuse a DataLoader or list: each step would read its first micro-batches."""
    if not hasattr(data_iter, "__next__"):
        raise ConfigError(
            f"train_batch() takes an iterator, and {type(data_iter).__name__} starts again at each "
            "call: make iterator = iter(...) once, before the first step, or give it to "
            "initialize() as training_data"
        )


def _check_pairs(batches: Sequence[Any]) -> None:
    """Check micro-batches of a caller's iterator; a loader checks its own."""
    for index, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"micro-batch {index} is a {type(batch).__name__}, and must be a pair "
                f"(inputs, labels); each of them may be any pytree of tensors"
            )

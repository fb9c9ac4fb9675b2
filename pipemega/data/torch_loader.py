"""A torch DataLoader as training data: its batches are the micro-batches of one data rank."""

from collections.abc import Generator, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pipemega.data.sample_reader import MicroBatch, SampleReader, Share, make_pair
from pipemega.data.sample_sources import Delivery, LoaderOptions, OrderedSource, Position
from pipemega.errors import ConfigError, DataError
from pipemega.random import derive_seed

# These give every data rank the same samples.
_SAME_ON_ALL_RANKS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_WAY_OUT = (
    "give initialize() the dataset itself, which is then shared out over the data ranks; or, with "
    "mesh = pipemega.build_mesh(pipemega.load_config(config)), use DistributedSampler(dataset, "
    "num_replicas=mesh.data.size, rank=mesh.data.rank) and initialize(..., mesh=mesh)"
)


class TorchLoaderSource(OrderedSource):
    """The batches of a DataLoader, taken as they are, epoch after epoch.

    Order and random numbers of an epoch depend on the seed and the epoch, so that all ranks of a
    data rank read the same, and a resumed run continues at the same micro-batch: it reads the
    micro-batches of the epoch up to this one and drops them.

    Raises:
        ConfigError: sizes, sampler or options do not fit the run.
    """

    def __init__(
        self, data: DataLoader[Any], reader: SampleReader, share: Share, options: LoaderOptions
    ):
        super().__init__(data, reader, share, options)
        self._unit = share.samples_per_slice
        self._dataset = data.dataset
        self._described = f"{self.name} of {type(data.dataset).__name__}"
        # Its own workers read ahead. Without them this process must not.
        self.reads_ahead = False
        inner = getattr(data.batch_sampler, "sampler", None)
        self._samplers: list[Any] = [data.sampler, data.batch_sampler, inner]
        self._generators = _generators_of(data, *self._samplers)
        self._refuse_other_sizes()
        self._refuse_other_ranks()
        # A sampler of the user's class, or an iterable dataset.
        self.must_differ = share.data_size > 1 and not any(map(_is_distributed, self._samplers))

    def deliveries(self, start: Position) -> Generator[Delivery, None, None]:
        unit = self._share.samples_per_slice
        if (start.consumed - start.epoch_start) % unit:
            raise DataError(
                f"the position in the {self.name}, sample {start.consumed - start.epoch_start} of "
                f"epoch {start.epoch}, is not between two micro-batches: those of all data ranks "
                f"have {unit} samples together (train_micro_batch_size_per_gpu * mesh.data); "
                "restore the old sizes"
            )
        for at, batches in self._groups(start):
            count = self._group_size(at.consumed)
            for batch, position in batches:
                size = (position.consumed - at.consumed) // self._share.data_size
                yield Delivery(batch, position, size)
                at = position
            # Without samples a micro-batch repeats the first one of the step.
            for _ in range(len(batches), count):
                yield Delivery(batches[0][0], at, 0)

    @property
    def steps_per_epoch(self) -> int | None:
        loader, count = self.data, self._share.num_microbatches
        sized = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        # The length of a loader over an iterable dataset is a guess of the user.
        if isinstance(loader.dataset, IterableDataset) or not isinstance(sized, Sized):
            return None
        return len(loader) // count if self._options.drop_last else -(-len(loader) // count)

    def _group_size(self, consumed: int) -> int:
        # Without epochs nothing is known of the steps before they are read.
        return super()._group_size(consumed) if self._options.by_epoch else 1

    def _is_last(self, epoch: Position, had: int) -> bool:
        by_epoch, drop_last = self._options.by_epoch, self._options.drop_last
        needed = self._group_size(epoch.consumed) if drop_last else 1
        if had < needed and (by_epoch or epoch.epoch == 0):
            dropped = ", or fewer than a step, which are dropped" if by_epoch and drop_last else ""
            raise DataError(
                f"the {self.name} yielded no micro-batch in epoch {epoch.epoch}{dropped}"
            )
        # An iterable dataset may have ended for good.
        return not had

    def _epoch(self, epoch: int) -> Iterator[tuple[MicroBatch, int]]:
        for part in (*self._samplers, self.data.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        for generator, seed in self._generators:
            generator.manual_seed(derive_seed(seed, epoch))
        which, data_rank = f"a batch of epoch {epoch}", self._share.data_rank
        size = full = self._share.micro_batch_size
        for batch in self._reader.each(self.data, epoch, unit="micro-batch", data_rank=data_rank):
            if size < full:
                raise self._odd_size(size, epoch)
            pair = make_pair(batch, self.name, which)
            size = self._size(pair)
            if size > full:
                raise self._odd_size(size, epoch)
            yield pair, size * self._share.data_size

    def _size(self, batch: MicroBatch) -> int:
        """Return the number of samples of a batch: only the last one of an epoch may be smaller."""
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        is_custom = type(self.data.batch_sampler) is not BatchSampler
        if not self._options.by_epoch or is_custom or not tensors or not tensors[0].dim():
            # The sizes of its batches are known only to the user's code.
            return self._share.micro_batch_size
        return len(tensors[0])

    def _odd_size(self, size: int, epoch: int) -> DataError:
        return DataError(
            f"a batch of the {self.name} in epoch {epoch} has {size} samples instead of "
            f"{self._share.micro_batch_size} (train_micro_batch_size_per_gpu), and is not the last "
            "one of the epoch: set drop_last=True, which drops the smaller batches of all its "
            "workers"
        )

    def close(self) -> None:
        # A later source of the same DataLoader, as of the next evaluation, reads their first seeds.
        for generator, seed in self._generators:
            generator.manual_seed(seed)

    def _refuse_other_sizes(self) -> None:
        if self._reader.has_collate:
            raise ConfigError(
                f"training_data is a {self.name}, and collate_fn is given too: give collate_fn to "
                f"the {self.name}"
            )
        loader, size = self.data, self._share.micro_batch_size
        batches = loader.batch_sampler
        if self._options.num_workers:
            raise ConfigError(
                f"data.num_workers is {self._options.num_workers}, but training_data is a "
                f"{self.name}, which has its own num_workers ({loader.num_workers}): set "
                "data.num_workers to 0"
            )
        if type(batches) is not BatchSampler:
            # The sizes of its batches are known only to the user's code.
            return
        if batches.batch_size != size:
            raise ConfigError(
                f"the {self.name} has batch_size {batches.batch_size}, and its batches are the "
                f"micro-batches of train_micro_batch_size_per_gpu {size}: make them equal, or give "
                f"the dataset itself in place of the {self.name}"
            )
        rest = len(batches.sampler) % size if isinstance(batches.sampler, Sized) else None
        if rest != 0 and not batches.drop_last and not self._options.by_epoch:
            last = "may be smaller" if rest is None else f"would have {rest} samples"
            raise ConfigError(
                f"the last batch of an epoch of the {self.name} {last} instead of {size} "
                "(train_micro_batch_size_per_gpu): set drop_last=True; or set training.epochs: "
                "then the last batch of an epoch may be smaller"
            )

    def _refuse_other_ranks(self) -> None:
        rank, size = self._share.data_rank, self._share.data_size
        for sampler in filter(_is_distributed, self._samplers):
            if (sampler.num_replicas, sampler.rank) != (size, rank):
                raise ConfigError(
                    f"the {type(sampler).__name__} of the {self.name} has rank {sampler.rank} of "
                    f"num_replicas {sampler.num_replicas}, but this is data rank {rank} of {size}; "
                    f"pipeline and tensor ranks of one data rank read the same samples: {_WAY_OUT}"
                )
        batches = self.data.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else self.data.sampler
        is_custom = type(batches) not in (BatchSampler, type(None))
        if size > 1 and type(sampler) in _SAME_ON_ALL_RANKS and not is_custom:
            raise ConfigError(
                f"the {type(sampler).__name__} of the {self.name} gives all {size} data ranks the "
                f"same samples: {_WAY_OUT}"
            )


def _is_distributed(sampler: Any) -> bool:
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def _generators_of(*parts: Any) -> list[tuple[torch.Generator, int]]:
    """Return the generators of a loader and its samplers, and the seed of each."""
    found = (getattr(part, "generator", None) for part in parts)
    return [(g, g.initial_seed()) for g in found if isinstance(g, torch.Generator)]

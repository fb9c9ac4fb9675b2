"""Read samples of a user's dataset: with reproducible random numbers, and errors that name them.

The order of samples: arithmetic on the global stream of samples, the same on every mesh.

Sample number g of the run is entry g % n of epoch g // n. A step reads the next train_batch_size
samples of the stream; micro-batch j of data rank r reads the positions

    consumed + j * micro * data_size + r * micro + [0, micro)

so the samples of a step do not depend on the micro-batch size or the number of data ranks.

    train_batch_size 8, micro 2, data_size 2        rank 0    rank 1
                                  micro-batch 0     0 1       2 3
                                  micro-batch 1     4 5       6 7

If steps are aligned with epochs, the last step of an epoch may be partial: it reads the same
positions up to its last sample. A step of 5 samples:

                                  micro-batch 0     0 1       2 3
                                  micro-batch 1     4         (none)

If the batch size grows (`training.rampup_batch_size`), later steps read more micro-batches of the
same stream.

Collate samples into a micro-batch (inputs, labels), each any pytree.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from pipemega.config.batch import BatchSizes
from pipemega.errors import ConfigError, DataError
from pipemega.random import derive_seed, seed_rng

Indices = npt.NDArray[np.int64]


class SampleKey(NamedTuple):
    """A sample of a map-style dataset, in one of its epochs."""

    epoch: int
    sample: int


class StepPart(NamedTuple):
    """A micro-batch of a step. The samples of the step are numbered from 0.

    Args:
        begin: first sample of the micro-batches of all data ranks at this place of the step.
        end: the one after their last.
        own: samples of this data rank; empty: it has none of a partial step.
    """

    begin: int
    end: int
    own: range


@dataclass(frozen=True)
class Share:
    """Sizes of a step, and the data rank whose share of each step is read.

    Args:
        ramp: the train_batch_size of each step; None: it is constant.

    Raises:
        ConfigError: the sizes do not divide.
    """

    train_batch_size: int
    micro_batch_size: int
    data_rank: int = 0
    data_size: int = 1
    ramp: BatchSizes | None = None

    def __post_init__(self) -> None:
        unit = self.samples_per_slice
        if self.micro_batch_size < 1 or self.train_batch_size < 1:
            raise ConfigError(
                f"train_batch_size ({self.train_batch_size}) and the micro-batch size "
                f"({self.micro_batch_size}) must be at least 1"
            )
        if not 0 <= self.data_rank < self.data_size:
            raise ConfigError(
                f"data_rank ({self.data_rank}) must be at least 0 and below data_size "
                f"({self.data_size})"
            )
        if self.train_batch_size % unit:
            below = self.train_batch_size // unit * unit
            nearest = " and ".join(str(size) for size in (below, below + unit) if size)
            raise ConfigError(
                f"train_batch_size ({self.train_batch_size}) must be a multiple of the micro-batch "
                f"size * mesh.data ({self.micro_batch_size} * {self.data_size} = {unit}); the "
                f"nearest that fit are {nearest}"
            )

    def at(self, consumed: int) -> "Share":
        """Return the share of the step that begins after `consumed` samples of the run."""
        if self.ramp is None:
            return self
        return replace(self, train_batch_size=self.ramp.at(consumed), ramp=None)

    @property
    def samples_per_slice(self) -> int:
        """Samples of one micro-batch on all data ranks together."""
        return self.micro_batch_size * self.data_size

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step."""
        return self.train_batch_size // self.samples_per_slice

    def owns(self, offset: int) -> bool:
        """Return whether this rank reads the sample at position `offset` of a step."""
        return offset % self.samples_per_slice // self.micro_batch_size == self.data_rank

    def parts(self, num_samples: int) -> Iterator[StepPart]:
        """Yield the micro-batches of this rank in a step of `num_samples`."""
        for begin in range(0, self.train_batch_size, self.samples_per_slice):
            first = begin + self.data_rank * self.micro_batch_size
            own = range(first, min(first + self.micro_batch_size, num_samples))
            yield StepPart(begin, min(begin + self.samples_per_slice, num_samples), own)


class EpochOrder:
    """Converts stream positions to indices of a map-style dataset.

    Args:
        num_samples: the dataset's length n.
        seed: seed of the permutations; the permutation of epoch e depends only on (seed, e).
        shuffle: False keeps the dataset's own order in every epoch.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._kept: tuple[int, Indices] | None = None

    def keys(self, start: int, stop: int) -> list[SampleKey]:
        """Return the samples at the stream positions [start, stop), across epochs."""
        return [self._key(*divmod(place, self.num_samples)) for place in range(start, stop)]

    def _key(self, epoch: int, place: int) -> SampleKey:
        if not self.shuffle:
            return SampleKey(epoch, place)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, self._permutation(epoch)
        return SampleKey(epoch, self._kept[1].item(place))

    def _permutation(self, epoch: int) -> Indices:
        """Return the indices of an epoch in the order of the stream. [num_samples]"""
        # RandomState, because numpy promises never to change its streams: a run that is
        # resumed with another numpy must continue with the same permutation.
        random = np.random.RandomState([self.seed % 2**32, epoch])
        return random.permutation(self.num_samples).astype(np.int64)


@dataclass(frozen=True)
class Cyclic:
    """Settings of Megatron's random sampler (`--dataloader-type cyclic`), in a checkpoint too.

    Attributes:
        dataset_size: number of samples of the dataset.
        micro_batch_size, data_size: sizes of the run that started the order. The order of an epoch
            depends on them, so a run that continues it on another mesh keeps them.
        data_sharding: each data rank permutes its own part of the dataset.
    """

    dataset_size: int
    micro_batch_size: int
    data_size: int
    data_sharding: bool = True


class CyclicOrder(EpochOrder):
    """The order of Megatron's random sampler.

    The permutation of epoch e is drawn by torch's generator with seed e and does not depend on
    the seed of the run. With `data_sharding` data rank r reads the r-th of data_size equal parts,
    all with one permutation; otherwise it reads the places r, r + data_size, ... of a permutation
    of the whole. Samples that do not fill a micro-batch of all data ranks are dropped.

    Raises:
        DataError: an epoch has no micro-batch for each data rank.

    Source: Megatron-LM, training/datasets/data_samplers.py, MegatronPretrainingRandomSampler.
    """

    def __init__(self, settings: Cyclic) -> None:
        unit = settings.micro_batch_size * settings.data_size
        self._settings, self._num_slices = settings, settings.dataset_size // unit
        if not self._num_slices:
            raise DataError(
                f"the data has {settings.dataset_size} samples, and an epoch of "
                "data.dataloader_type 'cyclic' needs a micro-batch for each data rank: "
                f"{settings.micro_batch_size} * {settings.data_size} = {unit}"
            )
        super().__init__(self._num_slices * unit, 0, shuffle=True)

    def _permutation(self, epoch: int) -> Indices:
        micro, size = self._settings.micro_batch_size, self._settings.data_size
        generator = torch.Generator().manual_seed(epoch)
        if self._settings.data_sharding:
            part = self._num_slices * micro
            own = torch.randperm(part, generator=generator).view(-1, 1, micro)
            found = own + part * torch.arange(size).view(1, -1, 1)  # [slices, rank, micro]
        else:
            whole = self._settings.dataset_size // micro * micro
            places = torch.randperm(whole, generator=generator)[: self.num_samples]
            found = places.view(-1, micro, size).transpose(1, 2)  # [slices, rank, micro]
        indices: Indices = found.reshape(-1).numpy()
        return indices


# A user's pytree of tensors, arrays and numbers has no narrower type.
Pytree: TypeAlias = Any
MicroBatch = tuple[Pytree, Pytree]
Collate = Callable[[list[Pytree]], Pytree]


def stack_samples(samples: Sequence[Pytree]) -> Pytree:
    """Stack samples of one structure along a new first dim.

    As torch's `default_collate`, but a tuple stays a tuple (torch makes it a list): a message
    between pipeline stages must keep its structure.
    """
    first = samples[0]
    if type(first) is tuple:
        if len({len(sample) for sample in samples}) > 1:
            raise ValueError(f"tuples of {sorted({len(sample) for sample in samples})} members")
        return tuple(stack_samples([sample[i] for sample in samples]) for i in range(len(first)))
    return default_collate(list(samples))


def make_pair(batch: Pytree, source: str, which: str) -> MicroBatch:
    """Return a micro-batch as a tuple (inputs, labels).

    Raises:
        DataError: it is not a pair; the message names `source` and `which` samples.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{len(batch)} members" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(
            f"{source} must return (inputs, labels) pairs, but {which} give {got}; "
            "inputs and labels may each be a tuple or a dict"
        )
    return batch[0], batch[1]


_END = object()

# Datasets whose `[i]` draws no random numbers; a subclass may.
_PLAIN = (list, tuple, TensorDataset)


class SampleReader:
    """Read samples, and record which sample each thread currently reads.

    If the data may draw random numbers, the default generators of torch, numpy and `random` are
    seeded from the sample. So a sample is the same on every mesh, on every rank, in every worker
    and after a resume. Only one thread may read such data, while the model does not run, and the
    caller restores the generators.

    Args:
        dataset: map-style or iterable, or a DataLoader.
        name: name of the dataset in messages.
        collate: the user's collate function, or None.

    Attributes:
        seed: seed of the random numbers of all samples.
        has_collate: `collate` is not None.
        is_deterministic: the dataset and the collate function are declared to be: a sample depends
            only on its index, and is the same on all ranks.
        may_draw: they may draw random numbers from the default generators.

    Raises:
        DataError: while reading: a sample cannot be read, or samples do not fit together.
    """

    def __init__(self, dataset: Any, name: str, collate: Collate | None) -> None:
        self.name, self.seed = name, 0
        self.is_deterministic = _declares(dataset) and (collate is None or _declares(collate))
        is_plain = type(dataset) in _PLAIN and collate is None
        self.may_draw = not self.is_deterministic and not is_plain
        self._dataset, self._collate, self.has_collate = dataset, collate, collate is not None
        # Thread id -> what it reads; the oldest read is first.
        self._current: dict[int, str] = {}

    @property
    def current(self) -> str:
        """Text that names the oldest read in progress, for the message of a timeout."""
        return next(iter([*self._current.values()]), "no sample is being read")

    def micro_batch(self, keys: list[SampleKey]) -> MicroBatch:
        """Read some samples and collate them."""
        which = f"samples {', '.join(str(key.sample) for key in keys)}"
        samples = [self._sample(key) for key in keys]
        return self.together(samples, which, *keys[0])

    def together(self, samples: list[Pytree], which: str, *place: int) -> MicroBatch:
        """Collate samples into a micro-batch.

        Args:
            which: names the samples in messages.
            place: numbers that no other micro-batch of the run has, to seed its random numbers.
        """
        named = f"{which} of {self.name}"
        with self._reading(named, "are being collated", "micro-batch", *place):
            try:
                collate = stack_samples if self._collate is None else self._collate
                batch = collate(list(samples))
            except Exception as error:
                raise DataError(
                    f"{named} cannot be collated into one micro-batch: {error}; samples must have "
                    "equal structure and shapes, or give a collate_fn that makes them equal"
                ) from error
            return make_pair(batch, self.name, which)

    def each(
        self, items: Iterable[Pytree], epoch: int, *, unit: str = "sample", data_rank: int = 0
    ) -> Iterator[Pytree]:
        """Yield the items of an iterable; an error names the number of the item in the epoch.

        Args:
            unit: what an item is.
            data_rank: data rank whose random numbers are used, if data ranks read different items.
                The first item is read with the random numbers of data rank 0, because the order of
                the epoch is drawn with it.
        """
        iterator: Iterator[Pytree] | None = None
        for count in itertools.count():
            place = unit, epoch, count, count and data_rank
            with self._reading(f"{unit} {count} of {self.name}", "is being read", *place):
                iterator = iter(items) if iterator is None else iterator
                item = next(iterator, _END)
            if item is _END:
                return
            yield item

    def _sample(self, key: SampleKey) -> Pytree:
        which = f"sample {key.sample} of {self.name}"
        with self._reading(which, "is being read", "sample", *key):
            return self._dataset[key.sample]

    @contextmanager
    def _reading(self, which: str, doing: str, *place: object) -> Iterator[None]:
        """Note what this thread reads; seed the default generators if the data may draw from them.

        Args:
            place: what the seed is derived from.

        Raises:
            DataError: the block has failed; the message names `which`.
        """
        self._current[get_ident()] = f"{which} {doing}"
        try:
            if self.may_draw:
                seed_rng(derive_seed(self.seed, *place))
            yield
        except DataError:
            raise
        # sys.exit() inside a dataset must not end the run with exit code 0.
        except (Exception, SystemExit) as error:
            text = f"{which} could not be read: {type(error).__name__}: {error}"
            raise DataError(text.removesuffix(": ")) from error
        finally:
            del self._current[get_ident()]


def _declares(part: Any) -> bool:
    return bool(getattr(part, "deterministic", False))

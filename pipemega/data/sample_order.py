"""The order of samples: arithmetic on the global stream of samples, the same on every mesh.

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
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipemega.config.batch_sizes import BatchSizes
from pipemega.errors import ConfigError, DataError

Indices = npt.NDArray[np.int64]


class SampleKey(NamedTuple):
    """A sample of a map-style dataset, in one of its epochs."""

    epoch: int
    sample: int


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

    def bounds(self, consumed: int) -> tuple[int, int]:
        """Return [start, stop) of this rank's micro-batch after `consumed` samples."""
        start = consumed + self.data_rank * self.micro_batch_size
        return start, start + self.micro_batch_size

    def owns(self, offset: int) -> bool:
        """Return whether this rank reads the sample at position `offset` of a step."""
        return offset % self.samples_per_slice // self.micro_batch_size == self.data_rank

    def sizes(self, num_samples: int) -> list[int]:
        """Return the samples of each micro-batch of this rank in a step of `num_samples`."""
        starts = (self.bounds(j * self.samples_per_slice)[0] for j in range(self.num_microbatches))
        return [min(max(num_samples - start, 0), self.micro_batch_size) for start in starts]


class EpochOrder:
    """Converts stream positions to indices of a map-style dataset.

    Args:
        num_samples: the dataset's length n.
        seed: of the permutations; the permutation of epoch e depends only on (seed, e).
        shuffle: False keeps the dataset's own order in every epoch.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._kept: tuple[int, Indices] | None = None

    def keys(self, start: int, stop: int) -> list[SampleKey]:
        """Return the samples at the stream positions [start, stop)."""
        indices = self.indices(start, stop).tolist()
        epochs = (position // self.num_samples for position in range(start, stop))
        return [SampleKey(*key) for key in zip(epochs, indices, strict=True)]

    def indices(self, start: int, stop: int) -> Indices:
        """Return the dataset indices of the stream positions [start, stop), across epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.num_samples)
            count = min(stop - start, self.num_samples - offset)
            parts.append(self._slice(epoch, offset, count))
            start += count
        return np.concatenate(parts)

    def _slice(self, epoch: int, offset: int, count: int) -> Indices:
        if not self.shuffle:
            return np.arange(offset, offset + count, dtype=np.int64)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, self._permutation(epoch)
        return self._kept[1][offset : offset + count]

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
        micro_batch_size, data_size: of the run that started the order. The order of an epoch
            depends on them, so a run that continues it on another mesh keeps them.
        data_sharding: each data rank permutes its own part of the dataset.
    """

    dataset_size: int
    micro_batch_size: int
    data_size: int
    data_sharding: bool = True


class CyclicOrder(EpochOrder):
    """The order of Megatron's random sampler.

    The permutation of epoch e is that of torch's generator with seed e, so it does not depend on
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

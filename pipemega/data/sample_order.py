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
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipemega.errors import ConfigError

Indices = npt.NDArray[np.int64]


class SampleKey(NamedTuple):
    """A sample of a map-style dataset, in one of its epochs."""

    epoch: int
    sample: int


@dataclass(frozen=True)
class Share:
    """Sizes of a step, and the data rank whose share of each step is read.

    Raises:
        ConfigError: the sizes do not divide.
    """

    train_batch_size: int
    micro_batch_size: int
    data_rank: int = 0
    data_size: int = 1

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
            # RandomState, because numpy promises never to change its streams: a run that is
            # resumed with another numpy must continue with the same permutation.
            random = np.random.RandomState([self.seed % 2**32, epoch])
            self._kept = epoch, random.permutation(self.num_samples).astype(np.int64)
        return self._kept[1][offset : offset + count]

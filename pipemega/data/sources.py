"""What a `BatchLoader` reads from: the common part of datasets, iterables and DataLoaders."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from pipemega.data.collate import MicroBatch
from pipemega.data.sample_order import Cyclic, Share
from pipemega.data.sample_reader import SampleReader
from pipemega.distributed.host_memory import HostMemory
from pipemega.errors import DataError


@dataclass(frozen=True)
class Position:
    """A position in the stream of samples.

    Attributes:
        consumed: samples delivered to all data ranks since the start of the run.
        epoch: number of completed passes over the dataset.
        epoch_start: value of `consumed` at the start of this epoch.
    """

    consumed: int = 0
    epoch: int = 0
    epoch_start: int = 0


class Delivery(NamedTuple):
    """A micro-batch that a source has read.

    Attributes:
        batch: the micro-batch.
        position: after it.
        size: number of its samples; 0: it only completes the last step of an epoch, and repeats
            the first sample of the step.
    """

    batch: MicroBatch
    position: Position
    size: int


T = TypeVar("T")


@dataclass(frozen=True)
class LoaderOptions:
    """How a `BatchLoader` orders and reads samples.

    Attributes:
        seed: seed of the permutation of each epoch, and of the random numbers of each sample.
        shuffle: None: shuffle map-style datasets that are not shuffled already.
        cyclic: order of Megatron's random sampler, for a map-style dataset.
        repeat: start another epoch at the end; otherwise iteration ends at the last whole step.
        drop_last: drop the last samples of an epoch if they do not fill a step. False: with
            `by_epoch` they are a partial step, without `repeat` they are an error.
        by_epoch: no step has samples of two epochs. Read whole steps then, with their sizes: single
            micro-batches may have no samples.
        prefetch: number of micro-batches to read ahead, if the data may be read while the model
            runs.
        num_workers: number of threads (deterministic datasets) or processes (all others) that read
            map-style samples in parallel; 0: one thread reads.
        timeout_seconds: maximum wait for one micro-batch.
        memory: of the device that the micro-batches are copied to; pins them in the thread that
            reads. None: they are not copied.
    """

    seed: int = 1234
    shuffle: bool | None = None
    cyclic: Cyclic | None = None
    repeat: bool = True
    drop_last: bool = True
    by_epoch: bool = False
    prefetch: int = 2
    num_workers: int = 0
    timeout_seconds: float = 600.0
    memory: HostMemory | None = None


class DataSource(ABC):
    """Reads the micro-batches of one data rank, from any position of the stream.

    Args:
        data: the dataset, iterable or DataLoader.
        reader: reads its samples.
        share: the part of each step that this data rank reads.
        options: order and reading.

    Attributes:
        name: name of the data in messages.
        is_map_style: the data has a length and never ends.
        is_one_pass: the data is an iterator, which cannot start again.
        reads_ahead: may be read while the model runs: draws nothing from the default generators of
            this process.
        is_compared: the engine compares what the ranks read.
        must_differ: the engine checks that the data ranks read different samples.
    """

    must_differ = False
    is_map_style = False
    is_one_pass = False

    def __init__(self, data: Any, reader: SampleReader, share: Share, options: LoaderOptions):
        self.data, self.name = data, reader.name
        self.reads_ahead = not reader.may_draw
        self.is_compared = not reader.is_deterministic
        self._reader, self._share, self._options = reader, share, options

    @abstractmethod
    def deliveries(self, start: Position) -> Generator[Delivery, None, None]:
        """Yield micro-batches, and the position after each, from `start` on."""

    @property
    def fingerprint(self) -> str:
        """`data.fingerprint` if it exists, else the class name and the length."""
        given = getattr(self.data, "fingerprint", None)
        size = f" of {len(self.data)} samples" if isinstance(self.data, Sized) else ""
        return str(given) if given is not None else f"{self.name}{size}"

    @property
    def current(self) -> str:
        """Text that names what is being read."""
        return self._reader.current

    def set_order(self, seed: int, shuffle: bool, cyclic: Cyclic | None) -> None:
        """Order the samples, and seed the random numbers of each sample, from `seed`.

        Args:
            cyclic: Megatron's order, instead of `shuffle`.
        """
        self._reader.seed = seed

    def position_of(self, consumed: int) -> Position:
        """Return the position after `consumed` samples, as far as it is known without reading."""
        return Position(consumed)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps of an epoch with `by_epoch`; None: it is not known."""
        return None

    def close(self) -> None:
        """End worker processes."""
        return

    def exhausted(self, had: int) -> DataError:
        """Return the error of data that ends within a step, of which it has `had` samples."""
        return DataError(
            f"{self.name} ended within a batch: the step needs {self._share.train_batch_size} "
            f"samples (train_batch_size), and {had} were left; choose a train_batch_size that "
            "divides the data, set dataloader_drop_last to true, or give data that repeats"
        )

    def too_short(self, epoch: int, had: int) -> DataError:
        """Return the error of an epoch of `had` samples, all of which are dropped."""
        return DataError(
            f"epoch {epoch} of {self.name} has {had} samples, fewer than train_batch_size "
            f"({self._share.train_batch_size}), and dataloader_drop_last drops them: set it to "
            "false, or train_batch_size to a smaller number"
        )


def groups(
    items: Iterable[T], size: Callable[[int], int], *, drop_last: bool
) -> Iterator[tuple[list[T], bool]]:
    """Yield the items in lists, and whether each list is the last one.

    One item is read ahead; with `drop_last` a whole list.

    Args:
        size: number of items in the lists before -> length of the next one.
        drop_last: drop the last list if it is shorter.
    """
    iterator, passed, length = iter(items), 0, size(0)
    group = list(islice(iterator, length))
    while len(group) == length or (group and not drop_last):
        passed += length
        length = size(passed)
        ahead = length if drop_last else 1
        start = list(islice(iterator, ahead))
        yield group, len(start) < ahead
        group = [*start, *islice(iterator, length - len(start))]

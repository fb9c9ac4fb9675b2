"""What a `BatchLoader` reads from: the common part of datasets, iterables and DataLoaders.

Map-style datasets: the indices of all micro-batches are known in advance.

Iterable datasets: generators, torch's IterableDataset.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipemega.data.read_ahead import WorkerProcesses
from pipemega.data.sample_reader import (
    Cyclic,
    CyclicOrder,
    EpochOrder,
    MicroBatch,
    Pytree,
    SampleKey,
    SampleReader,
    Share,
)
from pipemega.distributed.host_memory import HostMemory
from pipemega.errors import ConfigError, DataError


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

    @property
    def next_epoch(self) -> "Position":
        """The start of the next epoch, if this one ends here."""
        return Position(self.consumed, self.epoch + 1, self.consumed)


class Delivery(NamedTuple):
    """A micro-batch that a source has read.

    Attributes:
        batch: the micro-batch.
        position: the position after it.
        size: number of its samples; 0: it only completes the last step of an epoch, and repeats
            the first sample of the step.
    """

    batch: MicroBatch
    position: Position
    size: int


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
        memory: host memory for the device that the micro-batches are copied to; pins them in the
            thread that reads. None: they are not copied.
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
        num_threads: number of threads that read.
        is_compared: the engine compares what the ranks read.
        must_differ: the engine checks that the data ranks read different samples.
    """

    must_differ = False
    is_map_style = False
    is_one_pass = False

    def __init__(self, data: Any, reader: SampleReader, share: Share, options: LoaderOptions):
        self.data, self.name = data, reader.name
        self._dataset, self._described = data, self.name
        self.reads_ahead = not reader.may_draw
        self.num_threads = max(options.num_workers, 1) if self.reads_ahead else 1
        self.is_compared = not reader.is_deterministic
        self._reader, self._share, self._options = reader, share, options

    @abstractmethod
    def deliveries(self, start: Position) -> Generator[Any, None, None]:
        """Yield micro-batches from `start` on: what `finish` takes."""

    def finish(self, item: Any) -> Delivery:
        """Return the micro-batch of an item of `deliveries`; called by several threads at once."""
        delivery: Delivery = item
        return delivery

    @property
    def fingerprint(self) -> str:
        """`fingerprint` of the dataset if it exists, else the class name and the length."""
        given = getattr(self._dataset, "fingerprint", None)
        size = f" of {len(self._dataset)} samples" if isinstance(self._dataset, Sized) else ""
        return str(given) if given is not None else f"{self._described}{size}"

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


# The samples of a micro-batch; the position after it, and its size.
Place = tuple[Position, int]
Plan = tuple[list[SampleKey], Place]


class MapSource(DataSource):
    """A dataset with `len` and `[i]`, shuffled in each epoch.

    With `num_workers`, threads read a dataset that draws no random numbers. Processes read any
    other dataset: threads of one process share its default generators with each other and with the
    model.
    """

    is_map_style = True
    _order: EpochOrder
    _processes: WorkerProcesses | None = None

    def set_order(self, seed: int, shuffle: bool, cyclic: Cyclic | None) -> None:
        super().set_order(seed, shuffle, cyclic)
        if len(self.data) < 1:
            raise DataError(f"{self.name} has no samples")
        self._order = CyclicOrder(cyclic) if cyclic else EpochOrder(len(self.data), seed, shuffle)
        if self.steps_per_epoch == 0:
            raise self.too_short(0, self._epoch_size)

    @property
    def steps_per_epoch(self) -> int | None:
        if not self._options.by_epoch:
            return None
        whole, rest = divmod(self._epoch_size, self._share.train_batch_size)
        return whole + (rest > 0 and not self._options.drop_last)

    def position_of(self, consumed: int) -> Position:
        epoch = consumed // self._epoch_size
        return Position(consumed, epoch, epoch * self._epoch_size)

    def deliveries(self, start: Position) -> Generator[Any, None, None]:
        plans = self._plans(start)
        if self.reads_ahead:
            return plans  # `finish` reads the samples
        if self._options.num_workers:
            return self._read_in_processes(plans)
        return (self._read(plan) for plan in plans)

    def finish(self, item: Any) -> Delivery:
        return self._read(item) if self.reads_ahead else super().finish(item)

    def _read(self, plan: Plan) -> Delivery:
        keys, place = plan
        return Delivery(self._reader.micro_batch(keys), *place)

    @property
    def _epoch_size(self) -> int:
        """Number of samples of an epoch."""
        return self._order.num_samples

    @property
    def current(self) -> str:
        return self._processes.current if self._processes else super().current

    def close(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.kill()

    def _read_in_processes(self, plans: Iterator[Plan]) -> Generator[Delivery, None, None]:
        number, ahead = self._options.num_workers, self._options.prefetch
        self._processes = processes = WorkerProcesses(self._reader, number, ahead)
        try:
            for batch, place in processes.read(plans):
                yield Delivery(batch, *place)
        finally:
            processes.kill()

    def _plans(self, start: Position) -> Generator[Plan, None, None]:
        """Yield the samples of each micro-batch of this rank, and what else is known of it."""
        order = self._order
        while (step := self.next_step(start)) is not None:
            begin, start = step
            share = self._share.at(begin.consumed)
            first, count = self._stream(begin), start.consumed - begin.consumed
            for part in share.parts(count):
                if part.own:
                    keys = order.keys(first + part.own.start, first + part.own.stop)
                else:
                    # Full: its messages then have the shapes of the others.
                    keys = order.keys(first, first + 1) * share.micro_batch_size
                position = start if part.end == count else self._moved(begin, part.end)
                yield keys, (position, len(part.own))

    def next_step(self, start: Position) -> tuple[Position, Position] | None:
        """Return the positions before and after the step that follows `start`; None: no data left.

        Raises:
            DataError: the data ends within the step.
        """
        options, size = self._options, self._epoch_size
        batch = self._share.at(start.consumed).train_batch_size
        if not options.repeat and start.epoch > 0:
            return None
        if options.repeat and not options.by_epoch:
            return start, self._moved(start, batch)
        left = size - self._stream(start) % size
        if left < batch and options.drop_last:
            if not options.repeat:
                return None
            start, left = start.next_epoch, size
        elif left < batch and not options.by_epoch:
            raise self.exhausted(left)
        count = min(left, batch)
        left -= count
        after = self._moved(start, count)
        if left and left < batch and options.drop_last and options.by_epoch:
            after = after.next_epoch
        return start, after

    def _stream(self, position: Position) -> int:
        """Return the index in the stream of all epochs; drops are not in `consumed`."""
        return position.epoch * self._epoch_size + position.consumed - position.epoch_start

    def _moved(self, position: Position, count: int) -> Position:
        """Return the position `count` samples later."""
        consumed = position.consumed + count
        epoch, offset = divmod(self._stream(position) + count, self._epoch_size)
        return Position(consumed, epoch, consumed - offset)


Item = tuple[Pytree, Position]


class OrderedSource(DataSource):
    """Data with an order of their own, which each epoch reads from the start.

    An item is a sample of all data ranks, or a micro-batch of this one. The items that are
    delivered together are read before the first of them is delivered, so that the data end between
    two steps, at the same step on every rank. With `by_epoch` the first item of the next step is
    read too (with `drop_last` all of them), so that the end of an epoch is known.
    """

    # Samples of an item on all data ranks together.
    _unit = 1

    @abstractmethod
    def _epoch(self, epoch: int) -> Iterator[tuple[Pytree, int]]:
        """Yield the items of an epoch, and the samples of each on all data ranks together."""

    @abstractmethod
    def _is_last(self, epoch: Position, had: int) -> bool:
        """Return whether no epoch follows the one that began at `epoch` and had `had` items.

        Raises:
            DataError: it has too few items.
        """

    def _group_size(self, consumed: int) -> int:
        """Return how many items are delivered together after `consumed` samples."""
        return self._share.at(consumed).train_batch_size // self._unit

    def _keeps(self, place: int, size: int) -> bool:
        """Return whether this rank uses the item at a place of a group, or of the next one."""
        return True

    def _groups(self, start: Position) -> Iterator[tuple[Position, list[Item]]]:
        """Yield the position before the items that are delivered together, and after each of them.

        Raises:
            DataError: an epoch has too few items, or the data end within a step.
        """
        options, at = self._options, start
        epoch = Position(start.epoch_start, start.epoch, start.epoch_start)
        waiting: list[Item] = []
        while options.repeat or epoch.epoch == 0:
            size, needed = self._sizes(at)
            had, consumed = 0, epoch.consumed
            for item, samples in self._epoch(epoch.epoch):
                had, consumed = had + 1, consumed + samples
                if consumed <= start.consumed:
                    continue
                kept = item if self._keeps(len(waiting), size) else None
                waiting.append((kept, Position(consumed, epoch.epoch, epoch.consumed)))
                if len(waiting) == needed:
                    yield at, waiting[:size]
                    at = waiting[size - 1][1]
                    del waiting[:size]
                    size, needed = self._sizes(at)
            if options.by_epoch:
                group = waiting[:size]
                waiting.clear()
                if len(group) == size or (group and not options.drop_last):
                    item, last = group.pop()
                    yield at, [*group, (item, last.next_epoch)]
                    at = last.next_epoch
                # Samples that are dropped do not count.
                consumed = at.consumed
            if self._is_last(epoch, had):
                break
            epoch = Position(consumed, epoch.epoch + 1, consumed)
        if waiting and not options.drop_last:
            raise self.exhausted(len(waiting))

    def _sizes(self, at: Position) -> tuple[int, int]:
        """Return how many items are delivered together, and how many are read before that."""
        size = self._group_size(at.consumed)
        if not self._options.by_epoch:
            return size, size
        if not self._options.drop_last:
            return size, size + 1
        return size, size + self._group_size(at.consumed + size * self._unit)


class IterableSource(OrderedSource):
    """An iterable of samples. Every data rank reads all of it and keeps its share."""

    def __init__(self, data: Pytree, reader: SampleReader, share: Share, options: LoaderOptions):
        super().__init__(data, reader, share, options)
        if not hasattr(data, "__iter__"):
            raise DataError(
                f"{self.name} is not a dataset: it has neither __getitem__ and __len__ nor __iter__"
            )
        if options.num_workers:
            raise ConfigError(
                f"data.num_workers is {options.num_workers}, but {self.name} is an iterable, "
                "which one thread reads in order: set it to 0"
            )
        # An iterator returns itself as its iterator.
        self.is_one_pass = hasattr(data, "__next__")

    def deliveries(self, start: Position) -> Generator[Delivery, None, None]:
        for at, samples in self._groups(start):
            share = self._share.at(at.consumed)
            for part in share.parts(len(samples)):
                own = [samples[place][0] for place in part.own]
                # Without samples it is full: its messages then have the shapes of the others.
                own = own or [samples[0][0]] * share.micro_batch_size
                first = at.consumed + part.begin
                which = f"samples {first} to {first + share.samples_per_slice - 1} of the run"
                batch = self._reader.together(own, which, first, share.data_rank)
                yield Delivery(batch, samples[part.end - 1][1], len(part.own))

    def _epoch(self, epoch: int) -> Iterator[tuple[Pytree, int]]:
        return ((sample, 1) for sample in self._reader.each(self.data, epoch))

    def _keeps(self, place: int, size: int) -> bool:
        # The first sample of a step completes micro-batches without samples. The memory of the
        # samples of other ranks is freed.
        return place in (0, size) or self._share.owns(place)

    def _is_last(self, epoch: Position, had: int) -> bool:
        options = self._options
        if not had and (options.by_epoch or (options.repeat and not self.is_one_pass)):
            raise DataError(f"{self.name} yielded no sample in epoch {epoch.epoch}")
        if options.by_epoch and options.drop_last and had < self._share.train_batch_size:
            raise self.too_short(epoch.epoch, had)
        return self.is_one_pass

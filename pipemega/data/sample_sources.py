"""What a `BatchLoader` reads from: the common part of datasets, iterables and DataLoaders.

Map-style datasets: the indices of all micro-batches are known in advance.

Iterable datasets: generators, torch's IterableDataset.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from pipemega.data.read_ahead import WorkerProcesses, Workers
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


# The samples of a micro-batch; the position after it, and its size.
Place = tuple[Position, int]
Plans = Iterator[tuple[list[SampleKey], Place]]


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

    def deliveries(self, start: Position) -> Generator[Delivery, None, None]:
        plans = self._plans(start)
        if not self._options.num_workers:
            for keys, place in plans:
                yield Delivery(self._reader.micro_batch(keys), *place)
        elif self.reads_ahead:
            yield from self._read_in_threads(plans)
        else:
            yield from self._read_in_processes(plans)

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

    def _read_in_threads(self, plans: Plans) -> Generator[Delivery, None, None]:
        workers: Workers[MicroBatch] = Workers(self._options.num_workers)
        running: deque[tuple[Future[MicroBatch], Place]] = deque()
        try:
            for keys, place in plans:
                read = partial(self._reader.micro_batch, keys)
                running.append((workers.submit(read), place))
                if len(running) > self._options.num_workers:
                    future, place = running.popleft()
                    yield Delivery(future.result(), *place)
            for future, place in running:
                yield Delivery(future.result(), *place)
        finally:
            workers.close()

    def _read_in_processes(self, plans: Plans) -> Generator[Delivery, None, None]:
        number, ahead = self._options.num_workers, self._options.prefetch
        self._processes = processes = WorkerProcesses(self._reader, number, ahead)
        try:
            places: deque[Place] = deque()

            def keys() -> Iterator[list[SampleKey]]:
                for which, place in plans:
                    places.append(place)
                    yield which

            for batch in processes.read(keys()):
                yield Delivery(batch, *places.popleft())
        finally:
            processes.kill()

    def _plans(self, start: Position) -> Plans:
        """Yield the samples of each micro-batch of this rank, and what else is known of it."""
        unit = self._share.samples_per_slice
        while (step := self.next_step(start)) is not None:
            begin, after = step
            share = self._share.at(begin.consumed)
            first, count = self._stream(begin), after.consumed - begin.consumed
            for j, size in enumerate(share.sizes(count)):
                at, _ = share.bounds(first + j * unit)
                if size:
                    keys = self._order.keys(at, at + size)
                else:
                    # Full: its messages then have the shapes of the others.
                    keys = self._order.keys(first, first + 1) * share.micro_batch_size
                is_last = j == share.num_microbatches - 1
                position = after if is_last else self._moved(begin, min((j + 1) * unit, count))
                yield keys, (position, size)
            start = after

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
            start, left = Position(start.consumed, start.epoch + 1, start.consumed), size
        elif left < batch and not options.by_epoch:
            raise self.exhausted(left)
        count = min(left, batch)
        left -= count
        after = self._moved(start, count)
        if left and left < batch and options.drop_last and options.by_epoch:
            after = Position(after.consumed, start.epoch + 1, after.consumed)
        return start, after

    def _stream(self, position: Position) -> int:
        """Return the index in the stream of all epochs; drops are not in `consumed`."""
        return position.epoch * self._epoch_size + position.consumed - position.epoch_start

    def _moved(self, position: Position, count: int) -> Position:
        """Return the position `count` samples later."""
        consumed = position.consumed + count
        epoch, offset = divmod(self._stream(position) + count, self._epoch_size)
        return Position(consumed, epoch, consumed - offset)


class IterableSource(DataSource):
    """An iterable of samples. Every data rank reads all of it and keeps its share.

    All samples of a step are read before its first micro-batch is delivered, so that the data ends
    between two steps, at the same step on every rank. With `by_epoch` the first sample of the next
    step is read too (with `drop_last` all of them), so that the end of an epoch is known.
    """

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
        if self._options.by_epoch:
            yield from self._by_epoch(start)
            return
        stream, consumed = self._stream(start), start.consumed
        unit, size = self._share.samples_per_slice, self._share.micro_batch_size
        while True:
            share = self._share.at(consumed)
            mine: list[Pytree] = []
            positions: list[Position] = []
            for offset, (sample, position) in enumerate(islice(stream, share.train_batch_size)):
                if share.owns(offset):
                    mine.append(sample)
                positions.append(position)
            if len(positions) < share.train_batch_size:
                if positions and not self._options.drop_last:
                    raise self.exhausted(len(positions))
                return
            for j in range(share.num_microbatches):
                which = f"samples {consumed} to {consumed + unit - 1} of the run"
                samples = mine[j * size : (j + 1) * size]
                batch = self._reader.together(samples, which, consumed, share.data_rank)
                consumed += unit
                yield Delivery(batch, positions[(j + 1) * unit - 1], size)

    def _by_epoch(self, start: Position) -> Generator[Delivery, None, None]:
        """Yield the micro-batches of steps of which none has samples of two epochs."""
        options, share = self._options, self._share
        epoch, epoch_start = start.epoch, start.epoch_start
        skip = start.consumed - epoch_start
        while options.repeat or epoch == 0:
            number = itertools.count()
            samples = (s for s, _ in zip(self._reader.each(self.data, epoch), number, strict=False))
            at = Position(epoch_start + skip, epoch, epoch_start)
            first = at.consumed

            def step_size(passed: int, first: int = first) -> int:
                return share.at(first + passed).train_batch_size

            rest = self._only_own(islice(samples, skip, None), step_size)
            for group, is_last in groups(rest, step_size, drop_last=options.drop_last):
                after = Position(at.consumed + len(group), epoch, epoch_start)
                if is_last:
                    after = Position(after.consumed, epoch + 1, after.consumed)
                yield from self._step(group, at, after)
                at = after
            yielded = next(number)
            if yielded == 0:
                raise DataError(f"{self.name} yielded no sample in epoch {epoch}")
            if options.drop_last and yielded < share.train_batch_size:
                raise self.too_short(epoch, yielded)
            if self.is_one_pass:
                return
            epoch, epoch_start, skip = epoch + 1, at.consumed, 0

    def _only_own(
        self, samples: Iterator[Pytree], step_size: Callable[[int], int]
    ) -> Iterator[Pytree]:
        """Yield None for the samples that this rank does not use, so that their memory is freed.

        The first one of a step completes micro-batches without samples.
        """
        step_start = 0
        for number, sample in enumerate(samples):
            if number == step_start:
                step_start += step_size(number)
                yield sample
            else:
                # Steps begin between two slices.
                yield sample if self._share.owns(number) else None

    def _step(self, samples: list[Pytree], start: Position, after: Position) -> Iterator[Delivery]:
        """Yield the micro-batches of this rank of a step, which may be partial."""
        share, unit = self._share.at(start.consumed), self._share.samples_per_slice
        for j, size in enumerate(share.sizes(len(samples))):
            at, _ = share.bounds(j * unit)
            # Without samples it is full: its messages then have the shapes of the others.
            mine = samples[at : at + size] if size else samples[:1] * share.micro_batch_size
            consumed = start.consumed + j * unit
            which = f"samples {consumed} to {consumed + unit - 1} of the run"
            batch = self._reader.together(mine, which, consumed, share.data_rank)
            if j == share.num_microbatches - 1:
                position = after
            else:
                consumed = start.consumed + min((j + 1) * unit, len(samples))
                position = Position(consumed, start.epoch, start.epoch_start)
            yield Delivery(batch, position, size)

    def _stream(self, start: Position) -> Iterator[tuple[Pytree, Position]]:
        """Yield all samples from `start` on, over all epochs, with the position after each."""
        consumed, epoch, epoch_start = start.epoch_start, start.epoch, start.epoch_start
        while True:
            for sample in self._reader.each(self.data, epoch):
                consumed += 1
                if consumed > start.consumed:
                    yield sample, Position(consumed, epoch, epoch_start)
            if not self._options.repeat or self.is_one_pass:
                return
            if consumed == epoch_start:
                raise DataError(f"{self.name} yielded no sample in epoch {epoch}")
            epoch, epoch_start = epoch + 1, consumed

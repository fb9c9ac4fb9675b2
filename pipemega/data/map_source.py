"""Map-style datasets: the indices of all micro-batches are known in advance."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from functools import partial

from pipemega.data.collate import MicroBatch
from pipemega.data.sample_order import Cyclic, CyclicOrder, EpochOrder, SampleKey
from pipemega.data.sources import DataSource, Delivery, Position
from pipemega.data.worker_processes import WorkerProcesses
from pipemega.data.workers import Workers
from pipemega.errors import DataError

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

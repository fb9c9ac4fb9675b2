"""Map-style datasets: the indices of all micro-batches are known in advance."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from functools import partial

from pipemega.data.collate import MicroBatch
from pipemega.data.sample_order import EpochOrder, SampleKey
from pipemega.data.sources import DataSource, Delivery, Position
from pipemega.data.worker_processes import WorkerProcesses
from pipemega.data.workers import Workers
from pipemega.errors import DataError

Plans = Iterator[tuple[list[SampleKey], Position]]


class MapSource(DataSource):
    """A dataset with `len` and `[i]`, shuffled in each epoch.

    With `num_workers`, threads read a dataset that draws no random numbers. Processes read any
    other dataset: threads of one process share its default generators with each other and with the
    model.
    """

    is_map_style = True
    _order: EpochOrder
    _processes: WorkerProcesses | None = None

    def set_order(self, seed: int, shuffle: bool) -> None:
        super().set_order(seed, shuffle)
        if len(self.data) < 1:
            raise DataError(f"{self.name} has no samples")
        self._order = EpochOrder(len(self.data), seed, shuffle)

    def position_of(self, consumed: int) -> Position:
        epoch = consumed // len(self.data)
        return Position(consumed, epoch, epoch * len(self.data))

    def deliveries(self, start: Position) -> Generator[Delivery, None, None]:
        plans = self._plans(start)
        if not self._options.num_workers:
            for keys, position in plans:
                yield self._reader.micro_batch(keys), position
        elif self.reads_ahead:
            yield from self._read_in_threads(plans)
        else:
            yield from self._read_in_processes(plans)

    @property
    def current(self) -> str:
        return self._processes.current if self._processes else super().current

    def close(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.kill()

    def _read_in_threads(self, plans: Plans) -> Generator[Delivery, None, None]:
        workers: Workers[MicroBatch] = Workers(self._options.num_workers)
        running: deque[tuple[Future[MicroBatch], Position]] = deque()
        try:
            for keys, position in plans:
                read = partial(self._reader.micro_batch, keys)
                running.append((workers.submit(read), position))
                if len(running) > self._options.num_workers:
                    future, position = running.popleft()
                    yield future.result(), position
            for future, position in running:
                yield future.result(), position
        finally:
            workers.close()

    def _read_in_processes(self, plans: Plans) -> Generator[Delivery, None, None]:
        number, ahead = self._options.num_workers, self._options.prefetch
        self._processes = processes = WorkerProcesses(self._reader, number, ahead)
        try:
            positions: deque[Position] = deque()

            def keys() -> Iterator[list[SampleKey]]:
                for which, position in plans:
                    positions.append(position)
                    yield which

            for batch in processes.read(keys()):
                yield batch, positions.popleft()
        finally:
            processes.kill()

    def _plans(self, start: Position) -> Plans:
        """Yield the samples of each micro-batch of this rank and the position after it."""
        share, options = self._share, self._options
        size, consumed = len(self.data), start.consumed
        while True:
            if not options.repeat and consumed + share.train_batch_size > size:
                if consumed < size and not options.drop_last:
                    raise self.exhausted(size - consumed)
                return
            for _ in range(share.num_microbatches):
                keys = self._order.keys(*share.bounds(consumed))
                consumed += share.samples_per_slice
                yield keys, self.position_of(consumed)

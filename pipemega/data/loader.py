"""Micro-batches for one data rank, prefetched, and resumable to the sample.

    loader = BatchLoader(dataset, train_batch_size=8, micro_batch_size=2, data_rank=r, data_size=2)
    for _ in range(steps):
        for inputs, labels in loader.next_step():
            ...
    state = loader.state_dict()          # counts what was delivered, not what was prefetched

All pipeline and tensor ranks of a data rank make equal loaders and get equal samples.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sized
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from pipemega.data.collate import Collate, MicroBatch, Pytree
from pipemega.data.order import EpochOrder, Indices, Share
from pipemega.data.prefetch import Prefetcher, no_data_within
from pipemega.data.reading import Reader
from pipemega.data.workers import Workers
from pipemega.errors import ConfigError, DataError

Delivery = tuple[MicroBatch, "Position"]


@dataclass(frozen=True)
class Position:
    """A place in the stream of samples.

    Attributes:
        consumed: samples delivered to all data ranks since the start of the run.
        epoch: how often the dataset was read through.
        epoch_start: what `consumed` was when this epoch began.
    """

    consumed: int = 0
    epoch: int = 0
    epoch_start: int = 0


class BatchLoader:
    """Iterates over this data rank's micro-batches (inputs, labels); `next_step` groups them.

    Args:
        dataset: map-style (`len` and `[i]`), or iterable; samples are (inputs, labels), each any
            pytree of tensors, arrays and numbers. Every data rank reads a whole iterable and
            keeps its own share, so that the samples do not depend on the mesh.
        train_batch_size: samples of one step, on all data ranks together.
        micro_batch_size: samples of one micro-batch on one data rank.
        data_rank, data_size: this rank's place on the data axis.
        consumed_samples: where in the stream to begin.
        seed: of the permutation of each epoch.
        shuffle: None shuffles map-style datasets that are not shuffled already.
        repeat: begin another epoch at the end; otherwise iteration ends at the last whole step.
        drop_last: without `repeat`, leave out the last samples when they fill no step; False
            makes them an error, for who must not lose a sample.
        prefetch: micro-batches that are made ahead in a thread; 0 makes them when asked for.
        num_workers: further threads that read map-style samples. Threads and not processes,
            because a process that holds sockets and devices must not be forked; numpy, torch and
            decoders work in parallel there all the same.
        collate_fn: list of samples -> (inputs, labels); None stacks them.
        timeout_seconds: how long to wait for one micro-batch; without prefetch and workers it is
            the caller's own thread that reads, and nothing can end its wait.

    Raises:
        ConfigError: sizes that do not divide.
        DataError: an empty dataset; on iterating, a sample that cannot be read, samples that do
            not fit together, an iterable that ends in mid-step, no data within the timeout.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        train_batch_size: int,
        micro_batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        consumed_samples: int = 0,
        seed: int = 1234,
        shuffle: bool | None = None,
        repeat: bool = True,
        drop_last: bool = True,
        prefetch: int = 2,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.dataset = dataset
        self.share = Share(train_batch_size, micro_batch_size, data_rank, data_size)
        self.name = type(dataset).__name__
        # torch's IterableDataset inherits a __getitem__ that only raises.
        self.is_map_style = not isinstance(dataset, IterableDataset) and all(
            hasattr(dataset, method) for method in ("__getitem__", "__len__")
        )
        self._refuse_unusable(num_workers)
        self._repeat = repeat
        self._drop_last = drop_last
        self._prefetch = prefetch
        self._num_workers = num_workers
        self._timeout = timeout_seconds
        if shuffle is None:
            shuffle = self.is_map_style and not getattr(dataset, "already_shuffled", False)
        self._set_order(seed, shuffle)
        self._reader = Reader(dataset, self.name, collate_fn)
        self._was_read = False
        self._peeked: Delivery | None = None
        self._source: Prefetcher[Delivery] | Generator[Delivery, None, None] | None = None
        self._start_at(self._position_of(consumed_samples))

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step on this rank."""
        return self.share.num_microbatches

    @property
    def consumed_samples(self) -> int:
        """Samples delivered to all data ranks together, counted from the start of the run."""
        return self._position.consumed

    @property
    def epoch(self) -> int:
        """The epoch of the sample that comes next."""
        return self._position.epoch

    @property
    def fingerprint(self) -> str:
        """What the dataset says it is (`dataset.fingerprint`), or its class and length."""
        own = getattr(self.dataset, "fingerprint", None)
        size = f" of {len(self.dataset)} samples" if isinstance(self.dataset, Sized) else ""
        return str(own) if own is not None else f"{self.name}{size}"

    def __len__(self) -> int:
        """Whole micro-batches of this rank in one epoch of a map-style dataset."""
        if not self.is_map_style:
            raise TypeError(f"{self.name} is an iterable dataset, whose length is not known")
        return len(self.dataset) // self.share.samples_per_slice

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        (batch, self._position), self._peeked = self._peeked or self._take(), None
        return batch

    def peek(self) -> MicroBatch:
        """The next micro-batch, which stays the next one; also right for a generator.

        Raises:
            StopIteration, DataError: as iterating does.
        """
        self._peeked = self._peeked or self._take()
        return self._peeked[0]

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of one optimizer step.

        Raises:
            StopIteration: the data does not fill another step (`repeat=False`).
            DataError: it ended within the step.
        """
        step = [next(self)]
        for _ in range(self.num_microbatches - 1):
            try:
                step.append(next(self))
            except StopIteration:
                had = len(step) * self.share.samples_per_slice
                raise self._exhausted(had) from None
        return step

    def state_dict(self) -> dict[str, object]:
        """Where the next sample is; the same on every rank, and for every way to cut a step."""
        return {
            "consumed_samples": self._position.consumed,
            "epoch": self._position.epoch,
            "epoch_start": self._position.epoch_start,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_data: bool = True) -> None:
        """Go on where `state` was taken; batch sizes and mesh may have changed.

        Args:
            same_data: refuse a dataset that is not the one of `state`; False begins the dataset
                that is here now, at the same number of samples.

        Raises:
            DataError: the state is incomplete, or the data is another one.
        """
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise DataError(f"the data position that was saved lacks {', '.join(missing)}")
        if same_data and state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data is not that of the checkpoint: {self.fingerprint} now, "
                f"{state['fingerprint']} then, so sample {state['consumed_samples']} is another "
                "one (files, split, seq_length, seed, blend or number of epochs changed); restore "
                "the old settings, or load with same_data=False to go on with the new data"
            )
        self._set_order(int(state["seed"]), bool(state["shuffle"]))
        self._start_at(
            Position(int(state["consumed_samples"]), int(state["epoch"]), int(state["epoch_start"]))
        )

    def close(self) -> None:
        """Stop the threads; the loader begins again where it was if it is iterated once more."""
        self._peeked = None
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _refuse_unusable(self, num_workers: int) -> None:
        if self.is_map_style:
            if len(self.dataset) < 1:
                raise DataError(f"{self.name} has no samples")
        elif not hasattr(self.dataset, "__iter__"):
            raise DataError(
                f"{self.name} is no dataset: it has neither __getitem__ and __len__ nor __iter__"
            )
        elif num_workers:
            raise ConfigError(
                f"data.num_workers is {num_workers}, and {self.name} is an iterable, which one "
                "thread reads in order: set it to 0"
            )

    def _set_order(self, seed: int, shuffle: bool) -> None:
        size = len(self.dataset) if self.is_map_style else 0
        self._order = EpochOrder(size, seed, shuffle)

    def _position_of(self, consumed: int) -> Position:
        if not self.is_map_style:
            return Position(consumed)
        epoch = consumed // len(self.dataset)
        return Position(consumed, epoch, epoch * len(self.dataset))

    def _start_at(self, position: Position) -> None:
        self.close()
        self._position = position

    def _take(self) -> Delivery:
        if self._source is None:
            self._source = self._open()
        source = self._source
        try:
            return source.get() if isinstance(source, Prefetcher) else next(source)
        except DataError:
            # Asked again, the loader tries the same samples again, and never skips them.
            self.close()
            raise

    def _open(self) -> "Prefetcher[Delivery] | Generator[Delivery, None, None]":
        # A generator is its own iterator: what was read of it, or read ahead, is gone.
        once = not self.is_map_style and iter(self.dataset) is self.dataset
        if once and self._was_read:
            raise DataError(
                f"{self.name} can be read only once, and the loader was closed or moved after it "
                "had begun: give a dataset whose __iter__ begins anew"
            )
        self._was_read = True
        make = self._map_style if self.is_map_style else self._iterable
        items = make(self._position)
        if not self._prefetch:
            return items
        return Prefetcher(items, self._prefetch, lambda: self._reader.doing, self._timeout)

    def _exhausted(self, had: int) -> DataError:
        return DataError(
            f"{self.name} was exhausted in mid-batch: the step needs {self.share.train_batch_size} "
            f"samples (train_batch_size), and {had} were left; choose a train_batch_size that "
            "divides the data, drop the last samples, or let it repeat"
        )

    # Map-style: the indices of all micro-batches are known ahead, so threads can share the work.

    def _map_style(self, start: Position) -> Generator[Delivery, None, None]:
        plans = self._plans(start)
        if not self._num_workers:
            for indices, position in plans:
                yield self._reader.micro_batch(indices.tolist()), position
            return
        workers: Workers[MicroBatch] = Workers(self._num_workers)
        running: deque[tuple[Future[MicroBatch], Position]] = deque()
        try:
            for indices, position in plans:
                read = partial(self._reader.micro_batch, indices.tolist())
                running.append((workers.submit(read), position))
                if len(running) > self._num_workers:
                    yield self._first_of(running)
            while running:
                yield self._first_of(running)
        finally:
            workers.close()

    def _first_of(self, running: "deque[tuple[Future[MicroBatch], Position]]") -> Delivery:
        future, position = running.popleft()
        try:
            return future.result(self._timeout), position
        except FutureTimeout:
            raise no_data_within(self._timeout, self._reader.doing) from None

    def _plans(self, start: Position) -> Iterator[tuple[Indices, Position]]:
        """This rank's dataset indices, micro-batch by micro-batch, and the position after each."""
        size, step_size = len(self.dataset), self.share.train_batch_size
        consumed = start.consumed
        while True:
            if not self._repeat and consumed + step_size > size:
                if consumed < size and not self._drop_last:
                    raise self._exhausted(size - consumed)
                return
            for _ in range(self.num_microbatches):
                indices = self._order.indices(*self.share.bounds(consumed))
                consumed += self.share.samples_per_slice
                yield indices, self._position_of(consumed)

    # Iterable: a step is read whole before its first micro-batch is given out, so that the data
    # ends between two steps, and on the same step on every rank.

    def _iterable(self, start: Position) -> Generator[Delivery, None, None]:
        stream = self._stream(start)
        consumed = start.consumed
        step_size, unit = self.share.train_batch_size, self.share.samples_per_slice
        while True:
            mine: list[Pytree] = []
            positions: list[Position] = []
            for offset, (sample, position) in enumerate(islice(stream, step_size)):
                if self.share.owns(offset):
                    mine.append(sample)
                positions.append(position)
            if len(positions) < step_size:
                if positions and not self._drop_last:
                    raise self._exhausted(len(positions))
                return
            size = self.share.micro_batch_size
            for j in range(self.num_microbatches):
                which = f"samples of step positions {consumed} to {consumed + unit - 1}"
                batch = self._reader.together(mine[j * size : (j + 1) * size], which)
                consumed += unit
                yield batch, positions[(j + 1) * unit - 1]

    def _stream(self, start: Position) -> Iterator[tuple[Pytree, Position]]:
        """All samples from `start` on, over epochs, each with the position after it."""
        consumed, epoch, epoch_start = start.epoch_start, start.epoch, start.epoch_start
        while True:
            iterator = iter(self.dataset)
            for sample in self._reader.each(iterator):
                consumed += 1
                if consumed > start.consumed:
                    yield sample, Position(consumed, epoch, epoch_start)
            # A generator is its own iterator: it cannot be read a second time.
            if not self._repeat or iterator is self.dataset:
                return
            if consumed == epoch_start:
                raise DataError(f"{self.name} gave no sample in epoch {epoch}")
            epoch, epoch_start = epoch + 1, consumed

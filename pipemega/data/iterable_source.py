"""Iterable datasets: generators, torch's IterableDataset."""

from collections.abc import Generator, Iterator
from itertools import islice

from pipemega.data.collate import Pytree
from pipemega.data.sample_order import Share
from pipemega.data.sample_reader import SampleReader
from pipemega.data.sources import DataSource, Delivery, LoaderOptions, Position
from pipemega.errors import ConfigError, DataError


class IterableSource(DataSource):
    """An iterable of samples. Every data rank reads all of it and keeps its share.

    All samples of a step are read before its first micro-batch is delivered, so that the data ends
    between two steps, at the same step on every rank.
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
        share, stream, consumed = self._share, self._stream(start), start.consumed
        unit, size = share.samples_per_slice, share.micro_batch_size
        while True:
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
                which = f"samples of step positions {consumed} to {consumed + unit - 1}"
                samples = mine[j * size : (j + 1) * size]
                batch = self._reader.together(samples, which, consumed, share.data_rank)
                consumed += unit
                yield batch, positions[(j + 1) * unit - 1]

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

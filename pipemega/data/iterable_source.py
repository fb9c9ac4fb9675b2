"""Iterable datasets: generators, torch's IterableDataset."""

import itertools
from collections.abc import Callable, Generator, Iterator
from itertools import islice

from pipemega.data.collate import Pytree
from pipemega.data.sample_order import Share
from pipemega.data.sample_reader import SampleReader
from pipemega.data.sources import DataSource, Delivery, LoaderOptions, Position, groups
from pipemega.errors import ConfigError, DataError


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

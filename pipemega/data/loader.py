"""Micro-batches of one data rank: read ahead where possible, and resumable at any sample.

    share = Share(train_batch_size=8, micro_batch_size=2, data_rank=r, data_size=2)
    loader = BatchLoader(dataset, share)
    for _ in range(steps):
        for inputs, labels in loader.next_step():
            ...
    state = loader.state_dict()          # counts delivered samples, not those read ahead

All pipeline and tensor ranks of one data rank build equal loaders and get equal samples.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from pipemega.data.read_ahead import Prefetcher
from pipemega.data.sample_reader import Collate, Cyclic, MicroBatch, SampleReader, Share
from pipemega.data.sample_sources import (
    DataSource,
    Delivery,
    IterableSource,
    LoaderOptions,
    MapSource,
    Position,
)
from pipemega.data.torch_loader import TorchLoaderSource
from pipemega.errors import ConfigError, DataError
from pipemega.random import preserve_all_rng


@dataclass(frozen=True)
class LoadedStep:
    """What a data rank reads in one step.

    Args:
        micro_batches: micro-batches of this data rank; None if this rank did not read them.
        sizes: samples of each. A micro-batch with 0 samples completes a partial step, so that each
            step has equally many: it repeats samples, and must have no weight.
        num_samples: number of samples of all data ranks; with a DataLoader, the number of this
            data rank times the number of data ranks.
        epoch: completed passes over the data after the step.
    """

    micro_batches: list[MicroBatch] | None
    sizes: list[int]
    num_samples: int
    epoch: int


class BatchLoader:
    """Iterate over the micro-batches (inputs, labels) of this data rank.

    `next_step` returns the micro-batches of one optimizer step.

    Args:
        dataset: map-style (`len` and `[i]`), or iterable. A sample is (inputs, labels), each any
            pytree of tensors, arrays and numbers. Every data rank reads a whole iterable and
            keeps its share, so that the samples do not depend on the mesh. Or a torch DataLoader,
            whose batches are the micro-batches of this data rank.
        share: batch sizes, and the samples of each step that this data rank gets.
        options: order and reading.
        collate_fn: list of samples -> (inputs, labels); None: the attribute `collate_fn` of a
            map-style dataset, if it has one, otherwise stack them.
        consumed_samples: position in the stream to start from.

    Attributes:
        is_map_style: the data never ends.
        is_compared: what the ranks of a data rank read should be compared: it is not declared to be
            deterministic.
        must_differ: it should be compared over data ranks too, where equal data is an error.

    Raises:
        ConfigError: `num_workers` with an iterable dataset.
        DataError: the dataset is empty. While iterating: a sample cannot be read, samples do not
            fit together, an iterable ends within a step, no data within the timeout.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        options: LoaderOptions | None = None,
        *,
        collate_fn: Collate | None = None,
        consumed_samples: int = 0,
    ) -> None:
        options = options or LoaderOptions()
        self.dataset, self.share = dataset, share
        self.name = type(dataset).__name__
        self._options = options
        if collate_fn is None and is_map_style(dataset):
            collate_fn = getattr(dataset, "collate_fn", None)
        self._reader = SampleReader(dataset, self.name, collate_fn)
        self._source = _source_of(dataset, self._reader, share, options)
        self.is_map_style = self._source.is_map_style
        self.is_compared, self.must_differ = self._source.is_compared, self._source.must_differ
        shuffle = options.shuffle
        if shuffle is None:
            shuffle = self.is_map_style and not getattr(dataset, "already_shuffled", False)
        if options.cyclic and not self.is_map_style:
            raise ConfigError(
                f"data.dataloader_type is 'cyclic', which needs a dataset with len() and [i], and "
                f"{self.name} has its own order: remove the key"
            )
        self._set_order(options.seed, shuffle, options.cyclic)
        self._was_read = False
        self._peeked: Delivery | None = None
        self._prefetcher: Prefetcher[Delivery] | None = None
        self._start_at(self._source.position_of(consumed_samples))

    @property
    def reads_ahead(self) -> bool:
        """Whether samples are read before they are needed, by a thread or by processes."""
        return self._source.reads_ahead or self._options.num_workers > 0

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of the next step on this rank."""
        return self.share.at(self.consumed_samples).num_microbatches

    @property
    def consumed_samples(self) -> int:
        """Number of samples delivered to all data ranks since the start of the run."""
        return self._position.consumed

    @property
    def epoch(self) -> int:
        """Completed passes over the data.

        Without `by_epoch`, a pass over an iterable or a DataLoader is complete when the next one
        begins.
        """
        return self._position.epoch

    @property
    def repeats(self) -> bool:
        """Whether the data starts again at its end."""
        return self._options.repeat and not self._source.is_one_pass

    @property
    def by_epoch(self) -> bool:
        """Whether no step has samples of two epochs."""
        return self._options.by_epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps of each epoch; None without `by_epoch`, or if it is not known."""
        if not self.by_epoch or self.share.ramp is not None:
            return None
        return self._source.steps_per_epoch

    def end_steps_with_epochs(self) -> None:
        """Set `LoaderOptions.by_epoch`, and continue at the same position.

        Raises:
            DataError: an epoch has fewer samples than a step, and they are dropped.
        """
        if self.by_epoch:
            return
        self.close()
        self._options = replace(self._options, by_epoch=True)
        self._source = _source_of(self.dataset, self._reader, self.share, self._options)
        self._set_order(self._seed, self._shuffle, self._cyclic)

    @property
    def fingerprint(self) -> str:
        """`dataset.fingerprint` if it exists, else the class name and the length."""
        return self._source.fingerprint

    def __len__(self) -> int:
        """Return the number of whole micro-batches of this rank per epoch."""
        if isinstance(self.dataset, DataLoader):
            return len(self.dataset)
        if not self.is_map_style:
            raise TypeError(f"{self.name} is an iterable dataset; its length is not known")
        return len(self.dataset) // self.share.samples_per_slice

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return self._next().batch

    def _next(self) -> Delivery:
        delivery, self._peeked = self._peeked or self._take(), None
        self._position = delivery.position
        return delivery

    def peek(self) -> MicroBatch:
        """Return the next micro-batch without consuming it; works for a generator too.

        Raises:
            StopIteration, DataError: as `next()`.
        """
        self._peeked = self._peeked or self._take()
        return self._peeked.batch

    def next_step(self) -> list[MicroBatch]:
        """Return the micro-batches of one optimizer step.

        Raises:
            StopIteration: the data does not fill another step (`repeat=False`).
            DataError: the data ended within the step.
        """
        return self.read_step().micro_batches or []

    def read_step(self) -> LoadedStep:
        """Read one step, as `next_step`, with the sizes of its micro-batches."""
        before, count = self.consumed_samples, self.num_microbatches
        step = [self._next()]
        for _ in range(count - 1):
            try:
                step.append(self._next())
            except StopIteration:
                had = len(step) * self.share.samples_per_slice
                raise self._source.exhausted(had) from None
        sizes = [delivery.size for delivery in step]
        number = self.consumed_samples - before
        return LoadedStep([delivery.batch for delivery in step], sizes, number, self.epoch)

    def skip_step(self) -> LoadedStep:
        """Pass over one step without reading it; only for map-style data.

        Raises:
            StopIteration, DataError: as `next_step`.
        """
        assert isinstance(self._source, MapSource), "the length of the data is not known"
        found = self._source.next_step(self._position)
        if found is None:
            raise StopIteration
        share = self.share.at(self.consumed_samples)
        number = found[1].consumed - self.consumed_samples
        self._start_at(found[1])
        sizes = [len(part.own) for part in share.parts(number)]
        return LoadedStep(None, sizes, number, self.epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next sample; equal on all ranks and for all batch sizes."""
        state = {
            "consumed_samples": self._position.consumed,
            "epoch": self._position.epoch,
            "epoch_start": self._position.epoch_start,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self.fingerprint,
        }
        return state | ({"cyclic": asdict(self._cyclic)} if self._cyclic else {})

    def load_state_dict(self, state: Mapping[str, Any], *, same_data: bool = True) -> None:
        """Continue at the position of `state`; batch sizes and mesh may differ.

        Args:
            same_data: raise an error if the dataset differs from the one in `state`; False: start
                the current dataset at the same number of samples.

        Raises:
            DataError: the state is incomplete, or the dataset differs.
        """
        missing = [key for key in self.state_dict() if key not in {*state, "cyclic"}]
        if missing:
            raise DataError(f"the saved data position lacks {', '.join(missing)}")
        if same_data and state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data differs from the checkpoint's: {self.fingerprint} now, "
                f"{state['fingerprint']} in the checkpoint, so sample {state['consumed_samples']} "
                "would be a different one (files, split, seq_length, seed, blend or number of "
                "epochs changed); restore the old settings, or load with same_data=False "
                '(in a run: checkpoint.allow_changes ["data"]) to continue with the new data'
            )
        saved = state.get("cyclic")
        cyclic = Cyclic(**saved) if saved else None
        if same_data:
            self._refuse_other_order(cyclic)
        else:
            cyclic = self._cyclic
        self._set_order(int(state["seed"]), bool(state["shuffle"]), cyclic)
        self._start_at(
            Position(int(state["consumed_samples"]), int(state["epoch"]), int(state["epoch_start"]))
        )

    def close(self) -> None:
        """Stop threads and worker processes. Iterating again continues at the same position."""
        self._peeked = None
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()
        self._source.close()

    def _set_order(self, seed: int, shuffle: bool, cyclic: Cyclic | None) -> None:
        self._seed, self._shuffle, self._cyclic = seed, shuffle, cyclic
        self._source.set_order(seed, shuffle, cyclic)

    def _refuse_other_order(self, saved: Cyclic | None) -> None:
        """Raise a DataError if the order of a checkpoint cannot be continued."""
        for key, now, then in _settings_of_order(self._cyclic, saved):
            if now != then:
                raise DataError(
                    f"{key} is {now!r}, and was {then!r} in the checkpoint, so the samples would "
                    "have another order: restore it, or load with same_data=False (in a run: "
                    'checkpoint.allow_changes ["data"]) to continue with the new order'
                )

    def _start_at(self, position: Position) -> None:
        self.close()
        self._position = position

    def _take(self) -> Delivery:
        if self._prefetcher is None:
            self._prefetcher = self._open()
        try:
            return self._prefetcher.get()
        except DataError:
            # The next call reads the same samples again; none is skipped.
            self.close()
            raise

    def _open(self) -> Prefetcher[Delivery]:
        # Samples of an iterator that were read are lost.
        if self._source.is_one_pass and self._was_read:
            raise DataError(
                f"{self.name} can be read only once, and the loader was closed or moved after the "
                "first sample: give a dataset whose __iter__ returns a new iterator"
            )
        self._was_read = True
        source, options = self._source, self._options
        items = source.deliveries(self._position)
        if not source.reads_ahead:
            items = _restore_rng(items)
        return Prefetcher(
            items,
            self._finish,
            # Each worker has a micro-batch in hand, besides those that are ready.
            options.prefetch + options.num_workers if source.reads_ahead else 0,
            lambda: source.current,
            options.timeout_seconds,
            source.num_threads,
        )

    def _finish(self, item: Any) -> Delivery:
        """Return an item of the source as a micro-batch, in pinned memory if the device uses it."""
        delivery, memory = self._source.finish(item), self._options.memory
        if memory is None or not memory.pins:
            return delivery
        batch = pytree.tree_map_only(Tensor, memory.pinned, delivery.batch)
        return delivery._replace(batch=batch)


def _settings_of_order(
    now: Cyclic | None, saved: Cyclic | None
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, value now, value in the checkpoint) of what determines the order."""
    if now is None or saved is None:
        yield "data.dataloader_type", now and "cyclic", saved and "cyclic"
        return
    yield "data.data_sharding", now.data_sharding, saved.data_sharding
    yield "the number of samples", now.dataset_size, saved.dataset_size


def _restore_rng(items: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Yield the items; the default generators continue as if none had been read."""
    with closing(items):
        while True:
            with preserve_all_rng():
                item = next(items, None)
            if item is None:
                return
            yield item


def is_map_style(data: Any) -> bool:
    """Return whether `data` is a dataset with `len` and `[i]`."""
    # torch's IterableDataset inherits a __getitem__ that only raises.
    if isinstance(data, IterableDataset | DataLoader):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _source_of(data: Any, reader: SampleReader, share: Share, options: LoaderOptions) -> DataSource:
    if isinstance(data, DataLoader):
        return TorchLoaderSource(data, reader, share, options)
    kind = MapSource if is_map_style(data) else IterableSource
    return kind(data, reader, share, options)

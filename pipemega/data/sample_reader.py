"""Read samples of a user's dataset: with reproducible random numbers, and errors that name them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch.utils.data import TensorDataset

from pipemega.data.collate import Collate, MicroBatch, Pytree, make_micro_batch
from pipemega.data.sample_order import SampleKey
from pipemega.errors import DataError
from pipemega.random import derive_seed, seed_rng

# sys.exit() inside a dataset must not end the run with exit code 0.
_ERRORS = (Exception, SystemExit)

# Datasets whose `[i]` draws no random numbers; a subclass may.
_PLAIN = (list, tuple, TensorDataset)


class SampleReader:
    """Read samples, and record which sample each thread currently reads.

    If the data may draw random numbers, the default generators of torch, numpy and `random` are
    seeded from the sample. So a sample is the same on every mesh, on every rank, in every worker
    and after a resume. Only one thread may read such data, while the model does not run, and the
    caller restores the generators.

    Args:
        dataset: map-style or iterable, or a DataLoader.
        name: name of the dataset in messages.
        collate: the user's collate function, or None.

    Attributes:
        seed: of the random numbers of all samples.
        has_collate: `collate` is not None.
        is_deterministic: the dataset and the collate function are declared to be: a sample depends
            only on its index, and is the same on all ranks.
        may_draw: they may draw random numbers from the default generators.

    Raises:
        DataError: while reading: a sample cannot be read, or samples do not fit together.
    """

    def __init__(self, dataset: Any, name: str, collate: Collate | None) -> None:
        self.name, self.seed = name, 0
        self.is_deterministic = _declares(dataset) and (collate is None or _declares(collate))
        is_plain = type(dataset) in _PLAIN and collate is None
        self.may_draw = not self.is_deterministic and not is_plain
        self._dataset, self._collate, self.has_collate = dataset, collate, collate is not None
        # Thread id -> what it reads; the oldest read is first.
        self._current: dict[int, str] = {}

    @property
    def current(self) -> str:
        """Text that names the oldest read in progress, for the message of a timeout."""
        return next(iter([*self._current.values()]), "no sample is being read")

    def micro_batch(self, keys: list[SampleKey]) -> MicroBatch:
        """Read some samples and collate them."""
        which = f"samples {', '.join(str(key.sample) for key in keys)}"
        samples = [self._sample(key) for key in keys]
        return self.together(samples, which, *keys[0])

    def together(self, samples: list[Pytree], which: str, *place: int) -> MicroBatch:
        """Collate samples into a micro-batch.

        Args:
            which: names the samples in messages.
            place: numbers that no other micro-batch of the run has, to seed its random numbers.
        """
        with self._reading(f"{which} of {self.name} are being collated"):
            self._seed_draws("micro-batch", *place)
            return make_micro_batch(samples, self._collate, self.name, which)

    def each(
        self, items: Iterable[Pytree], epoch: int, *, unit: str = "sample", data_rank: int = 0
    ) -> Iterator[Pytree]:
        """Yield the items of an iterable; an error names the number of the item in the epoch.

        Args:
            unit: what an item is.
            data_rank: of the random numbers, if data ranks read different items. The first item is
                read with those of data rank 0, because the order of the epoch is drawn with it.
        """
        count, iterator = 0, None
        while True:
            which, place = f"{unit} {count} of {self.name}", (epoch, count, count and data_rank)
            with self._reading(f"{which} is being read"):
                self._seed_draws(unit, *place)
                try:
                    iterator = iter(items) if iterator is None else iterator
                    item = next(iterator)
                except StopIteration:
                    return
                except DataError:
                    raise
                except _ERRORS as error:
                    raise _unreadable(which, error) from error
            count += 1
            yield item

    def _sample(self, key: SampleKey) -> Pytree:
        which = f"sample {key.sample} of {self.name}"
        with self._reading(f"{which} is being read"):
            self._seed_draws("sample", *key)
            try:
                return self._dataset[key.sample]
            except DataError:
                raise
            except _ERRORS as error:
                raise _unreadable(which, error) from error

    def _seed_draws(self, *place: object) -> None:
        """Seed the default generators from `place`, if the data may draw from them."""
        if self.may_draw:
            seed_rng(derive_seed(self.seed, *place))

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        self._current[get_ident()] = what
        try:
            yield
        finally:
            del self._current[get_ident()]


def _declares(part: Any) -> bool:
    return bool(getattr(part, "deterministic", False))


def _unreadable(which: str, error: BaseException) -> DataError:
    return DataError(
        f"{which} could not be read: {type(error).__name__}: {error}".removesuffix(": ")
    )

"""Samples of somebody else's dataset: whatever happens in there has the sample's name."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from pipemega.data.collate import Collate, MicroBatch, Pytree, make_micro_batch
from pipemega.errors import DataError

# A dataset that calls sys.exit() must not end a run as if all were well.
_ERRORS = (Exception, SystemExit)


class Reader:
    """Reads samples, and knows which one each thread is at.

    Args:
        dataset: map-style or iterable.
        name: of it, in messages.
        collate: the user's own, or None.

    Raises:
        DataError: on reading, a sample that cannot be read, samples that do not fit together.
    """

    def __init__(self, dataset: Any, name: str, collate: Collate | None) -> None:
        self._dataset, self._name, self._collate = dataset, name, collate
        # By thread; who has been at it for longest comes first.
        self._at: dict[int, str] = {}

    @property
    def doing(self) -> str:
        """What is being read, or the oldest of it; for the message of a wait that ends badly."""
        return next(iter([*self._at.values()]), "no sample is being read")

    def micro_batch(self, indices: list[int]) -> MicroBatch:
        """The samples at `indices`, put together."""
        return self.together([self._sample(index) for index in indices], f"samples {_all(indices)}")

    def together(self, samples: list[Pytree], which: str) -> MicroBatch:
        """The micro-batch of some samples; `which` names them."""
        with self._at_work(f"{which} of {self._name} are being put together"):
            return make_micro_batch(samples, self._collate, self._name, which)

    def each(self, samples: Iterator[Pytree]) -> Iterator[Pytree]:
        """Those of an iterable."""
        count = 0
        while True:
            with self._at_work(f"sample {count} of {self._name} is being read"):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
                except DataError:
                    raise
                except _ERRORS as error:
                    raise self._unreadable(count, error) from error
            count += 1
            yield sample

    def _sample(self, index: int) -> Pytree:
        with self._at_work(f"sample {index} of {self._name} is being read"):
            try:
                return self._dataset[index]
            except DataError:
                raise
            except _ERRORS as error:
                raise self._unreadable(index, error) from error

    def _unreadable(self, number: int, error: BaseException) -> DataError:
        return DataError(
            f"sample {number} of {self._name} could not be read: "
            f"{type(error).__name__}: {error}".removesuffix(": ")
        )

    @contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        self._at[get_ident()] = what
        try:
            yield
        finally:
            del self._at[get_ident()]


def _all(indices: list[int]) -> str:
    return ", ".join(map(str, indices))

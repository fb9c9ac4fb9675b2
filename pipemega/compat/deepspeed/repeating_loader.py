"""`deepspeed.utils.RepeatingLoader`."""

from collections.abc import Iterable, Iterator
from typing import Any


class RepeatingLoader:
    """Starts a loader again when it ends.

    Args:
        loader: an iterable with at least one batch.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

"""Collate samples into a micro-batch (inputs, labels), each any pytree."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.utils.data import default_collate

from pipemega.errors import DataError

# A user's pytree of tensors, arrays and numbers has no narrower type.
Pytree: TypeAlias = Any
MicroBatch = tuple[Pytree, Pytree]
Collate = Callable[[list[Pytree]], Pytree]


def stack_samples(samples: Sequence[Pytree]) -> Pytree:
    """Stack samples of one structure along a new first dim.

    As torch's `default_collate`, but a tuple stays a tuple (torch makes it a list): a message
    between pipeline stages must keep its structure.
    """
    first = samples[0]
    if type(first) is tuple:
        if len({len(sample) for sample in samples}) > 1:
            raise ValueError(f"tuples of {sorted({len(sample) for sample in samples})} members")
        return tuple(stack_samples([sample[i] for sample in samples]) for i in range(len(first)))
    return default_collate(list(samples))


def make_micro_batch(
    samples: Sequence[Pytree], collate: Collate | None, source: str, which: str
) -> MicroBatch:
    """Collate samples into one (inputs, labels) pair.

    Args:
        collate: the user's function, or None for `stack_samples`.
        source: name of the dataset in messages.
        which: name of the samples in messages.

    Raises:
        DataError: the samples do not fit together, or are not (inputs, labels) pairs.
    """
    try:
        batch = stack_samples(samples) if collate is None else collate(list(samples))
    except Exception as error:
        raise DataError(
            f"{which} of {source} cannot be collated into one micro-batch: {error}; samples must "
            "have equal structure and shapes, or give a collate_fn that makes them equal"
        ) from error
    return make_pair(batch, source, which)


def make_pair(batch: Pytree, source: str, which: str) -> MicroBatch:
    """Return a micro-batch as a tuple (inputs, labels).

    Raises:
        DataError: it is not a pair; the message names `source` and `which` samples.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{len(batch)} members" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(
            f"{source} must return (inputs, labels) pairs, but {which} give {got}; "
            "inputs and labels may each be a tuple or a dict"
        )
    return batch[0], batch[1]

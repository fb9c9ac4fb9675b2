"""From samples to a micro-batch: (inputs, labels), each any pytree."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.utils.data import default_collate

from pipemega.errors import DataError

# A user's pytree of tensors, arrays and numbers has no narrower type.
Pytree: TypeAlias = Any
MicroBatch = tuple[Pytree, Pytree]
Collate = Callable[[list[Pytree]], Pytree]


def stack_samples(samples: Sequence[Pytree]) -> Pytree:
    """Samples of one structure -> that structure with a batch dim first.

    torch's `default_collate`, except that a tuple stays a tuple (there it becomes a list), since
    what crosses the stages of a pipeline must keep its structure.
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
    """Collate, and insist on a pair.

    Args:
        collate: the user's own, or None for `stack_samples`.
        source: names the dataset in messages.
        which: names the samples in messages.

    Raises:
        DataError: the samples do not fit together, or are no (inputs, labels) pairs.
    """
    try:
        batch = stack_samples(samples) if collate is None else collate(list(samples))
    except Exception as error:
        raise DataError(
            f"{which} of {source} cannot be put into one micro-batch: {error}; samples must have "
            "equal structure and shapes, or the loader needs a collate_fn that makes them so"
        ) from error
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{len(batch)} members" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(
            f"{source} must give (inputs, labels) pairs, and {which} make {got}; "
            "put what belongs together into one of the two, each may be a tuple or a dict"
        )
    return batch[0], batch[1]

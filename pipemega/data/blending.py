"""Several datasets mixed by weight, exactly as Megatron mixes them.

Sample k comes from the dataset that lags furthest behind its share: the first i that maximises
weight_i * max(k, 1) - taken_i. That is a chain of a million small steps, each needing the counts
that the one before left. It is run here in many pieces side by side:

    1. cut the chain into pieces, and guess the counts at the start of each (its share, rounded);
    2. advance all pieces together, one vectorised step after the other;
    3. where a piece ended with other counts than the next one started from, run the next again
       from the counts that were found, until all ends meet.

Each piece runs the same float64 arithmetic as Megatron's loop, and a piece whose start is the end
of its predecessor is right when its predecessor is; the first one is right. So the result is that
of the loop, bit for bit. It is fast because a greedy choice forgets: two runs from different
counts agree after a few steps, so that a second round nearly always finds all ends to meet.

Source: Megatron-LM, core/datasets/helpers.cpp and blended_dataset.py.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from pipemega.data.caching import Say, cached_arrays, digest_of
from pipemega.data.gpt_dataset import GPTDataset, Sample
from pipemega.data.mapped import Mappings
from pipemega.errors import DataError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Blend = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]

# Megatron builds each dataset a little larger than its share.
SURPLUS = 0.005
MAX_DATASETS = 32767


def normalized(weights: Sequence[float] | Floats) -> Floats:
    """Weights that add up to one.

    Raises:
        DataError: none, too many for the index's int16, or one that is not positive.
    """
    array = np.array(weights, dtype=np.float64)
    if not 1 <= len(array) <= MAX_DATASETS:
        raise DataError(f"a blend takes 1 to {MAX_DATASETS} datasets, and {len(array)} were given")
    wrong = np.flatnonzero(~(array > 0) | ~np.isfinite(array))
    if len(wrong):
        raise DataError(
            f"weight {weights[int(wrong[0])]} of dataset {wrong[0]} in data.data_path must be "
            "positive; leave a dataset out that is not to be read"
        )
    return array / np.sum(array)


def sizes_of_parts(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Samples that each dataset of a blend gives: its share, rounded up, and the surplus on top."""
    return [
        math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in normalized(weights)
    ]


def blend(weights: Sequence[float] | Floats, num_samples: int) -> Blend:
    """Which dataset each sample comes from, and which of its samples that is.

    Shape:
        dataset_index int16 [num_samples], dataset_sample_index int64 [num_samples]
    """
    return _greedy(normalized(weights), num_samples, None)


def blend_exhaustively(sizes: Sequence[int]) -> Blend:
    """Every sample of every dataset once, spread in proportion to the sizes.

    Shape:
        dataset_index int16 [sum(sizes)], dataset_sample_index int64 [sum(sizes)]
    """
    array = np.array(sizes, dtype=np.int64)
    if not 1 <= len(array) <= MAX_DATASETS or array.min() < 0 or array.sum() < 1:
        raise DataError(f"datasets of {list(sizes)} samples cannot be blended")
    total = int(array.sum())
    return _greedy(array / np.float64(total), total, array)


def _greedy(weights: Floats, num_samples: int, sizes: Counts | None) -> Blend:
    """The chain of choices; with `sizes`, a dataset that is used up is out of the running."""
    # Pieces of sqrt(n) keep both the number of steps and the width of each moderate.
    piece = max(256, math.isqrt(num_samples))
    starts_at = np.arange(0, num_samples, piece, dtype=np.int64)
    starts = np.stack([_rounded_share(weights, int(k), sizes) for k in starts_at])
    chosen = np.zeros((len(starts_at), piece), dtype=np.int16)
    ends = np.empty_like(starts)
    stale = np.arange(len(starts_at))
    while len(stale):
        chosen[stale], ends[stale] = _advance(
            weights, starts_at[stale], starts[stale], piece, num_samples, sizes
        )
        met = np.all(ends[:-1] == starts[1:], axis=1)
        stale = np.flatnonzero(~met) + 1
        starts[stale] = ends[stale - 1]
    dataset_index = chosen.reshape(-1)[:num_samples]
    return dataset_index, _running_count(dataset_index, len(weights))


def _advance(
    weights: Floats,
    at: npt.NDArray[np.int64],
    counts: Counts,
    steps: int,
    num_samples: int,
    sizes: Counts | None,
) -> tuple[npt.NDArray[np.int16], Counts]:
    """Take `steps` choices in every piece.

    Shape:
        at [pieces]; counts [pieces, datasets] -> choices [pieces, steps], counts at the end
    """
    taken = counts.astype(np.float64)
    chosen = np.empty((steps, len(at)), dtype=np.int16)
    rows = np.arange(len(at))
    # The last piece runs past the end, where nothing is left to take; what it does is cut off.
    limit = None if sizes is None else sizes.astype(np.float64)
    for step in range(steps):
        lag = weights * np.maximum(at + step, 1).astype(np.float64)[:, None] - taken
        if limit is not None:
            lag[taken >= limit] = -np.inf
        best = lag.argmax(axis=1)
        chosen[step] = best
        taken[rows, best] += 1
    return chosen.T, taken.astype(np.int64)


def _rounded_share(weights: Floats, num_taken: int, sizes: Counts | None) -> Counts:
    """A guess at the counts after `num_taken` choices: the shares, largest remainders rounded up.

    Only a guess, but one whose sum is right.
    """
    shares = weights * num_taken
    counts = np.floor(shares).astype(np.int64)
    missing = num_taken - int(counts.sum())
    if missing:
        order = np.argsort(counts - shares, kind="stable")
        counts[order[:missing]] += 1
    return counts if sizes is None else np.minimum(counts, sizes)


def _running_count(choices: npt.NDArray[np.int16], num_datasets: int) -> npt.NDArray[np.int64]:
    """For each choice, how often the same was chosen before. [n] -> [n]"""
    order = np.argsort(choices, kind="stable")
    counts = np.bincount(choices, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    running = np.empty(len(choices), dtype=np.int64)
    running[order] = np.arange(len(choices), dtype=np.int64) - firsts
    return running


class BlendedDataset(Dataset[Sample]):
    """Samples of several datasets, mixed.

    Args:
        datasets: of one split, each large enough for its share; see `sizes_of_parts`.
        weights: their shares; None: every sample of each, once.
        num_samples: how many to mix; without weights there are no more than all, and None is all.
        cache: where the index is kept.

    Raises:
        DataError: a dataset has fewer samples than the blend takes of it.
    """

    already_shuffled = True

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float] | None,
        num_samples: int | None,
        *,
        cache: Path,
        say: Say | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self.name = self.datasets[0].name
        sizes = [len(dataset) for dataset in self.datasets]
        if num_samples is None and weights is not None:
            raise DataError("a blend by weight needs a number of samples")
        self.weights = normalized(sizes if weights is None else weights)
        everything = sum(sizes)
        size = everything if num_samples is None else num_samples
        whole = weights is None
        if whole:
            size = min(size, everything)

        def build() -> dict[str, npt.NDArray[np.generic]]:
            chosen, taken = blend_exhaustively(sizes) if whole else blend(self.weights, size)
            return {"dataset_index": chosen[:size], "dataset_sample_index": taken[:size]}

        parts = [dataset.fingerprint for dataset in self.datasets]
        identity: dict[str, object] = {
            "datasets": parts,
            "weights": self.weights.tolist(),
            "exhaustive": whole,
        }
        # A longer blend starts with the shorter one, so its length is no part of what it is.
        self.fingerprint = digest_of(identity)
        arrays = cached_arrays(
            cache,
            f"BlendedDataset-{self.name}",
            {**identity, "samples": size},
            ("dataset_index", "dataset_sample_index"),
            build,
            what=f"the {self.name} blend of {len(parts)} datasets",
            say=say,
        )
        self._dataset_index = arrays["dataset_index"]
        self._sample_index = arrays["dataset_sample_index"]
        self._mappings = Mappings(self._dataset_index, self._sample_index)
        self._refuse_too_small(sizes)

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        self._mappings.refuse_shortened()
        return self.datasets[int(self._dataset_index[index])][int(self._sample_index[index])]

    def describe(self) -> str:
        """One line per dataset, and one for the blend."""
        shares = ", ".join(
            f"{weight:.4f} {dataset.data.prefix}"
            for weight, dataset in zip(self.weights, self.datasets, strict=True)
        )
        lines = [dataset.describe() for dataset in self.datasets]
        return "\n".join([*lines, f"{self.name}: {len(self):,} samples blended of {shares}"])

    def _refuse_too_small(self, sizes: Sequence[int]) -> None:
        taken = np.bincount(self._dataset_index, minlength=len(sizes))
        for dataset, size, count in zip(self.datasets, sizes, taken.tolist(), strict=True):
            if count > size:
                raise DataError(
                    f"the {self.name} blend takes {count} samples of {dataset.data.prefix}, "
                    f"which was built with {size}"
                )

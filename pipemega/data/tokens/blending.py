"""Mix several datasets by weight, identical to Megatron's blending.

Sample k comes from the dataset with the largest deficit: the first i that maximises
weight_i * max(k, 1) - taken_i. This is a sequence of up to millions of small steps, each of which
needs the counts of the previous step. Here it runs in many segments in parallel:

    1. cut the sequence into segments, and guess the counts at the start of each (rounded shares);
    2. advance all segments together, one vectorised step after the other;
    3. if a segment ended with other counts than the next one started from, run the next one again
       from the correct counts, until all ends match.

Each segment runs the same float64 arithmetic as Megatron's loop. The first segment is correct, and
a segment that starts at the end of a correct one is correct, so the result equals the loop's bit
for bit. It is fast because two runs from different counts agree after a few steps: the second round
nearly always matches all ends.

Source: Megatron-LM, core/datasets/helpers.cpp and blended_dataset.py.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from pipemega.data.tokens.gpt_dataset import GPTDataset, Sample
from pipemega.data.tokens.token_files import Mappings
from pipemega.errors import DataError
from pipemega.storage.build_once import Say, cached_arrays, digest_of

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Blend = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]

# Megatron builds each dataset slightly larger than its share.
SURPLUS = 0.005
MAX_DATASETS = 32767


def normalized(weights: Sequence[float] | Floats) -> Floats:
    """Return the weights divided by their sum.

    Raises:
        DataError: no weights, too many for an int16 index, or one that is not positive.
    """
    array = np.array(weights, dtype=np.float64)
    if not 1 <= len(array) <= MAX_DATASETS:
        raise DataError(f"a blend takes 1 to {MAX_DATASETS} datasets, but {len(array)} were given")
    wrong = np.flatnonzero(~(array > 0) | ~np.isfinite(array))
    if len(wrong):
        raise DataError(
            f"weight {weights[int(wrong[0])]} of dataset {wrong[0]} in data.data_path must be "
            "positive; remove a dataset that should not be read"
        )
    return array / np.sum(array)


def sizes_of_parts(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Return the samples of each dataset of a blend: its share, rounded up, plus the surplus."""
    return [
        math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in normalized(weights)
    ]


def blend(weights: Sequence[float] | Floats, num_samples: int) -> Blend:
    """Return the dataset of each sample, and the sample's index in that dataset.

    Shape:
        dataset_index int16 [num_samples], dataset_sample_index int64 [num_samples]
    """
    return _greedy(normalized(weights), num_samples, None)


def blend_exhaustively(sizes: Sequence[int]) -> Blend:
    """Blend every sample of every dataset once, in proportion to the sizes.

    Shape:
        dataset_index int16 [sum(sizes)], dataset_sample_index int64 [sum(sizes)]
    """
    array = np.array(sizes, dtype=np.int64)
    if not 1 <= len(array) <= MAX_DATASETS or array.min() < 0 or array.sum() < 1:
        raise DataError(
            f"datasets of {list(sizes)} samples cannot be blended: give 1 to {MAX_DATASETS} "
            "datasets, and at least one sample"
        )
    total = int(array.sum())
    return _greedy(array / np.float64(total), total, array)


def _greedy(weights: Floats, num_samples: int, sizes: Counts | None) -> Blend:
    """Run the sequence of choices; with `sizes`, an exhausted dataset is not chosen again."""
    # Segments of sqrt(n) samples balance the number of steps and the width of each.
    segment = max(256, math.isqrt(num_samples))
    starts_at = np.arange(0, num_samples, segment, dtype=np.int64)
    starts = np.stack([_rounded_share(weights, int(k), sizes) for k in starts_at])
    chosen = np.zeros((len(starts_at), segment), dtype=np.int16)
    ends = np.empty_like(starts)
    stale: npt.NDArray[np.intp] = np.arange(len(starts_at))
    while len(stale):
        chosen[stale], ends[stale] = _advance(
            weights, starts_at[stale], starts[stale], segment, num_samples, sizes
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
    """Make `steps` choices in every segment.

    Shape:
        at [segments]; counts [segments, datasets] -> choices [segments, steps], final counts
    """
    taken = counts.astype(np.float64)
    chosen = np.empty((steps, len(at)), dtype=np.int16)
    rows = np.arange(len(at))
    # The last segment runs past the end, where all datasets are exhausted; the caller drops that.
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
    """Guess the counts after `num_taken` choices: rounded shares, largest remainders rounded up.

    The sum of the guess is exact.
    """
    shares = weights * num_taken
    counts = np.floor(shares).astype(np.int64)
    missing = num_taken - int(counts.sum())
    if missing:
        order = np.argsort(counts - shares, kind="stable")
        counts[order[:missing]] += 1
    return counts if sizes is None else np.minimum(counts, sizes)


def _running_count(choices: npt.NDArray[np.int16], num_datasets: int) -> npt.NDArray[np.int64]:
    """Return for each choice the number of equal choices before it. [n] -> [n]"""
    order = np.argsort(choices, kind="stable")
    counts = np.bincount(choices, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    running = np.empty(len(choices), dtype=np.int64)
    running[order] = np.arange(len(choices), dtype=np.int64) - firsts
    return running


class BlendedDataset(Dataset[Sample]):
    """Samples of several datasets, mixed.

    Args:
        datasets: datasets of one split, each large enough for its share; see `sizes_of_parts`.
        weights: their shares; None: every sample of each dataset once.
        num_samples: number of samples; without weights at most all, and None means all.
        cache: folder of the index.

    Raises:
        DataError: a dataset has fewer samples than the blend needs from it.
    """

    already_shuffled = True
    deterministic = True

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
        # A longer blend starts with the shorter one, so the length is not part of the fingerprint.
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
            raise IndexError(f"sample index {index} is out of range: {len(self)} samples")
        self._mappings.refuse_shortened()
        return self.datasets[int(self._dataset_index[index])][int(self._sample_index[index])]

    def describe(self) -> str:
        """Return one line per dataset, and one for the blend."""
        shares = ", ".join(
            f"{weight:.4f} {dataset.data.prefix}"
            for weight, dataset in zip(self.weights, self.datasets, strict=True)
        )
        lines = [dataset.describe() for dataset in self.datasets]
        return "\n".join([*lines, f"{self.name}: {len(self):,} samples blended from {shares}"])

    def _refuse_too_small(self, sizes: Sequence[int]) -> None:
        taken = np.bincount(self._dataset_index, minlength=len(sizes))
        for dataset, size, count in zip(self.datasets, sizes, taken.tolist(), strict=True):
            if count > size:
                raise DataError(
                    f"the {self.name} blend needs {count} samples of {dataset.data.prefix}, "
                    f"which has {size}"
                )

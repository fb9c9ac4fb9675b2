"""The loss of a token bigram model: a baseline that a trained model should beat.

    P(b | a) = w * (count(a, b) + s * P(b)) / (count(a) + s) + (1 - w) * P(b)
    P(b)     = (count(b) + 1) / (n + V)

A frequent token predicts its successor by its own counts; a rare one falls back on the unigram
distribution; 1 - w is the share of pairs never seen. Strength s and weight w minimise the loss on
the last tenth of the training tokens, with counts of the other nine tenths. The final model counts
all training tokens.

Source: Jelinek and Mercer 1980 for w; MacKay and Peto 1995 for s.

Generated tokens for trials without data files; a model can learn them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from pipemega.data.tokens.gpt_dataset import SPLITS, Sample, SampleFormat
from pipemega.errors import DataError
from pipemega.storage.build_once import digest_of

Tokens = npt.NDArray[np.generic]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

STRENGTHS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
WEIGHTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HELD_OUT = 0.1
# Pairs are counted in portions, so that memory grows only with the distinct pairs.
PORTION = 1 << 22


class Smoothing(NamedTuple):
    """The s and w of the formula above."""

    strength: float
    weight: float


@dataclass(frozen=True)
class BigramLoss:
    """Mean loss per token on the validation tokens, in nats.

    Attributes:
        loss: loss of the bigram model.
        unigram_loss: loss of P(b) alone, for comparison.
        smoothing: the chosen s and w.
        tokens: number of predicted tokens.
    """

    loss: float
    unigram_loss: float
    smoothing: Smoothing
    tokens: int


class BigramCounts:
    """Counts of tokens and of pairs; pairs are sparse.

    Args:
        tokens: one stream; pairs across document borders count too, as in training samples.
        vocab_size: upper bound of the ids.
    """

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.single: Ints = np.bincount(tokens, minlength=vocab_size)
        self.first: Ints = self.single.copy()
        self.first[int(tokens[-1])] -= 1  # the last token starts no pair
        self.pairs, self.pair_counts = _count_pairs(tokens, vocab_size)

    def losses(self, tokens: Tokens, smoothings: Sequence[Smoothing]) -> tuple[float, Floats]:
        """Return mean losses in nats per token of a stream, without its first token.

        Returns:
            the loss of P(b) alone, and of P(b | a) under each smoothing
        """
        common = (self.single + 1.0) / (self.single.sum() + self.vocab_size)
        distinct, how_often = _count_pairs(tokens, self.vocab_size)
        a, b = np.divmod(distinct, self.vocab_size)
        place = np.minimum(np.searchsorted(self.pairs, distinct), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == distinct, self.pair_counts[place], 0)
        before, after = self.first[a], common[b]
        total = how_often.sum()
        losses = []
        for s, w in smoothings:
            chance = w * (seen + s * after) / (before + s) + (1 - w) * after
            losses.append(-(how_often @ np.log(chance)) / total)
        return float(-(how_often @ np.log(after)) / total), np.array(losses)


def bigram_loss(train: Tokens, valid: Tokens, vocab_size: int) -> BigramLoss:
    """Fit on the training tokens, evaluate on the validation tokens.

    Raises:
        DataError: one of them is too short, or has ids outside of the vocabulary.
    """
    cut = len(train) - int(len(train) * HELD_OUT)
    held_out = train[cut:]
    if len(held_out) < 2 or len(valid) < 2:
        raise DataError(
            f"{len(train)} training and {len(valid)} validation tokens are too few for a bigram "
            "model"
        )
    for tokens in (train, valid):
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise DataError(
                f"token ids from {tokens.min()} to {tokens.max()} do not fit the vocabulary of "
                f"{vocab_size}"
            )
    choices = [Smoothing(*choice) for choice in product(STRENGTHS, WEIGHTS)]
    _, losses = BigramCounts(train[:cut], vocab_size).losses(held_out, choices)
    best = choices[int(losses.argmin())]
    unigram, loss = BigramCounts(train, vocab_size).losses(valid, [best])
    return BigramLoss(float(loss[0]), unigram, best, len(valid) - 1)


def _count_pairs(tokens: Tokens, vocab_size: int) -> tuple[Ints, Ints]:
    """Return the distinct pairs a * V + b, sorted, and the count of each."""
    pairs: Ints = np.empty(0, np.int64)
    counts: Ints = np.empty(0, np.int64)
    for start in range(0, len(tokens) - 1, PORTION):
        part = tokens[start : start + PORTION + 1].astype(np.int64)
        new, new_counts = np.unique(part[:-1] * vocab_size + part[1:], return_counts=True)
        pairs, places = np.unique(np.append(pairs, new), return_inverse=True)
        counts = np.bincount(places, np.append(counts, new_counts)).astype(np.int64)
    return pairs, counts


STRIDES = 7
SAMPLES_OF_AN_EPOCH = 1024


class MockDataset(Dataset[Sample]):
    """Sample i is an arithmetic sequence modulo the vocabulary size; start and stride depend on i.

    Args:
        name: "train", "valid" or "test"; each has different samples.
        sample_format: see `gpt_dataset`; mock data has no documents.
        num_samples: None: 1024.
        seed: seed of starts and strides.
    """

    already_shuffled = True
    deterministic = True

    def __init__(
        self, name: str, sample_format: SampleFormat, num_samples: int | None, seed: int
    ) -> None:
        self.name = name
        self.format = sample_format
        self.seed = seed
        self._size = SAMPLES_OF_AN_EPOCH if num_samples is None else num_samples
        self.fingerprint = digest_of(
            {
                "mock": name,
                "seed": seed,
                "sequence length": sample_format.seq_length,
                "vocabulary": sample_format.vocab_size,
            }
        )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size}")
        random = np.random.RandomState([self.seed % 2**32, SPLITS.index(self.name), index])
        start, stride = random.randint(self.format.vocab_size), 1 + random.randint(STRIDES)
        text = (start + stride * np.arange(self.format.seq_length + 1)) % self.format.vocab_size
        tokens, labels = text[:-1].copy(), text[1:].copy()
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def describe(self) -> str:
        """Return a one-line description."""
        return f"{self.name}: {self._size:,} mock samples of {self.format.seq_length} tokens"

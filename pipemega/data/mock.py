"""Tokens from nothing, for trials of a mesh or a size: no files, and still something to learn."""

import numpy as np
import torch
from torch.utils.data import Dataset

from pipemega.data.caching import digest_of
from pipemega.data.gpt_dataset import Sample, SampleFormat
from pipemega.data.samples import SPLITS

STRIDES = 7
SAMPLES_OF_AN_EPOCH = 1024


class MockDataset(Dataset[Sample]):
    """Sample i counts through the vocabulary from a start and by a stride that i decides.

    Args:
        name: "train", "valid" or "test"; each has samples of its own.
        sample_format: see `gpt_dataset`; there are no documents here, hence no ends of any.
        num_samples: None: 1024.
        seed: of starts and strides.
    """

    already_shuffled = True

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
        """One line."""
        return f"{self.name}: {self._size:,} mock samples of {self.format.seq_length} tokens"

"""Generated tokens for trials without data files; a model can learn them."""

import numpy as np
import torch
from torch.utils.data import Dataset

from pipemega.data.file_cache import digest_of
from pipemega.data.gpt_dataset import Sample, SampleFormat
from pipemega.data.samples import SPLITS

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

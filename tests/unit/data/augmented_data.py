"""Datasets that draw random numbers, at the top of a module, so that worker processes find them."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from pipemega.data.loader import BatchLoader
from pipemega.data.sample_reader import Share
from pipemega.data.sample_sources import LoaderOptions


def drawn():
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


class Augmented(Dataset):
    """Sample i is i and numbers from the three default generators."""

    def __init__(self, size=12):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.tensor([float(index), *drawn()], dtype=torch.float64)
        return x, -x


class AugmentedStream(IterableDataset):
    """The same, in the order of a permutation that is drawn at the start of each epoch."""

    def __init__(self, size=12):
        self.size = size

    def __iter__(self):
        for index in torch.randperm(self.size).tolist():
            x = torch.tensor([float(index), *drawn()], dtype=torch.float64)
            yield x, -x


def mix_samples(samples):
    """Collate as mixup does: with a random factor."""
    x = torch.stack([sample[0] for sample in samples]) * torch.rand(())
    return x, -x


class Failing(Augmented):
    def __getitem__(self, index):
        if index == 5:
            self.decode(index)
        return super().__getitem__(index)

    def decode(self, index):
        raise OSError("the picture cannot be decoded")


class Killed(Augmented):
    """Ends its process at sample 1: before it sends a micro-batch."""

    def __getitem__(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Sleeping(Augmented):
    """Writes the ids of the processes that read it, and sleeps at sample 5."""

    def __init__(self, folder, size=12):
        super().__init__(size)
        self.folder = Path(folder)

    def __getitem__(self, index):
        (self.folder / str(os.getpid())).touch()
        if index == 5:
            time.sleep(600)
        return super().__getitem__(index)

    def processes(self):
        return [int(path.name) for path in self.folder.iterdir()]


def make_loader(
    dataset, *, batch=4, micro=2, data_rank=0, data_size=1, collate_fn=None, state=None, **options
):
    loader = BatchLoader(
        dataset,
        Share(batch, micro, data_rank, data_size),
        LoaderOptions(**options),
        collate_fn=collate_fn,
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def rows_of(loader, steps=1):
    """The samples of this rank in the next steps, as lists."""
    rows = []
    for _ in range(steps):
        for inputs, labels in loader.next_step():
            assert torch.equal(inputs, -labels)
            rows += inputs.tolist()
    return rows

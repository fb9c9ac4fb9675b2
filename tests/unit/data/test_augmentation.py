"""Datasets that draw random numbers: a sample depends on seed, epoch and index alone."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.unit.data.augmented_data import (
    Augmented,
    AugmentedStream,
    make_loader,
    mix_samples,
    rows_of,
)


def test_a_sample_has_other_random_numbers_in_each_epoch_and_with_each_seed():
    rows = rows_of(make_loader(Augmented(), shuffle=False), 6)
    first, second = rows[:12], rows[12:]
    assert [row[0] for row in first] == [row[0] for row in second] == list(range(12))
    numbers = {number for row in rows for number in row[1:]}
    assert len(numbers) == 24 * 3
    other_seed = rows_of(make_loader(Augmented(), shuffle=False, seed=1), 3)
    assert not numbers & {number for row in other_seed for number in row[1:]}


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
@pytest.mark.parametrize(
    ("micro", "size", "prefetch"), [(4, 1, 0), (1, 4, 2), (1, 2, 3), (2, 2, 0)]
)
def test_random_numbers_do_not_depend_on_micro_batch_data_size_and_prefetch(
    make, micro, size, prefetch
):
    # What the model draws meanwhile changes nothing either.
    torch.rand(micro)
    expected = sorted(rows_of(make_loader(make()), 4))
    rows = []
    for rank in range(size):
        loader = make_loader(make(), micro=micro, data_rank=rank, data_size=size, prefetch=prefetch)
        for _ in range(4):
            rows += rows_of(loader)
            torch.rand(7)
            random.random()
    assert sorted(rows) == expected


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
@pytest.mark.parametrize("collate", [None, mix_samples])
def test_random_numbers_are_the_same_after_a_resume(make, collate):
    expected = rows_of(make_loader(make(), collate_fn=collate), 8)
    first = make_loader(make(), collate_fn=collate)
    rows = rows_of(first, 5)
    second = make_loader(make(), collate_fn=collate, state=first.state_dict(), seed=99)
    assert rows + rows_of(second, 3) == expected


def test_reading_does_not_change_the_generators_of_the_model():
    for data in (Augmented(), AugmentedStream()):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        expected = torch.rand(2).tolist(), np.random.rand(), random.random()
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        rows_of(make_loader(data, collate_fn=mix_samples), 3)
        assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected


class Watched(Augmented):
    def __init__(self):
        super().__init__()
        self.read = []

    def __getitem__(self, index):
        self.read.append(threading.current_thread().name)
        return super().__getitem__(index)


def test_only_a_deterministic_dataset_is_read_ahead():
    data = Watched()
    rows_of(make_loader(data, prefetch=4))
    time.sleep(0.05)
    assert len(data.read) == 4
    data.deterministic = True
    for workers in (0, 2):
        data.read.clear()
        loader = make_loader(data, prefetch=4, num_workers=workers)
        rows_of(loader)
        time.sleep(0.05)
        assert len(data.read) > 4
        assert all(name.startswith("data-") for name in data.read)
        loader.close()


def test_lists_and_tensors_are_read_ahead_but_compared():
    pairs = TensorDataset(torch.rand(8, 2), torch.rand(8))
    for data in (pairs, [*pairs], tuple(pairs)):
        loader = make_loader(data)
        assert loader._source.reads_ahead
        assert loader.is_compared
        assert not make_loader(data, collate_fn=mix_samples)._source.reads_ahead
    data = Augmented()
    assert make_loader(data).is_compared
    data.deterministic = True
    assert not make_loader(data).is_compared
    assert make_loader(data, collate_fn=mix_samples).is_compared

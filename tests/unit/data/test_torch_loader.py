"""A torch DataLoader as training data."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    Subset,
)

from pipemega.errors import ConfigError, DataError
from tests.unit.data.augmented_data import (
    Augmented,
    AugmentedStream,
    make_loader,
    mix_samples,
    rows_of,
)


def torch_loader(size=12, *, batch_size=2, data=None, **options):
    return DataLoader(Augmented(size) if data is None else data, batch_size, **options)


def sharded(rank, size, num_samples=12, **options):
    data = Augmented(num_samples)
    sampler = DistributedSampler(data, size, rank, seed=5)
    return torch_loader(data=data, sampler=sampler, **options)


def test_batches_are_taken_as_they_are_and_epochs_repeat():
    loader = make_loader(torch_loader())
    steps = [rows_of(loader) for _ in range(6)]
    assert [[int(row[0]) for row in step] for step in steps] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ] * 2  # fmt: skip
    # Other random numbers in each epoch.
    assert steps[0] != steps[3]
    assert (loader.epoch, loader.consumed_samples) == (1, 24)
    assert len(loader) == 6


SHUFFLED = {
    "shuffle": lambda: torch_loader(shuffle=True),
    "generator": lambda: torch_loader(
        shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "DistributedSampler": lambda: sharded(0, 1),
    "IterableDataset": lambda: torch_loader(data=AugmentedStream(), drop_last=True),
    "custom batch_sampler": lambda: DataLoader(
        Augmented(), batch_sampler=[[5, 1], [2, 3], [0, 4], [7, 6]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED)
def test_two_ranks_read_the_same_and_a_resumed_run_continues(make):
    torch.manual_seed(1)
    expected = rows_of(make_loader(make()), 8)
    torch.manual_seed(2)
    first = make_loader(make())
    rows = rows_of(first, 5)
    torch.rand(1)
    resumed = make_loader(make(), state=first.state_dict(), seed=99)
    assert rows + rows_of(resumed, 3) == expected
    assert resumed.state_dict()["consumed_samples"] == 32


def test_worker_processes_of_the_loader_draw_the_same_after_a_resume():
    def make():
        return make_loader(
            torch_loader(shuffle=True, num_workers=2, multiprocessing_context="fork"),
            state=state,
        )

    state = None
    first = make()
    expected = rows_of(first, 4)
    state = {**first.state_dict(), "consumed_samples": 8, "epoch": 0, "epoch_start": 0}
    resumed = make()
    assert rows_of(resumed, 2) == expected[8:]


def test_a_resume_with_another_data_size_continues_after_the_same_samples():
    whole = [int(row[0]) for row in rows_of(make_loader(sharded(0, 1)), 3)]
    one = make_loader(sharded(0, 1))
    rows_of(one)
    rows = []
    for rank in range(2):
        loader = make_loader(sharded(rank, 2), data_rank=rank, data_size=2, state=one.state_dict())
        rows += [int(row[0]) for row in rows_of(loader, 2)]
    assert sorted(rows) == sorted(whole[4:])
    half = make_loader(sharded(0, 1), batch=2)
    rows_of(half)
    loader = make_loader(sharded(0, 2), data_size=2, state=half.state_dict())
    with pytest.raises(DataError, match=r"sample 2 of epoch 0, is not between .* have 4 samples"):
        next(loader)


def test_an_error_names_the_micro_batch():
    loader = make_loader(torch_loader(data=Subset(Augmented(4), [0, 1, 2, 3, 9, None])))
    rows_of(loader)
    with pytest.raises(DataError, match="micro-batch 2 of DataLoader could not be read: TypeErr"):
        rows_of(loader)


def refused(match, loader, **share):
    with pytest.raises(ConfigError, match=match):
        make_loader(loader, **share)


def test_a_loader_of_other_sizes_is_refused():
    refused(
        r"has batch_size 3, and its batches are the micro-batches of "
        r"train_micro_batch_size_per_gpu 2: make them equal, or give the dataset itself",
        torch_loader(batch_size=3),
    )
    refused(
        r"last batch of an epoch of the DataLoader would have 1 samples instead of 2 .*drop_last",
        torch_loader(13),
    )
    refused("may be smaller instead of 2", torch_loader(data=AugmentedStream()))
    refused(
        r"data.num_workers is 2, but training_data is a DataLoader, .* num_workers \(0\): set dat",
        torch_loader(),
        num_workers=2,
    )
    refused("collate_fn is given too: give coll", torch_loader(), collate_fn=mix_samples)
    assert len(rows_of(make_loader(torch_loader(13, drop_last=True)), 3)) == 12


def test_a_loader_of_other_ranks_is_refused():
    refused(
        r"DistributedSampler of the DataLoader has rank 1 of num_replicas 2, but this is data rank "
        r"0 of 1; .*DistributedSampler\(dataset, num_replicas=mesh.data.size, rank=mesh.data.rank",
        sharded(1, 2),
    )
    for loader in (torch_loader(), torch_loader(shuffle=True)):
        refused(
            r"Sampler of the DataLoader gives all 2 data ranks the same samples: give initialize",
            loader,
            data_size=2,
        )
    sampler = DistributedSampler(Augmented(), 2, 0)
    made = DataLoader(Augmented(), batch_sampler=BatchSampler(sampler, 2, True))
    assert not make_loader(made, data_size=2).must_differ
    refused(
        "SequentialSampler of the DataLoader gives all 2",
        DataLoader(
            Augmented(), batch_sampler=BatchSampler(SequentialSampler(Augmented()), 2, True)
        ),
        data_size=2,
    )


def test_samplers_of_the_user_are_compared_over_data_ranks():
    made = DataLoader(Augmented(), batch_sampler=[[0, 1], [2, 3]])
    assert make_loader(made, data_size=2).must_differ
    assert not make_loader(made).must_differ


def test_an_empty_loader_is_an_error_and_other_data_is_refused_on_resume():
    with pytest.raises(DataError, match="the DataLoader yielded no micro-batch in epoch 0"):
        next(make_loader(DataLoader(Augmented(), batch_sampler=[])))
    state = make_loader(torch_loader()).state_dict()
    assert state["fingerprint"] == "DataLoader of Augmented of 12 samples"
    with pytest.raises(DataError, match="Augmented of 14 samples now, DataLoader of Augmented of"):
        make_loader(torch_loader(14), state=state)

"""Steps of which none has samples of two epochs: the last step of an epoch may be partial."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pipemega.data.loader import BatchLoader
from pipemega.data.sample_reader import Share
from pipemega.data.sample_sources import LoaderOptions
from pipemega.errors import ConfigError, DataError
from tests.sampling import some
from tests.unit.data.augmented_data import Augmented


class Rows(IterableDataset):
    """The pairs (i, -i), in order."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter([(i, -i) for i in range(self.size)])


def data_of(kind, size):
    return [(i, -i) for i in range(size)] if kind == "map-style" else Rows(size)


def loader_of(data, *, batch=8, micro=2, rank=0, size=1, **options):
    share = Share(batch, micro, rank, size)
    return BatchLoader(
        data, share, LoaderOptions(**{"by_epoch": True, "drop_last": False} | options)
    )


def read(loaders):
    """Read a step on all data ranks; return its samples, in order, and the steps of the ranks."""
    steps = [loader.read_step() for loader in loaders]
    samples = []
    for j in range(loaders[0].num_microbatches):
        for step in steps:
            inputs, labels = step.micro_batches[j]
            assert inputs.tolist() == (-labels).tolist()
            samples += inputs.tolist() if step.sizes[j] else []
            assert step.sizes[j] in (0, len(inputs))
    return samples, steps


@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_a_partial_step_is_read_as_the_docstring_draws_it(kind):
    loaders = [loader_of(data_of(kind, 5), rank=r, size=2, shuffle=False) for r in (0, 1)]
    samples, (first, second) = read(loaders)
    assert samples == [0, 1, 2, 3, 4]
    assert (first.sizes, second.sizes) == ([2, 1], [2, 0])
    # The micro-batch without samples repeats the first sample of the step.
    assert second.micro_batches[1][0].tolist() == [0, 0]
    assert (first.num_samples, first.epoch) == (second.num_samples, second.epoch) == (5, 1)


sizes_of_a_step = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@given(
    st.sampled_from(["map-style", "iterable"]), st.integers(1, 30), sizes_of_a_step, st.booleans()
)
def test_each_step_has_the_next_samples_of_one_epoch_on_every_mesh(kind, size, step, drop_last):
    micro, count, ranks = step
    batch = micro * count * ranks
    loaders = [
        loader_of(data_of(kind, size), batch=batch, micro=micro, rank=r, size=ranks,
                  shuffle=False, drop_last=drop_last)
        for r in range(ranks)
        if size >= batch or not drop_last
    ]  # fmt: skip
    if not loaders:
        return
    expected = [[*range(start, min(start + batch, size))] for start in range(0, size, batch)]
    if drop_last and len(expected[-1]) < batch:
        expected.pop()
    if kind == "map-style":
        assert loaders[0].steps_per_epoch == len(expected)
        other = loader_of(data_of(kind, size), batch=batch, micro=micro, size=ranks,
                          shuffle=False, drop_last=drop_last)  # fmt: skip
    consumed = 0
    for epoch in range(2):
        for number, wanted in enumerate(expected):
            samples, steps = read(loaders)
            consumed += len(wanted)
            assert samples == wanted
            ends = number == len(expected) - 1
            for step in steps:
                assert (step.num_samples, step.epoch) == (len(wanted), epoch + ends)
            assert all(loader.consumed_samples == consumed for loader in loaders)
            if kind == "map-style":
                skipped = other.skip_step()
                assert (skipped.sizes, skipped.epoch) == (steps[0].sizes, steps[0].epoch)
                assert other.state_dict() == loaders[0].state_dict()
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["map-style", "iterable", "DataLoader"])
def test_a_run_resumes_after_any_step_with_another_micro_batch_size(kind, drop_last):
    def loader(micro):
        data = data_of(kind, 13)
        if kind == "DataLoader":
            data = DataLoader(data_of("map-style", 13), micro, drop_last=drop_last)
        return loader_of(data, batch=4, micro=micro, drop_last=drop_last)

    whole = loader(2)
    steps = [read([whole]) for _ in range(8)]
    for done in range(8):
        first = loader(2)
        for _ in range(done):
            first.read_step()
        resumed = loader(4)
        resumed.load_state_dict(first.state_dict())
        for samples, (step,) in steps[done:]:
            again, (other,) = read([resumed])
            assert again == samples
            assert (other.num_samples, other.epoch) == (step.num_samples, step.epoch)


def test_each_epoch_has_another_order_and_all_samples():
    loader = loader_of(data_of("map-style", 13))
    epochs = [read([loader])[0] + read([loader])[0] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(13))


@pytest.mark.parametrize("reader", some(["threads", "processes"], 0))
def test_threads_and_worker_processes_read_partial_steps_too(reader):
    threads = reader == "threads"
    data, workers = (data_of("map-style", 5), 2) if threads else (Augmented(5), 1)
    loader = loader_of(data, shuffle=False, num_workers=workers)
    for _ in range(2):
        step = loader.read_step()
        found = [inputs.view(len(inputs), -1)[:, 0].tolist() for inputs, _ in step.micro_batches]
        assert found == [[0, 1], [2, 3], [4], [0, 0]]
        assert step.sizes == [2, 2, 1, 0]
    loader.close()


def test_dropped_samples_are_not_counted_and_each_epoch_drops_others():
    loader = loader_of(data_of("map-style", 13), batch=4, drop_last=True)
    epochs = [[n for _ in range(3) for n in read([loader])[0]] for _ in range(2)]
    assert (loader.consumed_samples, loader.epoch) == (24, 2)
    assert set(epochs[0]) != set(epochs[1])
    assert all(len(set(epoch)) == 12 for epoch in epochs)


@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_an_epoch_that_is_dropped_as_a_whole_is_an_error(kind):
    message = (
        r"epoch 0 of \w+ has 5 samples, fewer than train_batch_size \(8\), and "
        "dataloader_drop_last drops them: set it to false"
    )
    with pytest.raises(DataError, match=message):
        loader_of(data_of(kind, 5), drop_last=True).read_step()


def test_data_without_repeat_ends_after_the_partial_step():
    for kind in ("map-style", "iterable"):
        loader = loader_of(data_of(kind, 5), repeat=False, drop_last=False, shuffle=False)
        assert read([loader])[0] == [0, 1, 2, 3, 4]
        with pytest.raises(StopIteration):
            loader.read_step()


def test_a_loader_changes_to_epochs_at_its_position():
    options = LoaderOptions(shuffle=False, drop_last=False)
    loader = BatchLoader(data_of("map-style", 13), Share(8, 2), options)
    loader.read_step()
    loader.end_steps_with_epochs()
    assert read([loader])[0] == [8, 9, 10, 11, 12]
    assert loader.epoch == 1
    # Back to a stream without epochs, as an older run: the order continues.
    stream = BatchLoader(data_of("map-style", 13), Share(8, 2), LoaderOptions(shuffle=False))
    stream.load_state_dict(loader.state_dict())
    assert [n for inputs, _ in stream.next_step() for n in inputs.tolist()] == [*range(8)]


# DataLoaders


def batches_of(loader):
    step = loader.read_step()
    return [inputs.tolist() for inputs, _ in step.micro_batches], step


def test_the_epoch_of_a_dataloader_ends_with_its_smaller_batch():
    loader = loader_of(DataLoader(data_of("map-style", 11), 2))
    assert loader.steps_per_epoch == 2
    assert batches_of(loader)[0] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    batches, step = batches_of(loader)
    # The last micro-batch has no samples, and repeats the first one.
    assert batches == [[8, 9], [10], [8, 9], [8, 9]]
    assert (step.sizes, step.num_samples, step.epoch) == ([2, 1, 0, 0], 3, 1)
    assert batches_of(loader)[0][0] == [0, 1]
    dropping = loader_of(DataLoader(data_of("map-style", 11), 2), drop_last=True)
    assert [batches_of(dropping)[1].epoch for _ in range(2)] == [1, 2]


def test_the_samples_of_a_sharded_dataloader_count_for_all_data_ranks():
    data = data_of("map-style", 11)  # the sampler adds one to make 12
    loaders = [
        loader_of(DataLoader(data, 2, sampler=DistributedSampler(data, 2, r)), rank=r, size=2)
        for r in (0, 1)
    ]
    found = [[loader.read_step() for _ in range(2)] for loader in loaders]
    for steps in found:
        assert [step.sizes for step in steps] == [[2, 2], [2, 0]]
        assert [step.num_samples for step in steps] == [8, 4]


def test_the_length_of_some_dataloaders_is_not_known():
    assert loader_of(DataLoader(Rows(11), 2)).steps_per_epoch is None
    batches = [[0, 1], [2, 3], [4, 5]]
    custom = loader_of(DataLoader(data_of("map-style", 6), batch_sampler=batches), batch=4)
    assert custom.steps_per_epoch == 2
    assert [batches_of(custom)[1].sizes for _ in range(2)] == [[2, 2], [2, 0]]


def test_a_smaller_batch_within_an_epoch_is_an_error():
    class Uneven:
        def __call__(self, samples):
            numbers = torch.tensor([pair[0] for pair in samples])
            return (numbers[:1], -numbers[:1]) if 2 in numbers else (numbers, -numbers)

    loader = loader_of(DataLoader(data_of("map-style", 11), 2, collate_fn=Uneven()))
    message = (
        r"a batch of the DataLoader in epoch 0 has 1 samples instead of 2 "
        r"\(train_micro_batch_size_per_gpu\), and is not the last one of the epoch: set drop_last"
    )
    with pytest.raises(DataError, match=message):
        loader.read_step()


def test_without_epochs_a_smaller_batch_is_refused_with_both_ways_out():
    with pytest.raises(ConfigError, match=r"set drop_last=True; or set training.epochs: then the"):
        BatchLoader(DataLoader(data_of("map-style", 11), 2), Share(8, 2))


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 3), (True, 4)])
def test_an_iterable_is_read_one_sample_ahead_of_a_step_or_a_step_if_samples_are_dropped(
    drop_last, expected
):
    read = []

    def items():
        for number in range(6):
            read.append(number)
            yield number, -number

    loader = loader_of(items(), batch=2, drop_last=drop_last)
    assert loader._source.reads_ahead is False
    loader.read_step()
    assert read == [*range(expected)]
    loader.close()

"""The loader: whose sample comes when, resuming, the thread, and how data ends."""

import subprocess
import sys
import threading
import time
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from pipemega.data.loader import BatchLoader
from pipemega.data.sample_reader import EpochOrder, Share, stack_samples
from pipemega.data.sample_sources import LoaderOptions
from pipemega.errors import ConfigError, DataError
from tests.sampling import some


class Numbers(Dataset):
    """Sample i is (i, -i)."""

    deterministic = True

    def __init__(self, size, name="numbers"):
        self.size = size
        self.fingerprint = f"{name} {size}"

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor([index]), torch.tensor([-index])


class Stream(IterableDataset):
    """The same, to be read in order; with a length, as torch allows."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return ((torch.tensor([i]), torch.tensor([-i])) for i in range(self.size))


def make_loader(
    dataset,
    *,
    train_batch_size,
    micro_batch_size,
    data_rank=0,
    data_size=1,
    consumed_samples=0,
    collate_fn=None,
    **options,
):
    share = Share(train_batch_size, micro_batch_size, data_rank, data_size)
    return BatchLoader(
        dataset,
        share,
        LoaderOptions(**options),
        collate_fn=collate_fn,
        consumed_samples=consumed_samples,
    )


def flat(lists):
    return list(chain.from_iterable(lists))


def numbers_of(batch):
    inputs, labels = batch
    assert inputs.tolist() == (-labels).tolist()
    return inputs.flatten().tolist()


def steps_of(dataset, count, *, batch=8, micro=2, size=1, loaders=None, **options):
    """`count` steps, each the samples of all ranks in the order of the stream."""
    loaders = loaders or [
        make_loader(
            dataset,
            train_batch_size=batch,
            micro_batch_size=micro,
            data_rank=rank,
            data_size=size,
            **options,
        )
        for rank in range(size)
    ]
    steps = []
    for _ in range(count):
        by_rank = [loader.next_step() for loader in loaders]
        steps.append(
            [n for slices in zip(*by_rank, strict=True) for b in slices for n in numbers_of(b)]
        )
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    for loader in loaders:
        loader.close()
    return steps, states[0]


def test_ranks_get_the_micro_batches_of_the_docstring():
    share = [Share(8, 2, rank, 2) for rank in range(2)]
    assert [[part.own for part in each.parts(8)] for each in share] == [
        [range(2), range(4, 6)], [range(2, 4), range(6, 8)],
    ]  # fmt: skip
    assert [(part.begin, part.end) for part in share[0].parts(5)] == [(0, 4), (4, 5)]
    assert [[len(part.own) for part in each.parts(5)] for each in share] == [[2, 1], [2, 0]]
    assert [rank for offset in range(8) for rank in (0, 1) if share[rank].owns(offset)] == [
        0, 0, 1, 1, 0, 0, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize(
    ("micro", "size", "prefetch"), [(8, 1, 2), (1, 4, 0), (2, 2, 5), (1, 8, 1), (4, 2, 2)]
)
def test_the_samples_of_a_step_do_not_depend_on_micro_batch_and_data_size(
    make, micro, size, prefetch
):
    expected, state = steps_of(make(13), 5)
    got = steps_of(make(13), 5, micro=micro, size=size, prefetch=prefetch)
    assert got == (expected, state)


def test_the_samples_do_not_depend_on_the_number_of_workers():
    expected = steps_of(Numbers(13), 6)
    for workers in (1, 3):
        assert steps_of(Numbers(13), 6, num_workers=workers) == expected
        assert steps_of(Numbers(13), 6, num_workers=workers, prefetch=0) == expected


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resuming_three_times_within_an_epoch_repeats_and_skips_no_sample(make, prefetch):
    expected, _ = steps_of(make(61), 16, batch=4)
    got, state = [], None
    # Another mesh, another micro-batch, another number of workers at every start.
    for count, micro, size in ((3, 1, 2), (4, 4, 1), (5, 2, 2), (4, 2, 1)):
        loaders = [
            make_loader(
                make(61), train_batch_size=4, micro_batch_size=micro, data_rank=rank,
                data_size=size, prefetch=prefetch, seed=1234 if state is None else 99,
            )
            for rank in range(size)
        ]  # fmt: skip
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        steps, state = steps_of(None, count, loaders=loaders)
        got += steps
    assert got == expected
    assert state["consumed_samples"] == 64
    assert state["epoch"] == 1


def test_the_position_counts_delivered_not_prefetched_samples():
    loader = make_loader(Numbers(50), train_batch_size=8, micro_batch_size=2, prefetch=10)
    next(loader)
    time.sleep(0.05)
    assert loader.consumed_samples == 2
    loader.next_step()
    assert loader.consumed_samples == 10
    first = make_loader(Numbers(50), train_batch_size=8, micro_batch_size=2)
    first.load_state_dict(loader.state_dict())
    assert numbers_of(next(first)) == numbers_of(next(loader))
    first.close()
    loader.close()


def test_a_closed_loader_continues_at_its_position():
    # Tests of datasets that hang leave theirs behind.
    before = set(threading.enumerate())
    expected, _ = steps_of(Numbers(50), 4)
    loader = make_loader(Numbers(50), train_batch_size=8, micro_batch_size=2)
    got = []
    for _ in range(4):
        got.append([n for batch in loader.next_step() for n in numbers_of(batch)])
        loader.close()
    assert got == expected
    started = set(threading.enumerate()) - before
    assert not [t for t in started if t.name == "data-prefetch" and t.is_alive()]


def test_a_batch_size_may_change_on_resume():
    expected, _ = steps_of(Numbers(30), 6, batch=4)
    steps, state = steps_of(Numbers(30), 2, batch=4)
    loader = make_loader(Numbers(30), train_batch_size=8, micro_batch_size=4)
    loader.load_state_dict(state)
    more, _ = steps_of(None, 2, loaders=[loader])
    assert flat(steps + more) == flat(expected)


def test_every_epoch_has_another_permutation_of_all_samples():
    steps, state = steps_of(Numbers(12), 6, batch=4)
    epochs = [flat(steps[:3]), flat(steps[3:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    assert (state["epoch"], state["epoch_start"]) == (2, 24)
    assert steps_of(Numbers(12), 6, batch=4, seed=1)[0] != steps


def test_the_permutation_is_that_of_numpys_random_state():
    # Written down, so that a change of the stream is noticed: it would break every resumed run.
    def samples(start, stop):
        return [key.sample for key in EpochOrder(8, 1234, True).keys(start, stop)]

    assert samples(6, 12) == [
        *np.random.RandomState([1234, 0]).permutation(8)[6:],
        *np.random.RandomState([1234, 1]).permutation(8)[:4],
    ]
    assert samples(0, 8) == PERMUTATION


PERMUTATION = [4, 5, 3, 1, 2, 0, 6, 7]


def test_a_dataset_that_is_already_shuffled_is_read_in_order():
    data = Numbers(10)
    data.already_shuffled = True
    assert steps_of(data, 1)[0] == [list(range(8))]
    assert steps_of(Numbers(10), 1, shuffle=False)[0] == [list(range(8))]


def test_a_list_of_pairs_is_a_dataset():
    pairs = [(torch.tensor([i]), torch.tensor([-i])) for i in range(5)]
    assert steps_of(pairs, 2, batch=4, shuffle=False)[0] == [[0, 1, 2, 3], [4, 0, 1, 2]]


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_repeat_data_ends_after_the_last_whole_step(make, prefetch):
    loader = make_loader(
        make(11), train_batch_size=4, micro_batch_size=2, repeat=False, prefetch=prefetch
    )
    assert len(list(loader)) == 4
    with pytest.raises(StopIteration):
        loader.next_step()
    assert loader.consumed_samples == 8
    loader.close()


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_that_ends_within_a_batch_reports_the_samples_left(make, prefetch):
    loader = make_loader(
        make(11), train_batch_size=4, micro_batch_size=1, data_size=2, repeat=False,
        drop_last=False, prefetch=prefetch,
    )  # fmt: skip
    loader.next_step()
    loader.next_step()
    for _ in range(2):
        with pytest.raises(DataError, match=r"ended within a batch: .*needs 4 samples .* 3 were"):
            loader.next_step()
    loader.close()


def test_a_step_after_single_micro_batches_reports_the_end_of_the_data():
    loader = make_loader(Numbers(8), train_batch_size=4, micro_batch_size=1, repeat=False)
    next(loader)
    loader.next_step()
    with pytest.raises(DataError, match=r"ended within a batch: .*needs 4 samples .* 3 were"):
        loader.next_step()
    loader.close()


def test_an_iterable_repeats_and_a_generator_ends():
    assert steps_of(Stream(6), 3, batch=4)[0] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    once = ((torch.tensor([i]), torch.tensor([-i])) for i in range(9))
    loader = make_loader(once, train_batch_size=4, micro_batch_size=4)
    assert [numbers_of(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_peek_does_not_consume_the_micro_batch(prefetch):
    once = ((torch.tensor([i]), torch.tensor([-i])) for i in range(8))
    loader = make_loader(once, train_batch_size=4, micro_batch_size=2, prefetch=prefetch)
    assert numbers_of(loader.peek()) == numbers_of(loader.peek()) == [0, 1]
    assert loader.consumed_samples == 0
    assert [numbers_of(batch) for batch in loader.next_step()] == [[0, 1], [2, 3]]
    assert numbers_of(loader.peek()) == [4, 5]
    assert loader.consumed_samples == 4
    loader.close()


def test_a_started_generator_cannot_be_read_from_another_position():
    once = ((torch.tensor([i]), torch.tensor([-i])) for i in range(9))
    loader = make_loader(once, train_batch_size=4, micro_batch_size=4)
    state = loader.state_dict()
    next(loader)
    loader.load_state_dict(state)
    with pytest.raises(DataError, match="generator can be read only once, and the loader was clo"):
        next(loader)


def test_an_empty_iterable_is_an_error():
    loader = make_loader(Stream(0), train_batch_size=4, micro_batch_size=4)
    with pytest.raises(DataError, match="Stream yielded no sample in epoch 0"):
        next(loader)


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("the disk is on fire")
        return super().__getitem__(index)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 2}])
def test_an_error_of_the_dataset_reaches_the_consumer_with_its_cause(options):
    loader = make_loader(
        Broken(16), train_batch_size=4, micro_batch_size=2, shuffle=False, **options
    )
    loader.next_step()
    for _ in range(2):  # asked again, it does not skip the sample
        with pytest.raises(
            DataError, match="sample 5 of Broken could not be read: OSError: the disk is on fire"
        ) as caught:
            loader.next_step()
        assert isinstance(caught.value.__cause__, OSError)
    assert loader.consumed_samples == 4
    loader.close()


def test_an_error_of_an_iterable_reaches_the_consumer_with_its_cause():
    def generate():
        yield torch.tensor([0]), torch.tensor([0])
        raise KeyError("lost")

    loader = make_loader(generate(), train_batch_size=2, micro_batch_size=2)
    with pytest.raises(DataError, match="sample 1 of generator could not be read: KeyError"):
        next(loader)


def test_a_timeout_names_the_sample():
    release = threading.Event()

    class Slow(Numbers):
        def __getitem__(self, index):
            if index == 2:
                release.wait(10)
            return super().__getitem__(index)

    loader = make_loader(
        Slow(8), train_batch_size=2, micro_batch_size=2, shuffle=False, timeout_seconds=0.1
    )
    next(loader)
    threading.Timer(0.3, release.set).start()
    with pytest.raises(DataError, match=r"no data came within 0.1 s: sample 2 of Slow is being re"):
        next(loader)
    loader.close()


class Stuck(Numbers):
    """Two workers read it: one sticks at sample 1, the other goes on."""

    def __init__(self, size):
        super().__init__(size)
        self.release = threading.Event()

    def __getitem__(self, index):
        if index == 1:
            self.release.wait(10)
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_timeout_names_the_sample_of_the_blocked_worker(prefetch):
    data = Stuck(64)
    loader = make_loader(
        data, train_batch_size=1, micro_batch_size=1, shuffle=False,
        prefetch=prefetch, num_workers=2, timeout_seconds=0.2,
    )  # fmt: skip
    next(loader)
    started = time.monotonic()
    with pytest.raises(DataError, match=r"no data came within 0.2 s: sample 1 of Stuck is being"):
        next(loader)
    # The other ranks wait for this news: it does not wait for the thread.
    assert time.monotonic() - started < 2.0
    data.release.set()
    loader.close()


def leave(samples):
    raise SystemExit(0)


def test_sys_exit_in_a_dataset_or_a_collate_function_is_an_error():
    class Leaving(Numbers):
        def __getitem__(self, index):
            raise SystemExit(0)

    ahead = {"prefetch": 0}, {"prefetch": 2}
    cases = [(Leaving(8), None, options) for options in (*ahead, {"num_workers": 2})]
    cases += [(data(8), leave, options) for data in (Numbers, Stream) for options in ahead]
    for data, collate, options in cases:
        loader = make_loader(
            data, train_batch_size=2, micro_batch_size=2, collate_fn=collate, **options
        )
        with pytest.raises(DataError, match=r"of \w+ could not be read: SystemExit: 0"):
            next(loader)
        loader.close()


STUCK_WORKER = """
import threading, time
from pipemega.data.read_ahead import Prefetcher

begun = threading.Event()

def read(number):
    if number == 1:
        begun.set()
        time.sleep(600)
    return number

prefetcher = Prefetcher((number for number in range(4)), read, 4, str, 5, num_threads=2)
assert prefetcher.get() == 0
assert begun.wait(5)
prefetcher.close(1)
"""


@pytest.mark.sweep
def test_a_blocked_worker_does_not_prevent_exit():
    done = subprocess.run([sys.executable, "-c", STUCK_WORKER], timeout=60)
    assert done.returncode == 0


READING_AHEAD = """
import sys
import torch
from pipemega.data.loader import BatchLoader
from pipemega.data.sample_reader import Share
from pipemega.data.sample_sources import LoaderOptions

class Slow:
    deterministic = True

    def __len__(self):
        return 8

    def __getitem__(self, index):
        for _ in range(30):
            torch.randn(100_000).sort()
        return torch.zeros(1), torch.zeros(1)

loader = BatchLoader(Slow(), Share(2, 1), LoaderOptions(num_workers=int(sys.argv[1])))
loader.next_step()
"""


@pytest.mark.parametrize("num_workers", some([0, 2], 1))
def test_a_process_that_ends_while_samples_are_read_ahead_exits_normally(num_workers):
    """The thread returned from torch during the teardown of Python: exit code -6, after a run that
    had succeeded.
    """
    command = [sys.executable, "-c", READING_AHEAD, str(num_workers)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_at_most_prefetch_micro_batches_are_read_ahead():
    read = []

    class Watched(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    loader = make_loader(
        Watched(100), train_batch_size=2, micro_batch_size=2, shuffle=False, prefetch=2
    )
    next(loader)
    time.sleep(0.1)
    # One delivered, two waiting.
    assert len(read) == 6
    loader.close()


@pytest.mark.parametrize(
    ("batch", "micro", "rank", "size", "message"),
    [
        (15, 2, 0, 2, r"train_batch_size \(15\) must be .* \(2 \* 2 = 4\); .* are 12 and 16"),
        (3, 2, 0, 2, r"the nearest that fit are 4$"),
        (0, 2, 0, 2, r"must be at least 1"),
        (8, 2, 2, 2, r"data_rank \(2\) must be .* below data_size \(2\)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(batch, micro, rank, size, message):
    with pytest.raises(ConfigError, match=message):
        make_loader(
            Numbers(9), train_batch_size=batch, micro_batch_size=micro, data_rank=rank,
            data_size=size,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Numbers(0), {}, "Numbers has no samples"),
        (3, {}, "int is not a dataset: it has neither __getitem__ and __len__ nor __iter__"),
        (Stream(5), {"num_workers": 2}, "data.num_workers is 2, but Stream is an iterable"),
    ],
)
def test_an_object_that_is_not_a_dataset_is_refused(dataset, options, message):
    with pytest.raises((DataError, ConfigError), match=message):
        make_loader(dataset, train_batch_size=2, micro_batch_size=2, **options)


def test_other_data_is_refused_on_resume_unless_allowed():
    state = steps_of(Numbers(30), 2)[1]
    loader = make_loader(Numbers(30, "others"), train_batch_size=8, micro_batch_size=2)
    with pytest.raises(
        DataError,
        match=r"others 30 now, numbers 30 in .* sample 16 would be a different .*same_data",
    ):
        loader.load_state_dict(state)
    loader.load_state_dict(state, same_data=False)
    assert loader.consumed_samples == 16
    with pytest.raises(DataError, match="the saved data position lacks epoch, epoch_sta"):
        loader.load_state_dict({"consumed_samples": 1})


def test_without_a_fingerprint_class_and_length_identify_a_dataset():
    pairs = [(1, 2)] * 4
    loader = make_loader(pairs, train_batch_size=2, micro_batch_size=2)
    assert loader.fingerprint == "list of 4 samples"
    assert len(loader) == 2
    generator = (pair for pair in pairs)
    loader = make_loader(generator, train_batch_size=2, micro_batch_size=2)
    assert loader.fingerprint == "generator"
    with pytest.raises(TypeError, match="generator is an iterable dataset"):
        len(loader)


def test_any_pytree_is_stacked_and_keeps_its_structure():
    samples = [((torch.ones(3) * i, np.full(2, i)), {"class": i, "size": 0.5 * i}) for i in (1, 2)]
    (ones, twos), labels = stack_samples(samples)
    assert ones.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert twos.tolist() == [[1, 1], [2, 2]]
    assert labels["class"].tolist() == [1, 2]
    assert labels["size"].dtype == torch.float64
    assert isinstance(stack_samples(samples), tuple)
    assert isinstance(stack_samples(samples)[0], tuple)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(torch.ones(2), 1), (torch.ones(3), 1)], r"samples 0, 1 of list cannot be collated"),
        ([(1, 2), (1, 2, 3)], r"samples 0, 1 of list cannot .*: tuples of \[2, 3\] members"),
        ([1, 2], r"list must return \(inputs, labels\) pairs, but samples 0, 1 give Tensor"),
        ([(1, 2, 3)] * 2, r"must return \(inputs, labels\) pairs, but samples 0, 1 give 3 members"),
    ],
)
def test_samples_that_are_not_pairs_are_refused(samples, message):
    loader = make_loader(samples, train_batch_size=2, micro_batch_size=2, shuffle=False)
    with pytest.raises(DataError, match=message):
        next(loader)


def test_a_collate_function_may_make_pairs_of_anything():
    def collate(samples):
        return torch.stack([s["x"] for s in samples]), [s["y"] for s in samples]

    data = [{"x": torch.ones(1), "y": "one"}, {"x": torch.zeros(1), "y": "zero"}]
    loader = make_loader(
        data, train_batch_size=2, micro_batch_size=2, shuffle=False, collate_fn=collate
    )
    inputs, labels = next(loader)
    assert inputs.tolist() == [[1], [0]]
    assert labels == ["one", "zero"]
    loader.close()


def test_epochs_follow_each_other_without_a_gap():
    steps, _ = steps_of(Numbers(10), 5, batch=4, shuffle=False)
    assert all((b - a) % 10 == 1 for a, b in pairwise(flat(steps)))

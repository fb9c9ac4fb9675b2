"""`data.dataloader_type: "cyclic"`: the order of Megatron's random sampler."""

from contextlib import closing

import numpy as np
import pytest
import torch

from pipemega.config import load
from pipemega.data.loader import BatchLoader
from pipemega.data.sample_reader import Cyclic, CyclicOrder, Share
from pipemega.data.sample_sources import LoaderOptions
from pipemega.distributed.mesh import Mesh
from pipemega.engine.run.training_data import training_loader
from pipemega.errors import ConfigError, DataError
from tests.unit.data.test_loader import Numbers, Stream, flat, make_loader, steps_of

# What MegatronPretrainingRandomSampler of Megatron-LM (August 2026) yields for 14 samples,
# micro-batches of 2 and 2 data ranks from sample 8 on: the end of epoch 0, and epoch 1.
MEGATRON = {
    True: [[[1, 4], [1, 5], [2, 0], [3, 4]], [[7, 10], [7, 11], [8, 6], [9, 10]]],
    False: [[[1, 5], [7, 2], [0, 9], [13, 1]], [[12, 13], [10, 3], [6, 12], [11, 5]]],
}


def cyclic(size=14, micro=2, data=2, sharding=True):
    return Cyclic(size, micro, data, sharding)


@pytest.mark.parametrize("sharding", [True, False])
def test_the_micro_batches_of_each_data_rank_equal_megatrons(sharding):
    for rank in range(2):
        loader = make_loader(
            Numbers(14), train_batch_size=4, micro_batch_size=2, data_rank=rank, data_size=2,
            consumed_samples=8, cyclic=cyclic(sharding=sharding), seed=5,
        )  # fmt: skip
        got = [next(loader)[0].flatten().tolist() for _ in range(4)]
        assert got == MEGATRON[sharding][rank]
        loader.close()


@pytest.mark.parametrize("sharding", [True, False])
def test_an_epoch_has_each_sample_of_whole_micro_batches_once(sharding):
    order = CyclicOrder(cyclic(29, 3, 4, sharding))
    assert order.num_samples == 24
    epochs = [[key.sample for key in order.keys(epoch * 24, epoch * 24 + 24)] for epoch in range(3)]
    for found in epochs:
        assert len(set(found)) == 24
        assert max(found) < 29
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("sharding", [True, False])
def test_a_run_continues_the_order_on_another_mesh(sharding):
    settings = {"cyclic": cyclic(45, 1, 4, sharding)}
    expected, _ = steps_of(Numbers(45), 16, batch=4, micro=1, size=4, **settings)
    got, state = steps_of(Numbers(45), 5, batch=4, micro=1, size=4, **settings)
    for count, micro, size in ((5, 4, 1), (6, 1, 2)):
        loaders = [
            make_loader(
                Numbers(45), train_batch_size=4, micro_batch_size=micro, data_rank=rank,
                data_size=size, cyclic=cyclic(45, micro, size, sharding), seed=99,
            )
            for rank in range(size)
        ]  # fmt: skip
        for loader in loaders:
            loader.load_state_dict(state)
        steps, state = steps_of(None, count, loaders=loaders)
        got += steps
    assert got == expected
    # 16 steps of 4 samples, in epochs of 44.
    assert (state["consumed_samples"], state["epoch"], state["epoch_start"]) == (64, 1, 44)
    assert state["cyclic"] == {
        "dataset_size": 45, "micro_batch_size": 1, "data_size": 4, "data_sharding": sharding,
    }  # fmt: skip


def test_steps_end_with_epochs_of_the_cyclic_order():
    share = Share(8, 2, 0, 1)
    options = LoaderOptions(cyclic=cyclic(21, 2, 1), by_epoch=True, drop_last=False)
    loader = BatchLoader(Numbers(21), share, options)
    assert loader.steps_per_epoch == 3
    steps = [loader.read_step() for _ in range(4)]
    assert [(step.num_samples, step.epoch) for step in steps] == [(8, 0), (8, 0), (4, 1), (8, 1)]
    loader.close()


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (None, r"data.dataloader_type is None, and was 'cyclic' in the checkpoint"),
        (cyclic(45, 2, 1, False), r"data.data_sharding is False, and was True in the checkpoint"),
        (cyclic(44, 2, 1), r"number of samples is 44, and was 45 .* load with same_data=False"),
    ],
)
def test_another_order_than_the_checkpoints_is_refused_unless_allowed(now, message):
    _, state = steps_of(Numbers(45), 2, cyclic=cyclic(45, 2, 1))
    data = Numbers(45)
    loader = make_loader(data, train_batch_size=8, micro_batch_size=2, cyclic=now)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict(state)
    loader.load_state_dict(state, same_data=False)
    assert loader.consumed_samples == 16
    assert len(flat(steps_of(None, 1, loaders=[loader])[0])) == 8


def test_a_cyclic_run_does_not_continue_an_order_that_is_not():
    _, state = steps_of(Numbers(45), 2)
    loader = make_loader(
        Numbers(45), train_batch_size=8, micro_batch_size=2, cyclic=cyclic(45, 2, 1)
    )
    with pytest.raises(DataError, match=r"dataloader_type is 'cyclic', and was None in the check"):
        loader.load_state_dict(state)


def test_data_without_a_micro_batch_for_each_rank_is_refused():
    with pytest.raises(
        DataError, match=r"has 7 samples, and an epoch of .* each data rank: 2 \* 4 = 8"
    ):
        CyclicOrder(cyclic(7, 2, 4))


def loader_of(data, **keys):
    config = load(
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "seed": 3, "data": keys}
    )
    return training_loader(config, Mesh.single(), data, None, None)


def test_the_key_selects_the_order_of_the_training_data():
    with closing(loader_of(Numbers(14), dataloader_type="cyclic")) as loader:
        expected = torch.randperm(14, generator=torch.Generator().manual_seed(0))[:4]
        assert (
            flat(batch[0].flatten().tolist() for batch in loader.next_step()) == expected.tolist()
        )
    with closing(loader_of(Numbers(14), dataloader_type="single")) as loader:
        assert flat(batch[0].flatten().tolist() for batch in loader.next_step()) == [0, 1, 2, 3]
    with closing(loader_of(Numbers(14))) as loader:
        permutation = np.random.RandomState([3, 0]).permutation(14)[:4]
        found = flat(batch[0].flatten().tolist() for batch in loader.next_step())
        assert found == permutation.tolist()


def test_an_iterable_has_no_cyclic_order():
    with pytest.raises(
        ConfigError, match=r"'cyclic', which needs a dataset with len\(\) and \[i\]"
    ):
        loader_of(Stream(14), dataloader_type="cyclic")

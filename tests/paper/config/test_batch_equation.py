"""The batch equation, solved for the sizes that are missing."""

import itertools

import pytest

from pipemega.config import load
from pipemega.config.batch import nearest_divisors, solve
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import MODEL

SIZES = [None, 1, 2, 3, 4, 5, 6, 8, 12]


def by_hand(train, micro, steps, data):
    """DeepSpeed's rules, by trying all combinations."""
    if train is None and micro is None:
        return None
    if steps is None and (train is None or micro is None):
        steps = 1
    solutions = [
        (a * b * data, a, b)
        for a in ([micro] if micro else range(1, 13))
        for b in ([steps] if steps else range(1, 13))
        if train in (None, a * b * data)
    ]
    return solutions[0] if len(solutions) == 1 else None


@pytest.mark.parametrize("data", [1, 2, 3, 4])
def test_small_batches_are_solved_or_refused_as_by_exhaustive_search(data):
    for train, micro, steps in itertools.product(SIZES, SIZES, SIZES):
        expected = by_hand(train, micro, steps, data)
        if expected is None:
            with pytest.raises(ConfigError):
                solve(train, micro, steps, data)
        else:
            assert solve(train, micro, steps, data) == expected


def keys(train=None, micro=None, steps=None, **rest):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return dict(zip(names, (train, micro, steps), strict=True)) | rest


def test_the_equation_is_printed_with_the_names_of_its_factors():
    batch = load(keys(512, 2, mesh={"tensor": 2, "pipeline": 4})).batch(8)
    assert batch.equation == (
        "train_batch_size 512 = 2 (micro) x 32 (gas) x 8 (data); "
        "world 64 = data 8 x tensor 2 x pipeline 4"
    )
    assert (batch.train_batch_size, batch.micro_batch_size, batch.num_microbatches) == (512, 2, 32)
    assert batch.warnings == ()


@pytest.mark.parametrize(
    ("sizes", "data", "message"),
    [
        (
            (15, 2, None), 2,
            "train_batch_size (15) must be a multiple of train_micro_batch_size_per_gpu * "
            "mesh.data (2 * 2 = 4); the nearest that fit are 12 and 16",
        ),
        (
            (12, 4, None), 2,
            "the nearest that fit are 8 and 16; or train_micro_batch_size_per_gpu 3 or 6",
        ),
        (
            (2, None, 4), 1,
            "train_batch_size (2) must be a multiple of gradient_accumulation_steps * mesh.data "
            "(4 * 1 = 4); the nearest that fits is 4; or gradient_accumulation_steps 2",
        ),
        (
            (10, None, None), 4,
            "train_batch_size (10) must be a multiple of mesh.data (4); "
            "the nearest that fit are 8 and 12",
        ),
        (
            (256, 4, 8), 1,
            "train_batch_size (256) must be train_micro_batch_size_per_gpu * "
            "gradient_accumulation_steps * mesh.data (4 * 8 * 1 = 32); set "
            "train_batch_size 32, or train_micro_batch_size_per_gpu 32, or "
            "gradient_accumulation_steps 64, or 8 data ranks, which is 8 ranks in total (now 1; "
            "check torchrun --nproc_per_node)",
        ),
        ((7, 4, 8), 2, "(4 * 8 * 2 = 64); set train_batch_size 64"),
        ((None, None, 4), 1, "not set (gradient_accumulation_steps alone is not enough): set"),
        ((None, None, None), 1, "the batch size is not set: set train_batch_size or train_micro"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(sizes, data, message):
    with pytest.raises(ConfigError) as refusal:
        load(keys(*sizes, mesh={"data": data}))
    assert message in str(refusal.value)


def test_the_message_about_missing_ranks_counts_the_whole_mesh():
    config = load(keys(256, 4, 8, mesh={"tensor": 2, "pipeline": 2}))
    with pytest.raises(ConfigError, match=r"8 data ranks, which is 32 ranks in total \(now 4;"):
        config.batch(1)
    assert config.smallest_data_size == 8
    assert config.batch(8).world_size == 32


def test_a_batch_that_no_number_of_ranks_solves_is_refused_on_loading():
    with pytest.raises(ConfigError, match="the nearest that fit are 14 and 16"):
        load(keys(15, 2))
    with pytest.raises(ConfigError, match="set train_batch_size"):
        load(keys(15, 2, 2))


def test_the_nearest_divisors_are_found_on_both_sides():
    assert nearest_divisors(12, 5) == [4, 6]
    assert nearest_divisors(12, 20) == [12]
    assert nearest_divisors(7, 3) == [1, 7]


def test_fewer_microbatches_than_stages_give_a_warning_with_the_bubble():
    batch = load(keys(micro=2, steps=4, mesh={"pipeline": 8})).batch(1)
    assert batch.bubble == pytest.approx(7 / 11)
    assert batch.warnings == (
        "4 micro-batches for 8 pipeline stages: the ranks are idle for (p - 1) / (m + p - 1) = "
        "7 / 11 = 64% of each step; gradient_accumulation_steps 8 makes it 47%, 28 makes it 20%",
    )


@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_one_microbatch_by_default_gives_a_warning_if_there_is_a_pipeline(pipeline):
    mesh = {"pipeline": pipeline}
    assert len(load(keys(8, mesh=mesh, model=MODEL)).batch(1).warnings) == 1
    assert load(keys(8, 1, mesh=mesh, model=MODEL)).batch(1).warnings == ()


def test_the_sequential_schedule_gives_no_warning_about_the_bubble():
    config = load(keys(8, mesh={"pipeline": 4}, pipeline={"schedule": "sequential"}))
    assert config.batch(1).warnings == ()

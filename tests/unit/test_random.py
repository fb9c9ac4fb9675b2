"""Seeding, saving and restoring of RNG states."""

import random
from dataclasses import dataclass

import numpy
import pytest
import torch

from pipemega.random import preserve_rng, rng_state, seed_layer, set_rng_state, sharded_rng


@dataclass
class Rank:
    rank: int


def test_seed_layer_depends_on_seed_step_microbatch_and_layer():
    numbers = {}
    for key in [(1, 2, 3, 4), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (4, 3, 2, 1)]:
        seed_layer(*key)
        numbers[key] = torch.rand(4)
    assert len({tuple(values.tolist()) for values in numbers.values()}) == 6
    torch.manual_seed(77)
    seed_layer(1, 2, 3, 4)
    assert torch.equal(torch.rand(4), numbers[1, 2, 3, 4])


def test_preserve_rng_restores_the_rng_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with preserve_rng():
        seed_layer(1, 2, 3, 4)
        torch.rand(10)
    assert torch.equal(torch.rand(3), expected)


def test_preserve_rng_restores_the_rng_state_after_an_error():
    before = torch.get_rng_state()

    def use_rng_and_fail():
        with preserve_rng():
            torch.rand(10)
            raise KeyError

    with pytest.raises(KeyError):
        use_rng_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def sharded(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random numbers of a rank inside `sharded_rng` and after it."""
    torch.manual_seed(3)
    with sharded_rng(Rank(rank)):
        inside = torch.rand(count)
    return inside, torch.rand(8)


def test_sharded_rng_differs_between_ranks_inside_and_is_equal_after():
    first, after_first = sharded(0, 8)
    second, after_second = sharded(1, 8)
    assert not torch.equal(first, second)
    assert torch.equal(after_first, after_second)


def test_the_rng_state_after_sharded_rng_does_not_depend_on_use_inside():
    # As with two ranks, each with half of the heads, and one rank with all heads.
    assert torch.equal(sharded(0, 8)[1], sharded(0, 16)[1])


def test_sharded_rng_gives_equal_numbers_in_recomputation():
    assert torch.equal(sharded(1, 8)[0], sharded(1, 8)[0])


def test_two_consecutive_sharded_rngs_differ():
    torch.manual_seed(3)
    numbers = []
    for _ in range(2):
        with sharded_rng(Rank(1)):
            numbers.append(torch.rand(8))
    assert not torch.equal(*numbers)


def random_numbers() -> list[object]:
    # randn and gauss keep a second number for the next call; it is part of the state.
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        numpy.random.standard_normal(3).tolist(),
        numpy.random.randint(0, 1 << 30, 5).tolist(),
        random.gauss(0, 1),
        random.random(),
    ]


def test_loading_rng_state_restores_every_generator(tmp_path):
    with preserve_rng():
        random_numbers()
        torch.save(rng_state(), tmp_path / "rng.pt")
        expected = random_numbers()
        random_numbers()
        # As a checkpoint is loaded: with weights_only.
        set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
        assert random_numbers() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_generator_is_seeded_and_restored_with_the_cpu_generator():
    device = torch.device("cuda")
    seed_layer(1, 2, 3, 4, device)
    state = rng_state(device)
    first = torch.rand(4, device=device)
    set_rng_state(state, device)
    with sharded_rng(Rank(1), device):
        inside = torch.rand(4, device=device)
    after = torch.rand(4, device=device)
    assert torch.equal(after, first)
    assert not torch.equal(inside, first)

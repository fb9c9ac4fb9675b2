"""Random streams that depend on what they should, and on nothing else."""

import random
from dataclasses import dataclass

import numpy
import pytest
import torch

from pipemega.random import preserve_rng, rng_state, seed_layer, set_rng_state, sharded_rng


@dataclass
class Rank:
    rank: int


def test_a_layers_stream_depends_on_seed_step_microbatch_and_layer():
    drawn = {}
    for key in [(1, 2, 3, 4), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (4, 3, 2, 1)]:
        seed_layer(*key)
        drawn[key] = torch.rand(4)
    assert len({tuple(values.tolist()) for values in drawn.values()}) == 6
    torch.manual_seed(77)
    seed_layer(1, 2, 3, 4)
    assert torch.equal(torch.rand(4), drawn[1, 2, 3, 4])


def test_preserve_gives_the_callers_stream_back():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with preserve_rng():
        seed_layer(1, 2, 3, 4)
        torch.rand(10)
    assert torch.equal(torch.rand(3), expected)


def test_preserve_gives_the_callers_stream_back_after_an_error():
    before = torch.get_rng_state()

    def draw_and_fail():
        with preserve_rng():
            torch.rand(10)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def sharded(rank: int, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank draws inside, and after."""
    torch.manual_seed(3)
    with sharded_rng(Rank(rank)):
        inside = torch.rand(draws)
    return inside, torch.rand(8)


def test_a_sharded_stream_differs_between_ranks_and_agrees_again_after():
    first, after_first = sharded(0, 8)
    second, after_second = sharded(1, 8)
    assert not torch.equal(first, second)
    assert torch.equal(after_first, after_second)


def test_what_follows_a_sharded_stream_does_not_depend_on_how_much_was_drawn_inside():
    # As of two ranks, each with half of the heads, and one with all of them.
    assert torch.equal(sharded(0, 8)[1], sharded(0, 16)[1])


def test_a_sharded_stream_is_the_same_when_it_is_recomputed():
    assert torch.equal(sharded(1, 8)[0], sharded(1, 8)[0])


def test_two_sharded_streams_in_a_row_differ():
    torch.manual_seed(3)
    drawn = []
    for _ in range(2):
        with sharded_rng(Rank(1)):
            drawn.append(torch.rand(8))
    assert not torch.equal(*drawn)


def everything() -> list[object]:
    # randn and gauss keep a second number for the next call: part of the state.
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        numpy.random.standard_normal(3).tolist(),
        numpy.random.randint(0, 1 << 30, 5).tolist(),
        random.gauss(0, 1),
        random.random(),
    ]


def test_a_saved_state_continues_every_stream(tmp_path):
    with preserve_rng():
        everything()
        torch.save(rng_state(), tmp_path / "rng.pt")
        expected = everything()
        everything()
        # As a checkpoint is read: nothing in it may need code to be loaded.
        set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
        assert everything() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpus_stream_is_seeded_forked_and_kept_with_the_cpus():
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

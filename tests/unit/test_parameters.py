"""Logical parameters: what a rank holds of them, and how they are first drawn."""

import pytest
import torch
from torch import nn

from pipemega import parameters
from pipemega.errors import ConfigError
from pipemega.parameters import (
    Shard,
    derive_seed,
    describe,
    even_share,
    initialize_parameters,
    mark_partial,
    normal,
    shard_of,
)

# A weight [10, 6] whose rows are a block of 8 and one of 2, over two ranks, with a row of padding.
ROWS = (((0, 4), (8, 9)), ((4, 8), (9, 10)))
COLUMNS = (((0, 3),), ((3, 6),))


def rows_of(rank: int) -> Shard:
    return Shard((10, 6), dim=0, ranges=ROWS[rank], draw=normal(1.0))


def columns_of(rank: int) -> Shard:
    return Shard((10, 6), dim=1, ranges=COLUMNS[rank], draw=normal(1.0))


@pytest.mark.parametrize(("shard_for", "local_shape"), [(rows_of, (6, 6)), (columns_of, (10, 4))])
def test_what_the_ranks_take_of_a_parameter_they_put_back_as_it_was(shard_for, local_shape):
    whole = torch.randn(10, 6)
    back = torch.full_like(whole, torch.nan)
    for rank in range(2):
        local = torch.full(local_shape, torch.nan)
        shard_for(rank).take(whole, local)
        assert torch.isfinite(local).all()
        shard_for(rank).put(local, back)
    assert torch.equal(back, whole)


def test_a_shard_takes_its_ranges_in_order_and_zeros_for_padding():
    whole = torch.arange(10.0).unsqueeze(1).expand(10, 6)
    local = torch.full((6, 6), torch.nan)
    rows_of(1).take(whole, local)
    assert local[:, 0].tolist() == [4, 5, 6, 7, 9, 0]


def test_padding_is_never_put_back():
    shard = Shard((3, 2), dim=0, ranges=((2, 3),))
    into = torch.zeros(3, 2)
    shard.put(torch.full((4, 2), 7.0), into)
    assert into.tolist() == [[0, 0], [0, 0], [7, 7]]


def test_a_shard_of_nothing_but_padding_takes_zeros_and_puts_nothing():
    shard = Shard((3, 2), dim=0)
    local, into = torch.ones(4, 2), torch.ones(3, 2)
    shard.take(torch.ones(3, 2), local)
    shard.put(torch.zeros(4, 2), into)
    assert not local.any()
    assert into.all()


def test_a_parameter_that_nobody_described_is_whole_on_every_rank():
    parameter = nn.Parameter(torch.zeros(3, 2))
    assert shard_of(parameter) == Shard((3, 2))
    shard_of(parameter).take(torch.ones(3, 2), parameter)
    assert parameter.sum() == 6


def drawn(
    shard: Shard, shape: tuple[int, ...], name: str = "weight", seed: int = 1
) -> torch.Tensor:
    module = nn.Module()
    parameter = nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float64))
    module.register_parameter(name, describe(parameter, shard))
    initialize_parameters(module, "layers.3", seed)
    return module.get_parameter(name).detach()


# 12 elements: blocks of two rows, so that ranges begin, end and lie within blocks; 1: of one row.
@pytest.mark.parametrize("block", [1, 12, 18, 60, 1 << 22])
def test_every_rank_draws_its_part_of_the_same_whole(monkeypatch, block):
    monkeypatch.setattr(parameters, "_BLOCK", block)
    whole = drawn(Shard((10, 6), draw=normal(1.0)), (10, 6))
    assert torch.isfinite(whole).all()
    for shard_for, shape in ((rows_of, (6, 6)), (columns_of, (10, 4))):
        for rank in range(2):
            wanted = torch.empty(shape, dtype=torch.float64)
            shard_for(rank).take(whole, wanted)
            assert torch.equal(drawn(shard_for(rank), shape), wanted)


def test_only_the_blocks_that_a_shard_touches_are_drawn(monkeypatch):
    monkeypatch.setattr(parameters, "_BLOCK", 6)
    rows = []
    shard = Shard((10, 6), dim=0, ranges=((4, 6), (9, 10)), draw=lambda t, g: rows.append(len(t)))
    drawn(shard, (3, 6))
    assert rows == [1, 1, 1]


def test_the_numbers_depend_on_seed_and_name_and_on_nothing_else():
    shard = Shard((4, 4), draw=normal(1.0))
    first = drawn(shard, (4, 4))
    torch.manual_seed(99)
    assert torch.equal(drawn(shard, (4, 4)), first)
    assert not torch.equal(drawn(shard, (4, 4), name="other"), first)
    assert not torch.equal(drawn(shard, (4, 4), seed=2), first)


def test_drawing_leaves_the_users_random_stream_alone():
    before = torch.get_rng_state()
    drawn(Shard((4, 4), draw=normal(1.0)), (4, 4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 3)])
def test_parameters_of_any_rank_are_drawn(shape):
    assert torch.isfinite(drawn(Shard(shape, draw=normal(1.0)), shape)).all()


def test_a_normal_draw_has_the_standard_deviation_that_was_asked_for():
    values = drawn(Shard((1000, 100), draw=normal(0.02)), (1000, 100))
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.mean().item() == pytest.approx(0.0, abs=3e-4)


def test_a_parameter_without_a_draw_keeps_what_its_constructor_set():
    assert (drawn(Shard((3,)), (3,)).isnan()).all()


def test_seeds_are_the_same_in_every_process_and_differ_by_every_part():
    assert derive_seed(1234, "layers.0.weight", 0) == 8625847753169723640
    assert len({derive_seed(a, b) for a in range(50) for b in range(50)}) == 2500
    assert all(0 <= derive_seed(i) < 1 << 63 for i in range(100))


def test_marking_a_norm_says_that_its_gradients_are_parts_of_a_sum():
    norm = mark_partial(nn.LayerNorm(4))
    assert shard_of(norm.weight) == Shard((4,), partial_gradient=True)
    assert shard_of(norm.bias) == Shard((4,), partial_gradient=True)


def test_marking_leaves_parameters_alone_that_are_cut_over_the_ranks():
    module = nn.Linear(6, 6, bias=False)
    describe(module.weight, rows_of(0))
    mark_partial(module)
    assert not shard_of(module.weight).partial_gradient


def test_what_divides_is_shared_out_evenly():
    assert even_share(12, 4, "model.num_attention_heads") == 3


@pytest.mark.parametrize(
    ("total", "ranks", "message"),
    [
        (
            10,
            4,
            "model.num_attention_heads (10) must be a multiple of the tensor ranks "
            "(mesh.tensor = 4); the nearest that fit are 8 and 12",
        ),
        (
            3,
            4,
            "model.num_attention_heads (3) must be a multiple of the tensor ranks "
            "(mesh.tensor = 4); the least that fits is 4",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_would(total, ranks, message):
    with pytest.raises(ConfigError) as error:
        even_share(total, ranks, "model.num_attention_heads")
    assert str(error.value) == message

"""Logical parameters: their shards and their initialization."""

import pytest
import torch
from torch import nn

from pipemega import parameters
from pipemega.errors import ConfigError
from pipemega.parameters import (
    Shard,
    attach_shard,
    derive_seed,
    even_share,
    initialize_parameters,
    mark_partial_gradient,
    normal,
    shard_of,
)

# A weight [10, 6] with row blocks of 8 and 2, sharded over two ranks, with one padding row.
ROWS = (((0, 4), (8, 9)), ((4, 8), (9, 10)))
COLUMNS = (((0, 3),), ((3, 6),))


def rows_of(rank: int) -> Shard:
    return Shard((10, 6), dim=0, ranges=ROWS[rank], init_method=normal(1.0))


def columns_of(rank: int) -> Shard:
    return Shard((10, 6), dim=1, ranges=COLUMNS[rank], init_method=normal(1.0))


@pytest.mark.parametrize(("shard_for", "local_shape"), [(rows_of, (6, 6)), (columns_of, (10, 4))])
def test_copying_all_shards_from_and_to_the_full_tensor_restores_it(shard_for, local_shape):
    full = torch.randn(10, 6)
    restored = torch.full_like(full, torch.nan)
    for rank in range(2):
        local = torch.full(local_shape, torch.nan)
        shard_for(rank).copy_from_full(full, local)
        assert torch.isfinite(local).all()
        shard_for(rank).copy_to_full(local, restored)
    assert torch.equal(restored, full)


def test_a_shard_copies_its_ranges_in_order_and_sets_padding_to_zero():
    full = torch.arange(10.0).unsqueeze(1).expand(10, 6)
    local = torch.full((6, 6), torch.nan)
    rows_of(1).copy_from_full(full, local)
    assert local[:, 0].tolist() == [4, 5, 6, 7, 9, 0]


def test_padding_is_not_copied_to_the_full_tensor():
    shard = Shard((3, 2), dim=0, ranges=((2, 3),))
    full = torch.zeros(3, 2)
    shard.copy_to_full(torch.full((4, 2), 7.0), full)
    assert full.tolist() == [[0, 0], [0, 0], [7, 7]]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_padding_is_counted_in_any_part_of_the_flattened_tensor(dim):
    local = torch.ones(4, 3, 5)
    shape = [9, 9, 9]
    shard = Shard(tuple(shape), dim, ((0, 1), (5, 6)))
    mask = torch.ones(4, 3, 5)
    mask.narrow(dim, 2, local.shape[dim] - 2).zero_()
    flat = mask.reshape(-1)
    for start in range(0, 61, 3):
        for stop in range(start, 61):
            assert shard.padding((4, 3, 5), start, stop) == int((flat[start:stop] == 0).sum())
    assert Shard((4, 3, 5)).padding((4, 3, 5), 0, 60) == 0
    assert Shard((9, 3, 5), 0, ()).padding((0, 3, 5), 0, 0) == 0


def test_a_shard_of_only_padding_is_zero_and_copies_nothing_to_the_full_tensor():
    shard = Shard((3, 2), dim=0)
    local, full = torch.ones(4, 2), torch.ones(3, 2)
    shard.copy_from_full(torch.ones(3, 2), local)
    shard.copy_to_full(torch.zeros(4, 2), full)
    assert not local.any()
    assert full.all()


def test_a_parameter_without_a_shard_is_replicated():
    parameter = nn.Parameter(torch.zeros(3, 2))
    assert shard_of(parameter) == Shard((3, 2))
    shard_of(parameter).copy_from_full(torch.ones(3, 2), parameter)
    assert parameter.sum() == 6


def initialized(
    shard: Shard, shape: tuple[int, ...], name: str = "weight", seed: int = 1
) -> torch.Tensor:
    module = nn.Module()
    parameter = nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float64))
    module.register_parameter(name, attach_shard(parameter, shard))
    initialize_parameters(module, "layers.3", seed)
    return module.get_parameter(name).detach()


# 12 elements are blocks of two rows: ranges start and end inside blocks. 1 is one row.
@pytest.mark.parametrize("block", [1, 12, 18, 60, 1 << 22])
def test_each_shard_is_initialized_to_its_part_of_the_same_full_parameter(monkeypatch, block):
    monkeypatch.setattr(parameters, "_BLOCK", block)
    full = initialized(Shard((10, 6), init_method=normal(1.0)), (10, 6))
    assert torch.isfinite(full).all()
    for shard_for, shape in ((rows_of, (6, 6)), (columns_of, (10, 4))):
        for rank in range(2):
            expected = torch.empty(shape, dtype=torch.float64)
            shard_for(rank).copy_from_full(full, expected)
            assert torch.equal(initialized(shard_for(rank), shape), expected)


def test_only_blocks_that_overlap_the_shard_are_initialized(monkeypatch):
    monkeypatch.setattr(parameters, "_BLOCK", 6)
    rows = []
    shard = Shard(
        (10, 6), dim=0, ranges=((4, 6), (9, 10)), init_method=lambda t, g: rows.append(len(t))
    )
    initialized(shard, (3, 6))
    assert rows == [1, 1, 1]


def test_initial_values_depend_only_on_seed_and_name():
    shard = Shard((4, 4), init_method=normal(1.0))
    first = initialized(shard, (4, 4))
    torch.manual_seed(99)
    assert torch.equal(initialized(shard, (4, 4)), first)
    assert not torch.equal(initialized(shard, (4, 4), name="other"), first)
    assert not torch.equal(initialized(shard, (4, 4), seed=2), first)


def test_initialization_does_not_change_the_users_rng_state():
    before = torch.get_rng_state()
    initialized(Shard((4, 4), init_method=normal(1.0)), (4, 4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 3)])
def test_parameters_with_any_number_of_dims_are_initialized(shape):
    assert torch.isfinite(initialized(Shard(shape, init_method=normal(1.0)), shape)).all()


def test_normal_has_the_given_standard_deviation():
    values = initialized(Shard((1000, 100), init_method=normal(0.02)), (1000, 100))
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.mean().item() == pytest.approx(0.0, abs=3e-4)


def test_a_parameter_without_init_method_keeps_the_value_of_its_constructor():
    assert (initialized(Shard((3,)), (3,)).isnan()).all()


def test_derived_seeds_are_equal_in_every_process_and_depend_on_every_part():
    assert derive_seed(1234, "layers.0.weight", 0) == 8625847753169723640
    assert len({derive_seed(a, b) for a in range(50) for b in range(50)}) == 2500
    assert all(0 <= derive_seed(i) < 1 << 63 for i in range(100))


def test_mark_partial_gradient_marks_the_parameters_of_a_norm():
    norm = mark_partial_gradient(nn.LayerNorm(4))
    assert shard_of(norm.weight) == Shard((4,), partial_gradient=True)
    assert shard_of(norm.bias) == Shard((4,), partial_gradient=True)


def test_mark_partial_gradient_does_not_change_sharded_parameters():
    module = nn.Linear(6, 6, bias=False)
    attach_shard(module.weight, rows_of(0))
    mark_partial_gradient(module)
    assert not shard_of(module.weight).partial_gradient


def test_even_share_divides_a_multiple_of_the_ranks():
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
            "(mesh.tensor = 4); the smallest that fits is 4",
        ),
    ],
)
def test_a_size_that_is_not_a_multiple_of_the_ranks_is_an_error_with_the_nearest_multiples(
    total, ranks, message
):
    with pytest.raises(ConfigError) as error:
        even_share(total, ranks, "model.num_attention_heads")
    assert str(error.value) == message

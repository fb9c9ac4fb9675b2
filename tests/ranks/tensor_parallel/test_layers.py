"""Parallel linears against unsharded ones: outputs and all gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipemega import parameters
from pipemega.errors import ConfigError
from pipemega.parameters import initialize_parameters, mark_partial_gradient, shard_of
from pipemega.tensor_parallel import ColumnParallelLinear, Dropout, RowParallelLinear, layers
from tests.ranks.tensor_axis import (
    ALONE,
    close,
    compare_gradients,
    fill,
    on_ranks,
    part,
    tensor_axis,
)

F64 = torch.float64
QKV = (16, 8, 4)  # blocks of different sizes, multiples of 4


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def stock_linear(in_features, out_features, bias):
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=F64)
    with torch.no_grad():
        for i, parameter in enumerate(linear.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=10 + i))
    return linear


def check_column(out_features, bias, sequence_parallel, gather_output):
    axis = tensor_axis()
    blocks = [out_features] if isinstance(out_features, int) else list(out_features)
    stock = stock_linear(12, sum(blocks), bias)
    layer = ColumnParallelLinear(
        12,
        out_features,
        axis=axis,
        bias=bias,
        sequence_parallel=sequence_parallel,
        gather_output=gather_output,
        dtype=F64,
    )
    fill(layer, stock)
    full = randn(3, 8, 12).requires_grad_()
    x = (part(full, axis, 1) if sequence_parallel else full).detach().requires_grad_()
    expected, y, dy = stock(full), layer(x), randn(3, 8, sum(blocks), seed=1)
    expected.backward(dy)

    def of_this_rank(t):
        if gather_output:
            return t
        return torch.cat([part(block, axis, -1) for block in t.split(blocks, -1)], -1)

    close(y, of_this_rank(expected))
    y.backward(of_this_rank(dy))
    close(x.grad, part(full.grad, axis, 1) if sequence_parallel else full.grad)
    compare_gradients(layer, stock, axis)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("out_features", "bias", "gather_output"),
    [(16, True, False), (QKV, True, False), (QKV, False, False), (QKV, True, True)],
)
def test_column_parallel_equals_the_unsharded_linear(
    pool, ranks, out_features, bias, sequence_parallel, gather_output
):
    on_ranks(pool, ranks, check_column, out_features, bias, sequence_parallel, gather_output)


def check_row(bias, sequence_parallel):
    axis = tensor_axis()
    stock = stock_linear(16, 12, bias)
    layer = RowParallelLinear(
        16, 12, axis=axis, bias=bias, sequence_parallel=sequence_parallel, dtype=F64
    )
    fill(layer, stock)
    full = randn(3, 8, 16).requires_grad_()
    x = part(full, axis, -1).detach().requires_grad_()
    expected, y, dy = stock(full), layer(x), randn(3, 8, 12, seed=1)
    expected.backward(dy)
    if sequence_parallel:
        expected, dy = part(expected, axis, 1), part(dy, axis, 1)
    close(y, expected)
    y.backward(dy)
    close(x.grad, part(full.grad, axis, -1))
    compare_gradients(layer, stock, axis)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_equals_the_unsharded_linear(pool, ranks, bias, sequence_parallel):
    on_ranks(pool, ranks, check_row, bias, sequence_parallel)


class Block(nn.Module):
    """norm -> up -> activation -> down -> dropout, with a residual: half a transformer layer."""

    def __init__(self, axis, sequence_parallel, gated):
        super().__init__()
        self.gated = gated
        common = {"axis": axis, "sequence_parallel": sequence_parallel, "dtype": F64}
        self.norm = nn.LayerNorm(8, dtype=F64)
        if sequence_parallel and axis.size > 1:
            mark_partial_gradient(self.norm)
        self.up = ColumnParallelLinear(8, (32, 32) if gated else 32, **common)
        self.down = RowParallelLinear(32, 8, **common)
        self.dropout = Dropout(0.3, axis=axis, sequence_parallel=sequence_parallel)

    def forward(self, x):
        y = self.up(self.norm(x))
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y)
        return x + self.dropout(self.down(y))


class StockBlock(Block):
    """The same block with torch layers."""

    def __init__(self, gated):
        super().__init__(ALONE, False, gated)
        self.up = stock_linear(8, 64 if gated else 32, True)
        self.down = stock_linear(32, 8, True)
        self.dropout = nn.Dropout(0.3)


def check_block(sequence_parallel, gated):
    axis = tensor_axis()
    stock, block = StockBlock(gated), Block(axis, sequence_parallel, gated)
    fill(block, stock)
    full = randn(2, 8, 8).requires_grad_()
    x = (part(full, axis, 1) if sequence_parallel else full).detach().requires_grad_()
    dy = randn(2, 8, 8, seed=1)
    torch.manual_seed(5)
    expected = stock(full)
    torch.manual_seed(5)
    y = block(x)
    expected.backward(dy)
    slice_ = (lambda t: part(t, axis, 1)) if sequence_parallel else (lambda t: t)
    close(y, slice_(expected))
    y.backward(slice_(dy))
    close(x.grad, slice_(full.grad))
    compare_gradients(block, stock, axis)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_transformer_mlp_with_norm_and_dropout_equals_the_unsharded_one(
    pool, ranks, sequence_parallel, gated
):
    on_ranks(pool, ranks, check_block, sequence_parallel, gated)


def initial_parameters(block):
    before, parameters._BLOCK = parameters._BLOCK, block
    try:
        module = Block(tensor_axis(), False, True)
        initialize_parameters(module, "layers.2", seed=7)
    finally:
        parameters._BLOCK = before
    full = {}
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        full[name] = torch.full(shard.shape, torch.nan, dtype=F64)
        shard.copy_to_full(parameter, full[name])
    return full


# Blocks of one row, seven rows and all rows.
@pytest.mark.parametrize("block", [1, 7 * 8, 1 << 22])
def test_initial_weights_are_equal_for_every_number_of_ranks(pool, block):
    (one,) = on_ranks(pool, 1, initial_parameters, block)
    assert all(torch.isfinite(values).all() for values in one.values())
    for ranks in (2, 4):
        parts = pool.run(ranks, initial_parameters, block)
        for name, values in one.items():
            held = torch.stack([p[name] for p in parts])
            # Each element is on at least one rank, with the value of the unsharded model.
            assert not held.isnan().all(0).any()
            assert torch.equal(torch.where(held.isnan(), values, held), values.expand_as(held))


def test_weights_are_nan_until_initialized_and_biases_zero():
    for layer in (ColumnParallelLinear(4, 4, axis=ALONE), RowParallelLinear(4, 4, axis=ALONE)):
        assert layer.weight.isnan().all()
        assert not layer.bias.any()


def check_frozen(sequence_parallel):
    axis = tensor_axis()
    block, trained = (Block(axis, sequence_parallel, False) for _ in range(2))
    stock = StockBlock(False)
    fill(block, stock)
    fill(trained, stock)
    for layer in (block.up, block.down):
        layer.requires_grad_(False)
    gradients = []
    for module in (block, trained):
        x = randn(2, 8, 8).requires_grad_()
        torch.manual_seed(5)
        module(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert block.up.weight.grad is None
    assert block.down.bias.grad is None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        block.up(randn(2, 8, 8).requires_grad_())
    assert saved == [block.up.weight.shape]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_frozen_weight_computes_no_weight_gradient_and_saves_no_input(pool, sequence_parallel):
    pool.run(2, check_frozen, sequence_parallel)


def check_input_without_gradient(sequence_parallel):
    axis = tensor_axis()
    layer = ColumnParallelLinear(8, 4, axis=axis, sequence_parallel=sequence_parallel, dtype=F64)
    stock = stock_linear(8, 4, True)
    fill(layer, stock)
    full = randn(2, 4, 8)
    stock(full).sum().backward()
    layer(part(full, axis, 1) if sequence_parallel else full).sum().backward()
    compare_gradients(layer, stock, axis)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradients_are_computed_for_an_input_without_gradient(pool, sequence_parallel):
    pool.run(2, check_input_without_gradient, sequence_parallel)


def order_of_backward(sequence_parallel):
    """The events of one backward, and the shapes that were saved for it."""
    axis, events, saved = tensor_axis(), [], []

    def watched(name, start):
        def started(*args):
            events.append(f"start {name}")
            finish = start(*args)

            def finished():
                events.append(f"end {name}")
                return finish()

            return finished

        return started

    def multiply(dy, x, product=layers.weight_gradient):
        events.append("dW")
        return product(dy, x)

    layer = ColumnParallelLinear(8, 16, axis=axis, sequence_parallel=sequence_parallel, dtype=F64)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    ):
        y = layer(randn(2, 4, 8).requires_grad_())
    names = ["start_all_reduce", "start_all_gather", "start_reduce_scatter", "weight_gradient"]
    before = {name: getattr(layers, name) for name in names}
    try:
        for name in names[:3]:
            setattr(layers, name, watched(name[6:], before[name]))
        layers.weight_gradient = multiply
        y.sum().backward()
    finally:
        for name, function in before.items():
            setattr(layers, name, function)
    return events, saved


def test_the_all_reduce_of_the_input_gradient_overlaps_the_weight_gradient(pool):
    for events, _ in pool.run(2, order_of_backward, False):
        assert events == ["start all_reduce", "dW", "end all_reduce"]


def test_sequence_parallelism_saves_a_slice_and_overlaps_communication(pool):
    for events, saved in pool.run(2, order_of_backward, True):
        assert events == [
            "start all_gather",
            "end all_gather",
            "start reduce_scatter",
            "dW",
            "end reduce_scatter",
        ]
        assert saved == [(2, 4, 8), (8, 8)]  # this rank's slice of x, and the weight


def test_one_rank_uses_f_linear():
    for layer in (ColumnParallelLinear(4, 4, axis=ALONE), RowParallelLinear(4, 4, axis=ALONE)):
        y = layer(torch.randn(2, 4))
        assert (
            y.grad_fn.name() == F.linear(torch.randn(2, 4), layer.weight, layer.bias).grad_fn.name()
        )


def refusals():
    axis, messages = tensor_axis(), []
    for build in (
        lambda: ColumnParallelLinear(8, 10, axis=axis),
        lambda: ColumnParallelLinear(8, (8, 3), axis=axis),
        lambda: RowParallelLinear(6, 8, axis=axis),
        lambda: RowParallelLinear(8, 8, axis=axis, sequence_parallel=True)(torch.zeros(2, 6, 2)),
    ):
        with pytest.raises(ConfigError) as error:
            build()
        messages.append(str(error.value))
    return messages


def test_sizes_that_are_not_a_multiple_of_the_ranks_are_errors_with_sizes_that_fit(pool):
    must = "must be a multiple of the tensor ranks (mesh.tensor = 4); the"
    for messages in pool.run(4, refusals):
        assert messages == [
            f"out_features (10) {must} nearest that fit are 8 and 12",
            f"out_features[1] (3) {must} smallest that fits is 4",
            f"in_features (6) {must} nearest that fit are 4 and 8",
            "dim 1 of (2, 6, 8) is 6, which is not a multiple of the 4 tensor ranks: make it 4, "
            "or set mesh.sequence_parallel to false",
        ]

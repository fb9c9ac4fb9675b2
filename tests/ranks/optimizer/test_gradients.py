"""Gradient reductions and the norm, on meshes of two and four ranks."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipemega.config import load
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError
from pipemega.optimizer.gradients import (
    DataReduction,
    GradientBuffer,
    equalize_tied,
    reduce_data,
    reduce_partial,
    reduce_tied,
)
from pipemega.optimizer.step_outcome import GradientNorms
from pipemega.parameters import Shard, attach_shard
from tests.ranks.logical_model import SHAPES, local_model, mesh_of, whole_gradient

MESHES = [
    sizes for sizes in itertools.product((1, 2), repeat=3) if 2 <= math.prod(sizes) <= 4
]  # (pipeline, data, tensor)


def squared_norms(buffer, num_layers=1, tied=None, **axes):
    return GradientNorms(buffer, replace(Mesh.single(), **axes), tied or {}, num_layers)()


def reduce_and_compare_with_whole(sizes):
    mesh = mesh_of(*sizes)
    model = local_model(mesh)
    buffer = GradientBuffer(model.named)
    for name, parameter in model.named:
        gradient = whole_gradient(name, mesh.data.rank, 0)
        buffer.add(parameter, model.contribution(name, gradient))
    reduce_partial(buffer, mesh.tensor)
    reduce_tied(buffer, model.tied)
    factor = reduce_data(buffer, mesh.data, DataReduction())
    *layers, broken = squared_norms(
        buffer, tensor=mesh.tensor, data=mesh.data, tied=model.tied, num_layers=3
    )
    share = torch.stack([sum(layers), broken])
    for name, parameter in model.named:
        mean = sum(whole_gradient(name, d, 0) for d in range(mesh.data.size)) / mesh.data.size
        torch.testing.assert_close(
            parameter.grad * factor, model.local(name, mean), rtol=1e-12, atol=1e-14
        )
    return share[0].item() * factor**2, share[1].item()


def tied_gradients_after(data_ranks):
    """Return a tied gradient whose data sum was rounded differently on the two holders."""
    mesh = mesh_of(2, 1, 1)
    model = local_model(mesh)
    buffer = GradientBuffer(model.named)
    tied = {name: p for name, p in model.named if name in model.tied}
    assert tied
    for parameter in tied.values():
        parameter.grad.fill_(1.0 + mesh.pipeline.rank * 1e-15)
    equalize_tied(buffer, model.tied, Axis("data", tuple(range(data_ranks))))
    return [p.grad.unique().tolist() for p in tied.values()]


def test_replicas_of_a_tied_parameter_get_equal_sums_of_three_data_ranks(pool):
    """They drifted apart: an all-reduce of three parts depends on the layout of the buffer."""
    first, second = pool.run(2, tied_gradients_after, 3)
    assert first == second == [[1.0]] * len(first)
    # Two parts have one sum: nothing is sent.
    first, second = pool.run(2, tied_gradients_after, 2)
    assert first != second


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_reductions_give_the_unsharded_gradients_and_the_norm_counts_each_once(pool, sizes):
    shares = pool.run(math.prod(sizes), reduce_and_compare_with_whole, sizes)
    data = sizes[1]
    whole = [sum(whole_gradient(n, d, 0) for d in range(data)) / data for n in SHAPES]
    expected = sum(float(g.square().sum()) for g in whole)
    assert sum(square for square, _ in shares) == pytest.approx(expected, rel=1e-12)
    assert all(nonfinite == 0 for _, nonfinite in shares)


def data_reduction(values, reduction, dtype):
    mesh = mesh_of(1, len(values), 1)
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    buffer = GradientBuffer([("w", weight)])
    buffer.view(weight).fill_(values[mesh.data.rank])
    factor = reduce_data(buffer, mesh.data, reduction)
    return (weight.grad * factor).tolist()


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (DataReduction(), 2.5),
        (DataReduction(prescale=True), 2.5),
        (DataReduction(predivide_factor=2.0), 2.5),
        (DataReduction(prescale=True, predivide_factor=2.0), 2.5),
        (DataReduction("sum"), 10.0),
        (DataReduction("sum", prescale=True), 10.0),
        (DataReduction("sum", predivide_factor=8.0), 10.0),
        (DataReduction(dtype=torch.bfloat16), 2.5),
        (DataReduction(dtype=torch.float16), 2.5),
    ],
    ids=str,
)
def test_the_mean_does_not_depend_on_when_gradients_are_divided(pool, reduction, expected):
    results = pool.run(4, data_reduction, [1.0, 2.0, 3.0, 4.0], reduction, torch.float32)
    assert results == 4 * [3 * [expected]]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (DataReduction(dtype=torch.float16), math.inf),
        (DataReduction(dtype=torch.float16, prescale=True), 40000.0),
        (DataReduction(dtype=torch.float16, predivide_factor=4.0), 40000.0),
        (DataReduction(), 40000.0),
    ],
    ids=str,
)
def test_dividing_before_the_sum_avoids_an_fp16_overflow(pool, reduction, expected):
    results = pool.run(2, data_reduction, [40000.0, 40000.0], reduction, torch.float32)
    assert results == 2 * [3 * [expected]]


def test_a_predivide_factor_that_is_not_above_zero_is_refused():
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_predivide_factor": 0}
    with pytest.raises(ConfigError, match=r"gradient_predivide_factor must be a number > 0, not 0"):
        load(config)


def partial_reduction_in_two_dtypes():
    mesh = mesh_of(1, 1, 2)
    shard = Shard((2,), partial_gradient=True)
    named = [
        (str(dtype), attach_shard(nn.Parameter(torch.zeros(2, dtype=dtype)), shard))
        for dtype in (torch.float32, torch.float64)
    ]
    named.append(("whole", nn.Parameter(torch.zeros(2))))
    buffer = GradientBuffer(named)
    for _, parameter in named:
        buffer.view(parameter).fill_(1.0 + mesh.tensor.rank)
    reduce_partial(buffer, mesh.tensor)
    return [parameter.grad.tolist() for _, parameter in named]


def test_only_partial_gradients_are_summed_over_the_tensor_ranks(pool):
    zero, one = pool.run(2, partial_reduction_in_two_dtypes)
    assert zero == [[3, 3], [3, 3], [1, 1]]
    assert one == [[3, 3], [3, 3], [2, 2]]


def test_autograd_sums_gradients_in_the_views_in_place():
    weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(70))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    buffer = GradientBuffer([("w", weight), ("frozen", frozen), ("unused", unused)])
    for factor in (1.0, 2.0):
        (weight * factor).sum().backward()
    buffer.add(weight, torch.full((2,), 0.5))
    assert weight.grad is buffer.view(weight)
    assert weight.grad.data_ptr() == buffer.flats[torch.float32].data_ptr()
    assert weight.grad.tolist() == [3.5, 3.5]
    assert unused.grad.count_nonzero() == 0
    assert frozen.grad is None
    assert [slot.start % 64 for slot in buffer.slots] == [0, 0]
    buffer.zero()
    assert weight.grad.tolist() == [0, 0]


def test_gradients_that_were_set_to_none_are_discarded():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buffer = GradientBuffer([("w", weight), ("o", other)])
    (weight * 5 + other).sum().backward()
    torch.optim.SGD([weight, other]).zero_grad()  # sets .grad to None
    (weight * 2).sum().backward()
    buffer.restore_views()
    assert buffer.view(weight).tolist() == [2, 2]
    assert buffer.view(other).tolist() == [0, 0]
    assert weight.grad is buffer.view(weight)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_nonfinite_gradient_is_detected_on_ranks_that_do_not_count_it(bad):
    weight = nn.Parameter(torch.ones(2))
    buffer = GradientBuffer([("w", weight)])
    buffer.view(weight)[1] = bad
    second = Axis("tensor", (0, 1), 1)  # a replica: the first tensor rank counts it
    share = squared_norms(buffer, tensor=second)
    assert share.tolist() == [0, 1]


def test_the_norm_of_the_largest_fp32_gradients_does_not_overflow():
    weight = nn.Parameter(torch.ones(1000))
    buffer = GradientBuffer([("w", weight)])
    buffer.view(weight).fill_(3e38)
    share = squared_norms(buffer)
    assert math.sqrt(share[0]) == pytest.approx(3e38 * math.sqrt(1000), rel=1e-6)
    assert share[1] == 0


def test_a_rank_without_trainable_parameters_contributes_zero():
    buffer = GradientBuffer([])
    buffer.zero()
    assert squared_norms(buffer).tolist() == [0, 0]

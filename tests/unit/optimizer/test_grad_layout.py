"""The layout of gradients in buckets, and the slices that data ranks own."""

import pytest
import torch
from torch import nn

from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.optimizer import ModelParams, ZeroMasterParams
from pipemega.optimizer.gradients import ShardingSpec, bucketed_layout
from pipemega.optimizer.mixed_precision import Precision
from pipemega.parameters import Shard, attach_shard


def named(**sizes):
    return [(name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items()]


def sharding(ranks=2, rank=0, reduce_bucket_size=256, **kinds):
    data = Axis("data", tuple(range(ranks)), rank)
    return ShardingSpec(data, reduce_bucket_size, **kinds)


def test_buckets_fill_in_the_order_of_the_backward_and_late_gradients_come_last():
    layout = bucketed_layout(
        named(embedding=64, norm=64, a=64, b=64, c=64, copy=64),
        None,
        sharding(partial={"norm"}, late={"embedding"}, aside={"copy"}, reduce_bucket_size=128),
    )
    found = [([slot.name for slot in b.slots], b.partial, b.late) for b in layout.buckets]
    assert found == [
        (["c", "b"], False, False),
        (["a"], False, False),
        (["norm"], True, True),
        (["embedding"], False, True),
    ]
    assert [slot.name for slot in layout.slots][-1] == "copy"
    assert layout.sizes[torch.float32] == 4 * 128 + 64
    assert layout.span(layout.slots[-1]) == (0, 0)
    assert layout.buckets[0].name == "gradient bucket 0 (c to b)"


def test_a_bucket_has_parameters_of_one_dtype_and_gradients_share_a_buffer():
    parameters = named(a=3, b=4)
    parameters[1][1].data = parameters[1][1].data.double()
    layout = bucketed_layout(parameters, torch.float32, sharding())
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["b"], ["a"]]
    assert layout.sizes == {torch.float32: 256}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_spans_of_all_data_ranks_cover_each_parameter(ranks):
    parameters = [*named(scalar=(), a=(7, 11), b=(300,), none=(0,), c=(1000, 3))]
    held = {name: [] for name, _ in parameters}
    for rank in range(ranks):
        layout = bucketed_layout(parameters, None, sharding(ranks, rank, reduce_bucket_size=512))
        for slot in layout.slots:
            held[slot.name] += range(*layout.span(slot))
    assert held == {name: list(range(p.numel())) for name, p in parameters}


def mesh_without_processes(ranks, rank=0):
    data = Axis("data", tuple(range(ranks)), rank)
    one = Mesh.single()
    return Mesh(
        Topology(1, ranks, 1), one.pipeline, data, one.tensor, data, torch.device("cpu")
    )  # fmt: skip


@pytest.mark.parametrize(
    "precision", [Precision(), Precision(torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_slices_hold_the_values_of_their_parameter_and_its_logical_shape(precision):
    values = {"a": torch.randn(7, 11), "b": torch.randn(300), "scalar": torch.randn(())}
    slices = {name: torch.empty(0) for name in values}
    for rank in range(3):
        parameters = [(name, nn.Parameter(value.clone())) for name, value in values.items()]
        attach_shard(parameters[1][1], Shard((300,), partial_gradient=True))
        masters = ZeroMasterParams(
            ModelParams(parameters),
            mesh_without_processes(3, rank),
            reduce_bucket_size=200,
            precision=precision,
        )
        for name, parameter in parameters:
            assert torch.equal(parameter, values[name].to(parameter.dtype))
            assert parameter.shape == values[name].shape
            part, (start, stop) = masters.named[name], masters.spans[name]
            assert part.shape == (stop - start,)
            assert part.dtype == torch.float32
            assert part._pipemega_shard.shape == values[name].shape
            slices[name] = torch.cat([slices[name], part.detach()])
    for name, value in values.items():
        assert torch.equal(slices[name], value.view(-1)), name


def test_masters_of_slices_do_not_keep_the_memory_of_the_whole_parameter():
    weight = nn.Parameter(torch.randn(1000))
    masters = ZeroMasterParams(
        ModelParams([("w", weight)]),
        mesh_without_processes(2),
        reduce_bucket_size=10**6,
        precision=Precision(torch.bfloat16),
    )
    (part,) = masters.named.values()
    assert part.untyped_storage().nbytes() == 4 * part.numel() == 4 * 512
    assert weight.untyped_storage().nbytes() == 2 * 1024


def test_without_mixed_precision_a_slice_shares_the_memory_of_its_parameter():
    weight = nn.Parameter(torch.randn(10, 10))
    masters = ZeroMasterParams(
        ModelParams([("w", weight)]), mesh_without_processes(2, 1), reduce_bucket_size=10**6
    )
    (part,) = masters.named.values()
    assert part.shape == (36,)
    with torch.no_grad():
        part.fill_(7.0)
    assert weight.view(-1)[64:].tolist() == 36 * [7.0]


def test_copies_of_a_tied_parameter_are_in_no_bucket_and_share_its_memory():
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    copy = nn.Parameter(weight.detach().clone())
    masters = ZeroMasterParams(
        ModelParams([("w", weight), ("b", bias)], copies={"w": [copy]}),
        mesh_without_processes(2),
        reduce_bucket_size=100,
    )
    assert copy.data_ptr() == weight.data_ptr()
    assert set(masters.named) == {"w", "b"}
    assert [bucket.late for bucket in masters.layout.buckets] == [False, True]


def test_frozen_parameters_are_cast_but_have_no_master():
    frozen = nn.Parameter(torch.randn(4), requires_grad=False)
    weight = nn.Parameter(torch.randn(4))
    masters = ZeroMasterParams(
        ModelParams([("f", frozen), ("w", weight)]),
        mesh_without_processes(2),
        reduce_bucket_size=64,
        precision=Precision(torch.half),
    )
    assert set(masters.named) == {"w"}
    assert frozen.dtype == torch.half

"""Which bucket a gradient goes into, and what each data rank owns of it."""

import pytest
import torch
from torch import nn

from pipemega.mesh import Axis, Mesh
from pipemega.optimizer import ZeroTargets
from pipemega.parameters import Shard, describe
from pipemega.precision import Precision
from pipemega.slots import Cut, layout_in_buckets
from pipemega.topology import Topology


def named(**sizes):
    return [(name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items()]


def cut(ranks=2, rank=0, limit=256, **kinds):
    return Cut(ranks, rank, limit, **kinds)


def test_buckets_fill_in_the_order_of_the_backward_and_what_others_add_to_comes_last():
    layout = layout_in_buckets(
        named(embedding=64, norm=64, a=64, b=64, c=64, copy=64),
        None,
        cut(partial={"norm"}, late={"embedding"}, aside={"copy"}, limit=128),
    )
    told = [([slot.name for slot in b.slots], b.partial, b.late) for b in layout.buckets]
    assert told == [
        (["c", "b"], False, False),
        (["a"], False, False),
        (["norm"], True, True),
        (["embedding"], False, True),
    ]
    assert [slot.name for slot in layout.slots][-1] == "copy"
    assert layout.sizes[torch.float32] == 4 * 128 + 64
    assert layout.span(layout.slots[-1]) == (0, 0)
    assert layout.buckets[0].name == "gradient bucket 0 (c to b)"


def test_a_bucket_has_parameters_of_one_dtype_and_they_share_a_flat_of_gradients():
    parameters = named(a=3, b=4)
    parameters[1][1].data = parameters[1][1].data.double()
    layout = layout_in_buckets(parameters, torch.float32, cut())
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["b"], ["a"]]
    assert layout.sizes == {torch.float32: 256}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_spans_of_all_data_ranks_make_up_each_parameter(ranks):
    parameters = [*named(scalar=(), a=(7, 11), b=(300,), none=(0,), c=(1000, 3))]
    held = {name: [] for name, _ in parameters}
    for rank in range(ranks):
        layout = layout_in_buckets(parameters, None, cut(ranks, rank, limit=512))
        for slot in layout.slots:
            held[slot.name] += range(*layout.span(slot))
    assert held == {name: list(range(p.numel())) for name, p in parameters}


def on_paper(ranks, rank=0):
    data = Axis("data", tuple(range(ranks)), rank)
    one = Mesh.single()
    return Mesh(
        Topology(1, ranks, 1), one.pipeline, data, one.tensor, data, torch.device("cpu")
    )  # fmt: skip


@pytest.mark.parametrize(
    "precision", [Precision(), Precision(torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_pieces_hold_the_numbers_of_their_parameter_and_know_its_shape(precision):
    values = {"a": torch.randn(7, 11), "b": torch.randn(300), "scalar": torch.randn(())}
    pieces = {name: torch.empty(0) for name in values}
    for rank in range(3):
        parameters = [(name, nn.Parameter(value.clone())) for name, value in values.items()]
        describe(parameters[1][1], Shard((300,), partial_gradient=True))
        targets = ZeroTargets(parameters, on_paper(3, rank), bucket_size=200, precision=precision)
        for name, parameter in parameters:
            assert torch.equal(parameter, values[name].to(parameter.dtype))
            assert parameter.shape == values[name].shape
            piece, (start, stop) = targets.named[name], targets.spans[name]
            assert piece.shape == (stop - start,)
            assert piece.dtype == torch.float32
            assert piece._pipemega_shard.shape == values[name].shape
            pieces[name] = torch.cat([pieces[name], piece.detach()])
    for name, value in values.items():
        assert torch.equal(pieces[name], value.view(-1)), name


def test_masters_of_slices_do_not_keep_the_whole_alive():
    weight = nn.Parameter(torch.randn(1000))
    targets = ZeroTargets(
        [("w", weight)], on_paper(2), bucket_size=10**6, precision=Precision(torch.bfloat16)
    )
    (piece,) = targets.named.values()
    assert piece.untyped_storage().nbytes() == 4 * piece.numel() == 4 * 512
    assert weight.untyped_storage().nbytes() == 2 * 1024


def test_without_masters_a_piece_is_the_parameters_own_memory():
    weight = nn.Parameter(torch.randn(10, 10))
    targets = ZeroTargets([("w", weight)], on_paper(2, 1), bucket_size=10**6)
    (piece,) = targets.named.values()
    assert piece.shape == (36,)
    with torch.no_grad():
        piece.fill_(7.0)
    assert weight.view(-1)[64:].tolist() == 36 * [7.0]


def test_copies_of_a_tied_parameter_lie_aside_and_share_its_numbers():
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    copy = nn.Parameter(weight.detach().clone())
    targets = ZeroTargets(
        [("w", weight), ("b", bias)], on_paper(2), bucket_size=100, copies={"w": [copy]}
    )
    assert copy.data_ptr() == weight.data_ptr()
    assert set(targets.named) == {"w", "b"}
    assert [bucket.late for bucket in targets.layout.buckets] == [False, True]


def test_frozen_parameters_stay_whole_and_have_no_piece():
    frozen = nn.Parameter(torch.randn(4), requires_grad=False)
    weight = nn.Parameter(torch.randn(4))
    targets = ZeroTargets(
        [("f", frozen), ("w", weight)], on_paper(2), bucket_size=64, precision=Precision(torch.half)
    )
    assert set(targets.named) == {"w"}
    assert frozen.dtype == torch.half

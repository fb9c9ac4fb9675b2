"""Products that overlap with the collectives of sequence parallelism."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipemega.distributed.mesh import Axis
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    overlapped_products,
)
from pipemega.tensor_parallel.overlapped_products import overlaps, with_overlap
from tests.ranks.tensor_axis import close, compare_gradients, fill, part, tensor_axis

F64 = torch.float64
CPU = torch.device("cpu")


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


class MLP(nn.Module):
    """A column-parallel linear, a function that saves its output, and a row-parallel linear."""

    def __init__(self, axis, sequence_parallel=True, bias=True):
        super().__init__()
        options = {"axis": axis, "dtype": F64, "bias": bias, "sequence_parallel": sequence_parallel}
        self.up = ColumnParallelLinear(12, 16, **options)
        self.down = RowParallelLinear(16, 12, **options)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(randn(*parameter.shape, seed=10 + i))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def stock_and(axis, bias=True):
    stock, mlp = MLP(Axis("tensor"), False, bias), MLP(axis, bias=bias)
    fill(mlp, stock)
    return stock, mlp


class Gradients:
    """Where a queue adds gradients: to the parameters."""

    def fuses(self, parameter, dy):
        return False

    def add(self, parameter, gradient):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def run(mlp, x, dy, way):
    """Return y after a backward: whole, in I and W, recomputed, or whole with a queue."""
    queue = WeightGradQueue(Gradients())
    if way != "B":
        enable_split_backward([mlp], queue)
    y = checkpoint(mlp, x, use_reentrant=False) if way == "recomputed" else mlp(x)
    if way == "B with a queue":
        y.backward(dy)
    else:
        with queue.defer("I"):
            y.backward(dy)
        queue.run("I")
    return y


def compare(batch, length, bias):
    """Check y and all gradients against the unsplit MLP, and all ways of backward bitwise."""
    axis = with_overlap(tensor_axis(), CPU, None)
    assert axis.overlap == "split"
    full = randn(batch, length, 12).requires_grad_()
    dy = randn(batch, length, 12, seed=1)
    results = []
    for way in ("B", "I and W", "recomputed", "B with a queue"):
        stock, mlp = stock_and(axis, bias)
        full.grad = None
        expected = stock(full)
        expected.backward(dy)
        x = part(full, axis, 1).detach().requires_grad_()
        assert overlaps(x, axis) == (batch > 1 or length // axis.size > 1)
        y = run(mlp, x, part(dy, axis, 1).contiguous(), way)
        assert y.is_contiguous()
        assert not y._is_view()
        close(y, part(expected, axis, 1))
        close(x.grad, part(full.grad, axis, 1))
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())])
        compare_gradients(mlp, stock, axis)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.parametrize("ranks", [2, 4])
# One sample in 4 pieces, in 3 and not at all; samples in 2 pieces; whole samples.
@pytest.mark.parametrize(("batch", "slice_of_rank"), [(1, 8), (1, 3), (1, 1), (2, 2), (5, 3)])
def test_overlapped_products_equal_the_unsplit_ones_in_layout_and_value(
    pool, ranks, batch, slice_of_rank
):
    pool.run(ranks, compare, batch, slice_of_rank * ranks, batch < 3)


def test_a_gpu_splits_no_product_into_pieces_of_few_rows():
    axis = Axis("tensor", ranks=(0, 1), overlap="split")
    gpu = torch.device("cuda")
    # (samples, length of the slice of a rank) -> pieces of each sample
    wanted = {(1, 511): 0, (1, 1024): 2, (1, 4096): 4, (2, 512): 1, (2, 4096): 2, (9, 512): 1}
    found = {size: overlapped_products._pieces(*size, axis, gpu) for size in wanted}
    assert found == wanted


def events_of_a_step():
    """Return the order of collectives and products in forward and in backward."""
    axis = with_overlap(tensor_axis(), CPU, None)
    events = []

    def watched(name):
        start = getattr(overlapped_products, name)

        def started(*args):
            events.append(name.removeprefix("start_"))
            finish = start(*args)

            def finished():
                events.append(f"end {name.removeprefix('start_')}")
                return finish()

            return finished

        return patch.object(overlapped_products, name, started)

    multiply = torch.bmm

    def product(*args, **options):
        events.append("product")
        return multiply(*args, **options)

    def of(work):
        events.clear()
        work()
        return list(events)

    x = randn(1, 4, 12).requires_grad_()
    mlp = MLP(axis, bias=False)
    results = []
    with (
        watched("start_all_gather"),
        watched("start_reduce_scatter"),
        patch.object(torch, "bmm", product),
    ):
        for linear, entering in ((mlp.up, x), (mlp.down, randn(1, 8, 8).requires_grad_())):
            y = []
            forward = of(lambda f=linear, x=entering, y=y: y.append(f(x)))
            results.append((forward, of(y[0].sum().backward)))
    return results


def test_each_product_runs_while_the_next_or_the_last_collective_does(pool):
    gathers = ["all_gather"] * 4 + ["end all_gather", "product"] * 4
    starts = ["product", "reduce_scatter"] * 4
    scatters = starts + ["end reduce_scatter"] * 4
    for column, row in pool.run(2, events_of_a_step):
        # The backward of a column-parallel linear also gathers x for dW, and multiplies dW, before
        # it waits for the reduce-scatters.
        assert column == (gathers, scatters)
        assert row == (scatters, gathers)


class FakeOperators:
    """In place of torch.ops.symm_mem, whose operators run on CUDA only: their fallbacks.

    Args:
        calls: gets the name and the arguments of each call, named as in the operator's schema.
    """

    def __init__(self, calls):
        self._real, self._calls = torch.ops.symm_mem, calls

    def __getattr__(self, name):
        arguments = getattr(self._real, name).default._schema.arguments
        positional = [a.name for a in arguments if not a.kwarg_only]
        named = {a.name for a in arguments if a.kwarg_only}
        fallback = getattr(symmetric_memory, f"_{name}_fallback")

        def operator(*args, **options):
            assert named >= {*options}
            self._calls.append((name, dict(zip(positional, args, strict=True)) | options))
            return fallback(*args, **options)

        return operator


def with_fake_operators(batch):
    """Compare with the unsplit MLP, and return name, shapes, dim and return_A of all calls."""
    axis, calls = replace(tensor_axis(), overlap="symmetric"), []
    stock, mlp = stock_and(axis)
    full, dy = randn(batch, 8, 12).requires_grad_(), randn(batch, 8, 12, seed=1)
    expected = stock(full)
    expected.backward(dy)
    x = part(full, axis, 1).detach().requires_grad_()
    with patch.object(torch.ops, "symm_mem", FakeOperators(calls)):
        y = run(mlp, x, part(dy, axis, 1).contiguous(), "I and W")
    close(y, part(expected, axis, 1))
    close(x.grad, part(full.grad, axis, 1))
    compare_gradients(mlp, stock, axis)
    found = []
    for name, given in calls:
        assert given["group_name"] == axis.group.group_name
        assert given.get("reduce_op", "sum") == "sum"
        matrix = given["Bs"][0] if "Bs" in given else given["B"]
        dim = given.get("gather_dim", given.get("scatter_dim"))
        found.append((name, *map(tuple, (given["A"].shape, matrix.shape)), dim))
        # The gathered dy is needed for the weight gradient, the gathered x is not.
        assert given.get("return_A", False) == (len(found) == 3)
    return found


@pytest.mark.parametrize("batch", [2, 3])
def test_symmetric_memory_gets_the_arguments_of_its_schema_and_gives_the_same_results(pool, batch):
    for calls in pool.run(2, with_fake_operators, batch):
        assert calls == [
            ("fused_all_gather_matmul", (batch, 4, 12), (12, 8), 1),
            ("fused_matmul_reduce_scatter", (batch, 8, 8), (8, 12), 1),
            ("fused_all_gather_matmul", (batch, 4, 12), (12, 8), 1),
            ("fused_matmul_reduce_scatter", (batch, 8, 8), (8, 12), 1),
        ]


def chosen_ways():
    """Return the way and the logged reason on a GPU for each fault of symmetric memory."""
    axis, found = tensor_axis(), []

    class Log:
        def info(self, text, *values):
            found.append(text % values)

    def workspace(name, size):
        assert (name, size) == (axis.group.group_name, 1)

    def broken(name, size):
        if axis.rank == 1:
            raise RuntimeError("no peer access\nframe #0")

    names = {"host": lambda: f"node{axis.rank}", "same": lambda: "node"}
    for version, host, memory in (
        (True, "same", workspace),
        (False, "same", workspace),
        (True, "host", workspace),
        (True, "same", broken),
    ):
        with (
            patch.object(overlapped_products, "HAS_SYMMETRIC_PRODUCTS", version),
            patch.object(overlapped_products.socket, "gethostname", names[host]),
            patch.object(symmetric_memory, "get_symm_mem_workspace", memory),
        ):
            found.append(with_overlap(axis, torch.device("cuda"), Log()).overlap)
    return found


def test_without_symmetric_memory_one_line_names_the_reason_and_all_ranks_split(pool):
    text = "mesh.overlap_sequence_parallel splits products, without symmetric memory: "
    for found in pool.run(2, chosen_ways):
        assert found == [
            "symmetric",
            f"{text}its products need torch 2.13 or newer, and this is torch {torch.__version__}",
            "split",
            f"{text}the tensor ranks are on several nodes",
            "split",
            f"{text}no peer access",
            "split",
        ]


def test_a_compiler_autocast_and_the_meta_device_get_plain_collectives():
    axis = Axis("tensor", ranks=(0, 1), overlap="split")
    x = torch.zeros(2, 4, 8)
    assert overlaps(x, axis)
    assert overlaps(x, axis, scatters=True)
    assert not overlaps(x[:, :3], axis, scatters=True)
    assert not overlaps(x, replace(axis, overlap=""))
    assert not overlaps(x[0], axis)
    assert not overlaps(x.to("meta"), axis)
    with torch.autocast("cpu", torch.bfloat16):
        assert not overlaps(x, axis)
    with patch.object(torch.compiler, "is_compiling", lambda: True):
        assert not overlaps(x, axis)

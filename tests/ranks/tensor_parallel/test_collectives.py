"""Conjugate collectives: the result of forward and the gradient of backward on each rank."""

import pytest
import torch

from pipemega.errors import ConfigError
from pipemega.tensor_parallel import collectives
from tests.ranks.tensor_axis import ALONE, close, on_ranks, part, tensor_axis

PAIRS = {
    "copy_to_tensor": (),
    "reduce_from_tensor": (),
    "scatter_to_tensor": (2,),
    "gather_from_tensor": (-1,),
    "scatter_sequence": (),
    "gather_sequence": (),
    "reduce_scatter_sequence": (),
}


def of_rank(rank, shape=(3, 8, 4), dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def forward_and_backward(name, dim, x, dy):
    x = x.requires_grad_()
    y = getattr(collectives, name)(x, tensor_axis(), *dim)
    y.backward(dy(y.shape))
    return y.detach(), x.grad


def expected(name, xs, axis):
    """Return the result by definition, from the tensors of all ranks."""
    kind = name.split("_")[0] if name != "reduce_scatter_sequence" else name
    dim = 1 if name.endswith("sequence") else 2
    return {
        "copy": lambda: xs[axis.rank],
        "reduce": lambda: sum(xs),
        "scatter": lambda: part(xs[axis.rank], axis, dim),
        "gather": lambda: torch.cat(xs, dim),
        "reduce_scatter_sequence": lambda: part(sum(xs), axis, dim),
    }[kind]()


def check_pair(name):
    axis = tensor_axis()
    all_dy = []

    def dy(shape):
        all_dy.extend(of_rank(100 + rank, shape) for rank in range(axis.size))
        # Autograd may pass gradients that are not contiguous or are shared.
        return all_dy[axis.rank].mT.contiguous().mT

    y, dx = forward_and_backward(name, PAIRS[name], of_rank(axis.rank), dy)
    kept = [t.clone() for t in all_dy]
    close(y, expected(name, [of_rank(rank) for rank in range(axis.size)], axis))
    conjugate = {
        "copy_to_tensor": "reduce_from_tensor",
        "reduce_from_tensor": "copy_to_tensor",
        "scatter_to_tensor": "gather_from_tensor",
        "gather_from_tensor": "scatter_to_tensor",
        "scatter_sequence": "gather_sequence",
        "gather_sequence": "reduce_scatter_sequence",
        "reduce_scatter_sequence": "gather_sequence",
    }[name]
    close(dx, expected(conjugate, all_dy, axis))
    assert all(torch.equal(a, b) for a, b in zip(all_dy, kept, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_backward_is_the_conjugate_collective_of_forward(pool, name, ranks):
    pool.run(ranks, check_pair, name)


@pytest.mark.parametrize("name", PAIRS)
def test_on_one_rank_collectives_return_their_argument(name):
    x = torch.randn(2, 4, 4, requires_grad=True)
    assert getattr(collectives, name)(x, ALONE, *PAIRS[name]) is x


def check_arguments_are_kept(name):
    axis = tensor_axis()
    x = of_rank(axis.rank)
    getattr(collectives, name)(x, axis, *PAIRS[name])
    assert torch.equal(x, of_rank(axis.rank))


@pytest.mark.parametrize("name", PAIRS)
def test_collectives_do_not_change_their_argument(pool, name):
    pool.run(2, check_arguments_are_kept, name)


def low_precision(dtype):
    axis = tensor_axis()
    # Small integers are exact in every dtype, so the order of a sum does not matter.
    x = torch.arange(16, dtype=dtype).view(1, 8, 2) * (axis.rank + 1)
    summed = collectives.reduce_from_tensor(x, axis)
    scattered = collectives.reduce_scatter_sequence(x, axis)
    gathered = collectives.gather_sequence(part(x, axis, 1), axis)
    assert summed.dtype == scattered.dtype == gathered.dtype == dtype
    total = torch.arange(16, dtype=dtype).view(1, 8, 2) * sum(range(1, axis.size + 1))
    assert torch.equal(summed, total)
    assert torch.equal(scattered, part(total, axis, 1))
    assert gathered.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_and_gathers_keep_the_dtype(pool, dtype):
    pool.run(4, low_precision, dtype)


def summed_on_this_rank(dtype):
    axis = tensor_axis()
    return collectives.reduce_from_tensor(of_rank(axis.rank, (999,), dtype), axis)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_bitwise_equal_on_all_ranks(pool, dtype):
    # Otherwise replicated activations would diverge.
    first, *others = pool.run(4, summed_on_this_rank, dtype)
    assert all(torch.equal(first, other) for other in others)


def check_sum_in_place():
    axis = tensor_axis()
    x = of_rank(axis.rank).requires_grad_()
    y = collectives.sum_in_place(2 * x, axis)
    y.sum().backward()
    close(y, sum(2 * of_rank(rank) for rank in range(axis.size)))
    close(x.grad, torch.full_like(x, 2.0))
    root = x.exp()  # exp saves its result for backward
    collectives.sum_in_place(root, axis)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        root.sum().backward()


def test_sum_in_place_keeps_the_gradient_and_raises_if_autograd_saved_its_input(pool):
    pool.run(2, check_sum_in_place)


def refusal(name, shape, dim):
    try:
        getattr(collectives, name)(torch.zeros(shape), tensor_axis(), *dim)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "shape", "dim", "message"),
    [
        (
            "reduce_scatter_sequence",
            (2, 10, 8),
            (),
            "dim 1 of (2, 10, 8) is 10, which is not a multiple of the 4 tensor ranks: make it 8, "
            "or set mesh.sequence_parallel to false",
        ),
        (
            "scatter_to_tensor",
            (2, 8, 3),
            (-1,),
            "dim 2 of (2, 8, 3) is 3, which is not a multiple of the 4 tensor ranks: make it 4",
        ),
    ],
)
def test_a_dim_that_is_not_a_multiple_of_the_ranks_is_an_error(pool, name, shape, dim, message):
    assert pool.run(4, refusal, name, shape, dim) == [message] * 4


def test_one_tensor_rank_accepts_any_size(pool):
    assert on_ranks(pool, 1, refusal, "scatter_sequence", (2, 7, 3), ()) == [None]


def check_split(ranks_have_another_device):
    """The collectives of a micro-batch, one for each sample, without a copy."""
    axis = tensor_axis()
    collectives._PIECE_BYTES = 1
    try:
        for batch in (1, 3):
            xs = [of_rank(rank, (batch, 8, 4)) for rank in range(axis.size)]
            mine = xs[axis.rank].clone()
            close(collectives.start_all_gather(mine, axis, 1)(), torch.cat(xs, 1))
            if ranks_have_another_device:
                mine = mine.as_subclass(_OnDevice)
            # Not contiguous, as a gradient may be.
            for x in (mine, mine.mT.contiguous().mT):
                total = collectives.start_reduce_scatter(x, axis, 1)()
                close(total.as_subclass(torch.Tensor), part(sum(xs), axis, 1))
                assert torch.equal(x.as_subclass(torch.Tensor), xs[axis.rank])
    finally:
        collectives._PIECE_BYTES = 1 << 20


class _OnDevice(torch.Tensor):
    """A CPU tensor that takes the path of a GPU, with gloo's reduce-scatter."""

    device = torch.device("cuda")


@pytest.mark.parametrize("another_device", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_that_are_split_by_sample_equal_one(pool, ranks, another_device):
    pool.run(ranks, check_split, another_device)

"""Vocabulary-parallel embedding, head and loss, and dropout, against those of torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipemega.errors import DataError
from pipemega.parameters import initialize_parameters, shard_of
from pipemega.tensor_parallel import (
    Dropout,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from pipemega.tensor_parallel.collectives import gather_from_tensor, local_range, rows_per_rank
from pipemega.tensor_parallel.deferred_logits import defer_logits
from pipemega.tensor_parallel.linear_cross_entropy import linear_cross_entropy
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


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("vocab_size", "ranks", "rows", "ranges"),
    [
        (1000, 2, 512, [(0, 512), (512, 1000)]),
        (1024, 2, 512, [(0, 512), (512, 1024)]),
        # Two ranks with only padding.
        (130, 4, 128, [(0, 128), (128, 130), (130, 130), (130, 130)]),
        (1000, 1, 1024, [(0, 1000)]),
    ],
)
def test_the_vocabulary_is_padded_to_a_multiple_per_rank(vocab_size, ranks, rows, ranges):
    assert rows_per_rank(vocab_size, ranks, 128) == rows
    assert [local_range(vocab_size, rows, rank) for rank in range(ranks)] == ranges


def check_language_model(vocab_size, sequence_parallel, tied, smoothing):
    """Compare embedding, tanh, head and loss with torch, including all gradients."""
    axis = tensor_axis()
    common = {"axis": axis, "sequence_parallel": sequence_parallel, "dtype": F64}
    model, stock = nn.Module(), nn.Module()
    model.embedding = VocabParallelEmbedding(vocab_size, 6, **common)
    stock.embedding = nn.Embedding(vocab_size, 6, dtype=F64)
    if not tied:
        model.head = VocabParallelHead(vocab_size, 6, **common)
        stock.head = nn.Linear(6, vocab_size, bias=False, dtype=F64)
    for i, parameter in enumerate(stock.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=i))
    fill(model, stock)
    ids, target = randint(vocab_size, 2, 8), randint(vocab_size, 2, 8, seed=1)
    target[0, 3] = -100

    hidden = stock.embedding(ids)
    scores = F.linear(hidden.tanh(), (stock.embedding if tied else stock.head).weight)
    expected = F.cross_entropy(
        scores.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    )
    expected.sum().backward()

    ours = model.embedding(ids)
    close(ours, part(hidden, axis, 1) if sequence_parallel else hidden)
    logits = model.embedding.logits(ours.tanh()) if tied else model.head(ours.tanh())
    assert logits.shape == (2, 8, rows_per_rank(vocab_size, axis.size, 128))
    close(gather_from_tensor(logits, axis)[..., :vocab_size], scores)
    loss = vocab_parallel_cross_entropy(
        logits, target, axis=axis, vocab_size=vocab_size, label_smoothing=smoothing
    )
    close(loss, expected.view(2, 8), atol=1e-12)
    loss.sum().backward()
    compare_gradients(model, stock, axis)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab_size", "smoothing"), [(1000, 0.1), (130, 0.0), (512, 0.0)])
def test_a_language_model_with_sharded_vocabulary_equals_the_unsharded_one(
    pool, ranks, sequence_parallel, tied, vocab_size, smoothing
):
    on_ranks(pool, ranks, check_language_model, vocab_size, sequence_parallel, tied, smoothing)


class TakesDeferred:
    takes_deferred_logits = True


def check_fused_loss(vocab_size, sequence_parallel, ignored):
    """Compare head and loss without whole logits with torch, including all gradients."""
    axis = tensor_axis()
    common = {"axis": axis, "sequence_parallel": sequence_parallel, "dtype": F64}
    model, stock = nn.Module(), nn.Module()
    model.embedding = VocabParallelEmbedding(vocab_size, 6, **common)
    model.head = VocabParallelHead(vocab_size, 6, **common)
    stock.embedding = nn.Embedding(vocab_size, 6, dtype=F64)
    stock.head = nn.Linear(6, vocab_size, bias=False, dtype=F64)
    for i, parameter in enumerate(stock.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=i))
    fill(model, stock)
    # More tokens than one chunk.
    ids, target = randint(vocab_size, 2, 160), randint(vocab_size, 2, 160, seed=1)
    target[:, ignored] = -100

    logits = stock.head(stock.embedding(ids).tanh()).flatten(0, 1)
    expected = F.cross_entropy(logits, target.flatten(), reduction="sum", label_smoothing=0.1)
    expected = expected + 0.01 * logits.logsumexp(1)[target.flatten() != -100].square().sum()
    expected.backward()
    outputs = []
    for _ in range(2):
        hidden = model.embedding(ids).tanh()
        with defer_logits(TakesDeferred(), model.head):
            outputs.append(model.head(hidden))
    losses = [linear_cross_entropy(x, target, label_smoothing=0.1, z_loss=0.01) for x in outputs]
    # The second one computes its gradients in backward.
    for loss in losses:
        close(loss, expected, atol=1e-9)
        (0.5 * loss).backward()
    compare_gradients(model, stock, axis)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "ignored"), [(1000, slice(50)), (130, slice(0)), (512, slice(None))]
)
def test_head_and_loss_without_logits_equal_the_unsharded_ones(
    pool, ranks, sequence_parallel, vocab_size, ignored
):
    on_ranks(pool, ranks, check_fused_loss, vocab_size, sequence_parallel, ignored)


def initial_embedding():
    embedding = VocabParallelEmbedding(1000, 3, axis=tensor_axis())
    padding = embedding.stop - embedding.start
    assert not embedding.weight[padding:].any()  # also before initialization
    initialize_parameters(embedding, "layers.0", seed=1)
    assert not embedding.weight[padding:].any()
    assert shard_of(embedding.weight).shape == (1000, 3)
    full = torch.zeros(1000, 3)
    shard_of(embedding.weight).copy_to_full(embedding.weight, full)
    return full


def test_the_initial_embedding_is_equal_for_every_number_of_ranks(pool):
    one = initial_embedding()
    assert one.all()
    for ranks in (2, 4):
        assert torch.equal(sum(pool.run(ranks, initial_embedding)), one)


def refused_ids(ids):
    embedding = VocabParallelEmbedding(1000, 3, axis=tensor_axis())
    with pytest.raises(DataError) as error:
        embedding(torch.tensor([[1, 2], ids]))
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("ids", "named"), [([999, 1000], 1000), ([999, 1023], 1023), ([-1, 2], -1)]
)
def test_an_id_outside_the_vocabulary_is_an_error_with_both_numbers(pool, ranks, ids, named):
    # 1000 to 1023 have padding rows.
    for message in on_ranks(pool, ranks, refused_ids, ids):
        assert message == (
            f"token id {named} is outside the vocabulary of 1000 (0 to 999): was the data made "
            f"with another tokenizer, or is model.vocab_size too small?"
        )


def test_an_embedding_accepts_an_empty_batch():
    embedding = VocabParallelEmbedding(10, 3, axis=ALONE)
    assert embedding(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, 3)


def slice_with_padding(full, axis, width=128):
    """Return this rank's slice of the logits, with NaN as padding."""
    vocab_size = full.shape[-1]
    rows = rows_per_rank(vocab_size, axis.size, width)
    start, stop = local_range(vocab_size, rows, axis.rank)
    local = full.new_full((*full.shape[:-1], rows), torch.nan)
    local[..., : stop - start] = full[..., start:stop]
    return local.requires_grad_()


def check_loss(vocab_size, smoothing, ignored, dtype, scale, tolerance):
    axis = tensor_axis()
    full = (randn(3, 5, vocab_size) * scale).to(dtype)
    target, dloss = randint(vocab_size, 3, 5), randn(3, 5, seed=2)
    target[:, ignored] = 7
    local = slice_with_padding(full, axis)
    loss = vocab_parallel_cross_entropy(
        local,
        target,
        axis=axis,
        vocab_size=vocab_size,
        label_smoothing=smoothing,
        ignore_index=7,
    )
    reference = full.to(F64).requires_grad_()
    expected = F.cross_entropy(
        reference.flatten(0, 1),
        target.flatten(),
        reduction="none",
        label_smoothing=smoothing,
        ignore_index=7,
    ).view(3, 5)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, atol=tolerance, rtol=tolerance)
    expected.backward(dloss)
    loss.backward(dloss.to(loss.dtype))
    start, stop = local_range(vocab_size, local.shape[-1], axis.rank)
    assert local.grad.dtype == dtype
    gradient = local.grad.double()
    torch.testing.assert_close(
        gradient[..., : stop - start],
        reference.grad[..., start:stop],
        atol=tolerance,
        rtol=torch.finfo(dtype).eps,  # the gradient is rounded to its dtype: half of this
    )
    assert not gradient[..., stop - start :].any()


SOME, ALL, NONE = slice(1, 3), slice(None), slice(0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [130, 1000, 1024])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [NONE, SOME, ALL], ids=["none", "some", "all"])
def test_the_loss_equals_f_cross_entropy_of_the_full_logits(
    pool, ranks, vocab_size, smoothing, ignored
):
    on_ranks(pool, ranks, check_loss, vocab_size, smoothing, ignored, F64, 3.0, 1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_low_precision_logits_give_a_loss_in_fp32(pool, ranks, dtype, scale):
    # With logits of several thousand, exp would overflow, and the softmax of the target is 0.
    on_ranks(pool, ranks, check_loss, 1000, 0.1, SOME, dtype, scale, 2e-6)


def check_one_sided_logits():
    """The logits of one rank are so small that their softmax over all ranks is 0."""
    axis = tensor_axis()
    full = randn(4, 256)
    full[:, :128] -= 5000.0
    target = torch.tensor([3, 200, 127, 128])
    local = slice_with_padding(full, axis)
    loss = vocab_parallel_cross_entropy(local, target, axis=axis, vocab_size=256)
    reference = full.requires_grad_()
    expected = F.cross_entropy(reference, target, reduction="none")
    close(loss, expected)
    expected.sum().backward()
    loss.sum().backward()
    close(local.grad, part(reference.grad, axis, 1))


def test_the_loss_is_exact_if_all_logits_of_one_rank_are_far_smaller(pool):
    pool.run(2, check_one_sided_logits)


def kept_for_backward(dtype):
    axis = tensor_axis()
    sizes = []
    local = slice_with_padding(torch.randn(64, 1024).to(dtype), axis)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        vocab_parallel_cross_entropy(local, randint(1024, 64), axis=axis, vocab_size=1024)
    return sum(sizes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_saves_one_fp32_buffer_of_the_local_logits(pool, ranks, dtype):
    per_token = 4 + 8 + 1 + 1  # a factor, a column, two flags
    for kept in on_ranks(pool, ranks, kept_for_backward, dtype):
        assert kept == 64 * (1024 // ranks * 4 + per_token)


def test_the_loss_of_one_token_is_a_scalar():
    logits = torch.randn(128, dtype=F64)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor(5), axis=ALONE, vocab_size=128)
    close(loss, F.cross_entropy(logits, torch.tensor(5)))


def test_a_second_backward_through_the_loss_is_an_error():
    logits = torch.randn(4, 128, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, randint(128, 4), axis=ALONE, vocab_size=128).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("target", [1000, 1023, -1, -99])
def test_a_target_outside_the_vocabulary_is_an_error_with_both_numbers(target):
    with pytest.raises(DataError) as error:
        vocab_parallel_cross_entropy(
            torch.zeros(3, 1024), torch.tensor([-100, 2, target]), axis=ALONE, vocab_size=1000
        )
    assert str(error.value) == (
        f"target {target} is outside the vocabulary of 1000 (0 to 999): was the data made with "
        f"another tokenizer, or is model.vocab_size too small?"
    )


def check_dropout(sequence_parallel):
    axis = tensor_axis()
    full = randn(2, 8, 5)
    torch.manual_seed(9)
    expected, after = nn.Dropout(0.4)(full), torch.rand(3)
    x = (part(full, axis, 1) if sequence_parallel else full).detach().requires_grad_()
    torch.manual_seed(9)
    layer = Dropout(0.4, axis=axis, sequence_parallel=sequence_parallel)
    y = layer(x)
    expected = part(expected, axis, 1) if sequence_parallel else expected
    assert torch.equal(y, expected)
    assert torch.equal(torch.rand(3), after)
    y.sum().backward()
    close(x.grad, (expected != 0).to(F64) / 0.6)
    layer.eval()
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_has_the_mask_of_the_unsharded_model(pool, ranks, sequence_parallel):
    on_ranks(pool, ranks, check_dropout, sequence_parallel)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_with_p_0_keeps_and_with_p_1_zeroes_its_input(pool, p):
    for y in pool.run(2, dropped, p):
        assert torch.equal(y, torch.full((1, 4, 3), 1 - p))


def dropped(p):
    return Dropout(p, axis=tensor_axis(), sequence_parallel=True)(torch.ones(1, 4, 3))

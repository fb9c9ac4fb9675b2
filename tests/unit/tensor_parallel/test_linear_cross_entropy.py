"""The head with its loss, without whole logits, against F.cross_entropy of the logits."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.errors import DataError
from pipemega.layer_costs.tensor_meter import TensorMeter
from pipemega.lora.low_rank import add_adapter
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel import (
    DeferredLogits,
    VocabParallelHead,
    deferred_logits,
    vocab_parallel_cross_entropy,
)
from pipemega.tensor_parallel.deferred_logits import (
    HeadGradients,
    HeadShard,
    defer_logits,
    without_output,
)
from pipemega.tensor_parallel.linear_cross_entropy import (
    count_labels,
    linear_cross_entropy,
    pending_bytes,
)

ALONE = Axis("tensor")
F64 = torch.float64
# Not a multiple of 128: the weight has padding. More tokens than two chunks.
VOCAB, DIM, TOKENS = 150, 8, 700


class TakesDeferred:
    takes_deferred_logits = True

    def __call__(self, output: Any, labels: Any) -> None: ...


LOSS = TakesDeferred()


def make_head(dtype: torch.dtype = F64, vocab: int = VOCAB, dim: int = DIM) -> VocabParallelHead:
    head = VocabParallelHead(vocab, dim, axis=ALONE, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.weight[:vocab].copy_(torch.randn(vocab, dim, generator=generator, dtype=F64))
    return head


def data(ignored: float = 0.0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, TOKENS // 2, DIM, generator=generator, dtype=F64).to(dtype)
    labels = torch.randint(VOCAB, (2, TOKENS // 2), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), labels


def deferred(head: nn.Module, hidden: Tensor, expected: float = 1.0) -> DeferredLogits:
    with defer_logits(LOSS, head, expected):
        output = head(hidden)
    assert isinstance(output, DeferredLogits)
    return output


def whole_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the sum of the losses, by torch and with all logits."""
    logits, flat = F.linear(hidden, weight).flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(logits, flat, reduction="sum", label_smoothing=smoothing)
    return loss + z_loss * logits.logsumexp(1)[flat != -100].square().sum()


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0.0, 0.6, 1.0])
def test_loss_and_gradients_are_those_of_the_logits(
    ignored: float, smoothing: float, z_loss: float
) -> None:
    head, (hidden, labels) = make_head(), data(ignored)
    want_loss = whole_loss(hidden, head.weight[:VOCAB], labels, smoothing, z_loss)
    want = torch.autograd.grad(3 * want_loss, (hidden, head.weight))
    options = {"label_smoothing": smoothing, "z_loss": z_loss}

    with_logits = vocab_parallel_cross_entropy(
        head(hidden), labels, axis=ALONE, vocab_size=VOCAB, **options
    ).sum()
    # The second and third one keep no weight gradient from forward to backward.
    several = [deferred(head, hidden, expected=0.25) for _ in range(3)]
    fused = [linear_cross_entropy(x, labels, factor=0.5, **options) for x in several]
    results = [torch.autograd.grad(3 * with_logits, (hidden, head.weight))]
    results += [torch.autograd.grad(6 * loss, (hidden, head.weight)) for loss in fused]
    for loss in (with_logits, *(2 * loss for loss in fused)):
        torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
    for got in results:
        for mine, theirs in zip(got, want, strict=True):
            assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max().clamp(min=1)
    for got in results[2:]:
        assert all(torch.equal(a, b) for a, b in zip(got, results[1], strict=True))
    assert not any(dw[VOCAB:].any() for _, dw in results)


def test_a_head_with_a_bias_has_its_gradient() -> None:
    head, (hidden, labels) = make_head(), data(0.3)
    bias = nn.Parameter(torch.linspace(-1, 1, len(head.weight), dtype=F64))
    logits = F.linear(hidden, head.weight[:VOCAB], bias[:VOCAB]).flatten(0, 1)
    want_loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    want = torch.autograd.grad(want_loss, (hidden, head.weight, bias))
    output = DeferredLogits(hidden, head.weight, bias, ALONE, VOCAB)
    loss = linear_cross_entropy(output, labels)
    torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
    got = torch.autograd.grad(loss, (hidden, head.weight, bias))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_only_one_micro_batch_keeps_its_weight_gradient() -> None:
    head, (hidden, labels) = make_head(), data()
    with TensorMeter([hidden, labels, head.weight]) as meter:
        before = meter.now
        losses = [linear_cross_entropy(deferred(head, hidden), labels)]
        first = meter.now - before
        losses += [linear_cross_entropy(deferred(head, hidden), labels) for _ in range(3)]
        others = meter.now - before - first
        assert pending_bytes(head.weight) == head.weight.nbytes
        assert first >= head.weight.nbytes + hidden.nbytes
        # Instead: log-sum-exp and targets of the tokens.
        assert others < 3 * 3 * 8 * TOKENS
        losses[2].backward()
        assert pending_bytes(head.weight) == head.weight.nbytes
        losses[0].backward()
    assert pending_bytes(head.weight) == 0


def test_a_discarded_forward_leaves_no_pending_gradient() -> None:
    head, (hidden, labels) = make_head(), data()
    loss = linear_cross_entropy(deferred(head, hidden), labels)
    assert pending_bytes(head.weight)
    del loss
    assert pending_bytes(head.weight) == 0


@pytest.mark.parametrize("frozen", ["head", "hidden"])
@pytest.mark.parametrize("pending", [False, True])
def test_frozen_parts_get_no_gradient(frozen: str, pending: bool) -> None:
    head, (hidden, labels) = make_head(), data()
    if pending:
        waiting = linear_cross_entropy(deferred(head, hidden), labels)
    want = torch.autograd.grad(
        whole_loss(hidden, head.weight[:VOCAB], labels), (hidden, head.weight)
    )
    if frozen == "head":
        head.requires_grad_(False)
    else:
        hidden = hidden.detach()
    loss = linear_cross_entropy(deferred(head, hidden), labels)
    loss.backward()
    grads = [hidden.grad, head.weight.grad]
    kept = 0 if frozen == "head" else 1
    assert grads[1 - kept] is None
    torch.testing.assert_close(grads[kept], want[kept], rtol=0, atol=1e-11)
    if pending:
        del waiting


def test_without_gradients_only_the_loss_is_computed() -> None:
    head, (hidden, labels) = make_head(), data(0.5)
    want = whole_loss(hidden, head.weight[:VOCAB], labels)
    with torch.no_grad(), TensorMeter() as meter:
        loss = linear_cross_entropy(deferred(head, hidden), labels)
    torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
    assert meter.flops == 2 * int((labels != -100).sum()) * VOCAB * DIM
    assert not loss.requires_grad


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_tokens_that_do_not_count_are_not_projected(ignored: float) -> None:
    head, (hidden, labels) = make_head(), data(ignored)
    counted = int((labels != -100).sum())
    with TensorMeter() as meter:
        linear_cross_entropy(deferred(head, hidden), labels).backward()
    assert meter.flops == 3 * 2 * counted * VOCAB * DIM


def fused_step(hidden: Tensor, labels: Tensor, head: VocabParallelHead) -> None:
    linear_cross_entropy(deferred(head, hidden), labels, factor=1e-3).backward()


def plain_step(hidden: Tensor, labels: Tensor, head: VocabParallelHead) -> None:
    losses = vocab_parallel_cross_entropy(
        head(hidden), labels, axis=ALONE, vocab_size=head.num_embeddings
    )
    (losses.sum() * 1e-3).backward()


def meta_step(step: Callable[..., None], dtype: torch.dtype) -> TensorMeter:
    """Run a step of vocabulary 128k, 8,192 tokens and hidden 1,024 on meta; weights count."""
    with torch.device("meta"), TensorMeter() as meter:
        head = VocabParallelHead(128_000, 1024, axis=ALONE, dtype=dtype)
        GradientBuffer([("weight", head.weight)], dtype=torch.float32)
        hidden = torch.empty(1, 8192, 1024, dtype=dtype, requires_grad=True)
        labels = torch.empty(1, 8192, dtype=torch.int64)
        meter.reset_peak()
        step(hidden, labels, head)
    return meter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_needs_a_third_of_the_memory_of_logits(dtype: torch.dtype) -> None:
    plain, fused = meta_step(plain_step, dtype), meta_step(fused_step, dtype)
    assert fused.peak < 0.35 * plain.peak
    # Three products in both.
    assert fused.flops == pytest.approx(plain.flops, rel=1e-3)


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    sizes = list[int]()

    class Sizes(TensorMeter):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__torch_dispatch__(*args, **kwargs)
            sizes.extend(t.numel() for t in (result,) if isinstance(t, Tensor))
            return result

    head, (hidden, labels) = make_head(vocab=2000), data()
    for labels_ in (labels, labels.masked_fill(labels % 2 == 0, -100)):
        sizes.clear()
        with Sizes():
            linear_cross_entropy(deferred(head, hidden), labels_).backward()
        assert 0 < max(sizes) <= 256 * 2000 < TOKENS * 2000


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("ignored", [0.0, 0.6, 1.0])
def test_the_result_is_the_same_if_the_labels_that_count_cannot_be_counted(
    ignored: float, smoothing: float, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for labels that a caller gives on a GPU."""
    path = "pipemega.tensor_parallel.linear_cross_entropy.counted_rows"
    monkeypatch.setattr(path, lambda target, _: (None, target == -100))
    head, (hidden, labels) = make_head(), data(ignored)
    want_loss = whole_loss(hidden, head.weight[:VOCAB], labels, smoothing, z_loss)
    want = torch.autograd.grad(want_loss, (hidden, head.weight))
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    # The second one computes its gradients in backward.
    losses = [linear_cross_entropy(deferred(head, hidden), labels, **options) for _ in range(2)]
    for loss in losses:
        torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
        got = torch.autograd.grad(loss, (hidden, head.weight))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_labels_are_counted_in_host_memory_only() -> None:
    labels = torch.tensor([[-100, 3], [0, -100]])
    assert count_labels(labels) == 2
    assert count_labels(labels.to("meta")) is None
    assert count_labels({"labels": labels}) is None


def test_an_output_that_is_used_otherwise_is_logits() -> None:
    head, (hidden, _) = make_head(), data()

    class Scaled(VocabParallelHead):
        def forward(self, hidden: Tensor) -> Any:
            output: Any = super().forward(hidden)
            return 2 * output

    def output(module: nn.Module) -> Any:
        with defer_logits(LOSS, module):
            return module(hidden)

    scaled = Scaled(VOCAB, DIM, axis=ALONE, dtype=F64)
    scaled.load_state_dict(head.state_dict())
    assert torch.equal(output(scaled), 2 * head(hidden))
    registers = (
        head.register_full_backward_hook,
        head.register_full_backward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
    )
    for register in registers:
        handle = register(lambda *_: None)
        assert isinstance(output(head), Tensor)
        handle.remove()
    handle = head.register_forward_hook(without_output(lambda: None))
    assert isinstance(output(head), DeferredLogits)
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_logits_in_half_precision(dtype: torch.dtype) -> None:
    head, (hidden, labels) = make_head(dtype), data(0.2, dtype)
    exact = make_head(dtype).to(F64), hidden.detach().to(F64).requires_grad_()
    loss = whole_loss(exact[1], exact[0].weight[:VOCAB], labels) / 100
    want = torch.autograd.grad(loss, (exact[1], exact[0].weight))

    def error(loss: Tensor) -> list[float]:
        got = torch.autograd.grad(loss, (hidden, head.weight))
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]

    logits = head(hidden)
    plain = vocab_parallel_cross_entropy(logits, labels, axis=ALONE, vocab_size=VOCAB).sum() / 100
    fused = linear_cross_entropy(deferred(head, hidden), labels, factor=0.01)
    assert fused.dtype == torch.float32
    for mine, theirs in zip(error(fused), error(plain), strict=True):
        assert mine <= 1.25 * theirs < 0.02


def test_small_gradients_do_not_vanish_in_fp16() -> None:
    """Those of one token of 8,192, times a loss scale that makes them fit."""
    head, (hidden, labels) = make_head(torch.float16), data(dtype=torch.float16)
    factor, scale = 1e-8, 2.0**20
    want = whole_loss(hidden.double(), head.weight[:VOCAB].double(), labels)
    (want_dx,) = torch.autograd.grad(want * factor * scale, hidden)
    loss = linear_cross_entropy(deferred(head, hidden, scale), labels, factor=factor)
    (dx,) = torch.autograd.grad(loss, hidden, torch.tensor(scale))
    error = (dx.double() - want_dx.double()).norm() / want_dx.double().norm()
    assert error < 0.01
    # Without the scale most gradients would be zero.
    assert (want_dx.double() / scale).to(torch.float16).count_nonzero() < 0.1 * dx.numel()


def test_a_split_backward_adds_the_weight_gradient_in_the_input_half() -> None:
    head, (hidden, labels) = make_head(), data()
    want = torch.autograd.grad(
        linear_cross_entropy(deferred(head, hidden), labels), (hidden, head.weight)
    )
    buffer = GradientBuffer([("weight", head.weight)])
    queue = WeightGradQueue(buffer)
    enable_split_backward([head], queue)
    for trained in (hidden, hidden.detach()):
        buffer.zero()
        loss = linear_cross_entropy(deferred(head, trained), labels)
        with queue.defer("0"):
            loss.backward()
        assert not queue.pending_weights("0")
        queue.run("0")
        assert torch.equal(buffer.view(head.weight), want[1])
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, want[0])


def test_a_hook_of_the_weight_sees_its_gradient_under_split_backward() -> None:
    head, (hidden, labels) = make_head(), data()
    queue = WeightGradQueue(GradientBuffer([("weight", head.weight)]))
    enable_split_backward([head], queue)
    seen = list[Tensor]()
    head.weight.register_hook(seen.append)
    with queue.defer("0"):
        linear_cross_entropy(deferred(head, hidden), labels).backward()
    assert len(seen) == 1


def test_logits_are_computed_where_someone_needs_them() -> None:
    head, (hidden, _) = make_head(), data()

    def output(loss_fn: Any, layer: nn.Module | None = None) -> Any:
        with defer_logits(loss_fn, layer or head):
            return head(hidden)

    assert isinstance(output(LOSS), DeferredLogits)
    assert isinstance(head(hidden), Tensor)  # outside of the block
    assert isinstance(output(None), Tensor)
    assert isinstance(output(F.cross_entropy), Tensor)  # a loss of the user
    assert isinstance(output(LOSS, nn.Sequential(head)), Tensor)  # a head within another layer
    handle = head.register_forward_hook(lambda module, inputs, y: None)
    assert isinstance(output(LOSS), Tensor)
    handle.remove()
    assert isinstance(output(LOSS), DeferredLogits)
    section: Any = type("Section", (), {"r": 2, "dropout": 0.0, "scale": 1.0})
    head.requires_grad_(False)
    add_adapter(head, section)
    assert isinstance(output(LOSS), Tensor)


@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_labels_of_some_tokens_only_are_an_error(ignored: float) -> None:
    head, (hidden, labels) = make_head(), data(ignored)
    message = rf"the labels \[2, 349\] are 698, and the inputs have {TOKENS} tokens"
    with pytest.raises(DataError, match=message):
        linear_cross_entropy(deferred(head, hidden), labels[:, :-1])
    with pytest.raises(DataError, match=message):
        vocab_parallel_cross_entropy(head(hidden), labels[:, :-1], axis=ALONE, vocab_size=VOCAB)


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    head, (hidden, labels) = make_head(), data()
    labels[0, 1] = VOCAB
    with pytest.raises(DataError, match=rf"target {VOCAB} is outside the vocabulary of {VOCAB} "):
        linear_cross_entropy(deferred(head, hidden), labels)


@pytest.mark.parametrize("cuts", [(0, 75, 150), (0, 150, 150), (0, 10, 130, 150)])
def test_passes_over_parts_of_the_vocabulary_sum_to_the_whole(cuts: tuple[int, ...]) -> None:
    """As vocabulary parallelism runs them: statistics of all parts, then gradients of each."""
    full, (hidden, labels) = make_head(), data()
    hidden.grad = None
    want_loss = whole_loss(hidden, full.weight[:VOCAB], labels, 0.1, 0.01)
    want = torch.autograd.grad(want_loss * 0.5, (hidden, full.weight))
    x, target = hidden.detach().flatten(0, 1), labels.flatten()
    heads = [
        HeadShard(
            torch.cat([full.weight.detach()[a:b], torch.zeros(3, DIM, dtype=F64)]),
            a, b, VOCAB, label_smoothing=0.1, z_loss=0.01,
        )
        for a, b in pairwise(cuts)
    ]  # fmt: skip
    gathered = torch.stack([deferred_logits.statistics(head, x, target) for head in heads])
    losses, lse = deferred_logits.combine(heads[0], gathered)
    torch.testing.assert_close(losses.sum(), want_loss, rtol=1e-12, atol=0)
    dx = torch.zeros_like(x)
    for head in heads:
        into = HeadGradients.of(head, x, True, True, False)
        deferred_logits.gradients(head, x, target, lse, into, 0.5)
        assert into.hidden is not None
        assert into.weight is not None
        dx += into.hidden
        torch.testing.assert_close(
            into.weight[: head.width], want[1][head.start : head.stop], rtol=0, atol=1e-12
        )
        assert not into.weight[head.width :].any()
    torch.testing.assert_close(dx, want[0].flatten(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "dtype", "tokens", "length"),
    [
        (1024, torch.float32, 8192, 1024),
        (1024, torch.bfloat16, 8192, 512),
        (64, torch.float32, 700, 234),  # three chunks of nearly equal length
        (4096, torch.float64, 3000, 1000),
        (64, torch.float32, 100, 100),
        (64, torch.float32, 0, 1),
    ],
)
def test_the_logits_of_a_chunk_take_as_much_memory_as_the_weight(
    dim: int, dtype: torch.dtype, tokens: int, length: int
) -> None:
    weight = torch.empty(8, dim, dtype=dtype, device="meta")
    assert deferred_logits.chunk_length(HeadShard(weight, 0, 8, 8), tokens) == length

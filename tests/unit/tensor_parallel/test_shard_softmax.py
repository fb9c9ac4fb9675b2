"""The passes S, C and T over the shards of a head give what autograd gives for the whole head."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.cross_entropy import (
    HeadRows,
    Partial,
    TokenObjective,
    combine,
    hidden_gradient,
    logit_gradient,
    output_pass,
    partial_shapes,
)

TOKENS, HIDDEN, VOCABULARY = 7, 5, 20


def passes(weight, x, target, dloss, loss, cuts):
    """Run S on every shard, C, and T on every shard; return losses, dx and dW."""
    shards = []
    for start, stop in itertools.pairwise(cuts):
        rows = weight[start:stop]
        padded = torch.cat([rows, torch.full((3, HIDDEN), 7.0).to(rows.dtype)])
        shards.append(HeadRows(padded, start, stop))
    done = [output_pass(shard, x, target, loss, gradient=True) for shard in shards]
    for part, _ in done:
        shapes = partial_shapes(TOKENS, HIDDEN, x.dtype, loss, gradient=True)
        assert [(tuple(t.shape), t.dtype) for t in part.tensors()] == shapes
    parts = [Partial.of(part.tensors()) for part, _ in done]
    combined = combine(parts, target, loss, Axis("tensor"))
    dx = hidden_gradient(parts, combined, dloss, loss)
    normalizers = torch.stack([combined.normalizer, dloss])
    dw = []
    for shard, (part, kept) in zip(shards, done, strict=True):
        dw.append(logit_gradient(shard, target, kept, normalizers, loss).t() @ x)
        alone, nothing = output_pass(shard, x, target, loss, gradient=False)
        assert nothing is None
        torch.testing.assert_close(alone.statistics, part.statistics)
    return combined.losses, dx, torch.cat(dw)


def oracle(weight, x, target, dloss, loss):
    weight, x = weight.double().requires_grad_(), x.double().requires_grad_()
    logits = x @ weight.t()
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=loss.label_smoothing)
    counts = target != -100
    losses = losses + loss.z_loss * logits.logsumexp(1).square() * counts
    losses.backward(dloss.double())
    return losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize("cuts", [[0, 20], [0, 8, 16, 20], [0, 13, 20, 20]], ids=str)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-2)])
def test_all_shards_together_are_the_whole_head(cuts, smoothing, z_loss):
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    target = torch.tensor([0, 7, -100, 8, 19, 12, 3])
    dloss = torch.rand(TOKENS, dtype=torch.float64).masked_fill(target == -100, 0.0)
    loss = TokenObjective(VOCABULARY, smoothing, z_loss)
    found = passes(weight, x, target, dloss, loss, cuts)
    for one, other in zip(found, oracle(weight, x, target, dloss, loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_confident_token_in_bf16_keeps_its_small_gradient():
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    target = torch.arange(TOKENS)
    x = (4 * weight[target] / weight[target].float().norm(dim=1)[:, None]).bfloat16()
    dloss, loss = torch.ones(TOKENS), TokenObjective(VOCABULARY)
    found = passes(weight, x, target, dloss, loss, [0, 8, 20])
    expected = oracle(weight, x, target, dloss, loss)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()


def test_large_softmax_is_computed_in_chunks(monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(VOCABULARY, HIDDEN), torch.randn(TOKENS, HIDDEN)
    target, dloss = torch.arange(TOKENS), torch.ones(TOKENS)
    whole = passes(weight, x, target, dloss, TokenObjective(VOCABULARY), [0, 20])
    monkeypatch.setattr("pipemega.tensor_parallel.cross_entropy._CHUNK", 40)
    chunked = passes(weight, x, target, dloss, TokenObjective(VOCABULARY), [0, 20])
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other)

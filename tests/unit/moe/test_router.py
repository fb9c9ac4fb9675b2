"""The router of a mixture of experts, against its formulas written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipemega.moe import router as router_module
from pipemega.moe.router import Router, RouterConfig
from pipemega.parameters import initialize_parameters, normal
from pipemega.pipeline.model.batch_norm import uncounted
from pipemega.pipeline.model.recompute import recompute

BATCH, LENGTH, HIDDEN, EXPERTS, TOPK = 3, 5, 4, 8, 2


@pytest.fixture(autouse=True)
def factor_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have left the factor of their last run."""
    monkeypatch.setattr(router_module, "auxiliary_factor", lambda: 1.0)


def router(**options: Any) -> Router:
    torch.set_default_dtype(torch.float64)
    try:
        config = RouterConfig(num_experts=EXPERTS, topk=options.pop("topk", TOPK), **options)
        built = Router(config, HIDDEN, normal(1.0))
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_parameters(built, "router", seed=1)
    return built.train()


def tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)


def logits(built: Router, x: Tensor) -> Tensor:
    return (x @ built.weight.t()).flatten(0, 1)


def gradient_of(built: Router, x: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the gradient of the weight that comes from the auxiliary losses alone."""
    built.weight.grad = None
    _, weights = built(x, counted)
    (weights * 0).sum().backward()
    assert built.weight.grad is not None
    return built.weight.grad.clone()


def test_the_default_weights_are_a_softmax_over_the_chosen_experts() -> None:
    built, x = router(), tokens()
    z = logits(built, x)
    experts, weights = built(x)
    assert torch.equal(experts, z.topk(TOPK).indices)
    torch.testing.assert_close(weights, z.gather(1, experts).softmax(1))
    # As a softmax over all of which the chosen ones are normalized (Mixtral).
    q = z.softmax(1).gather(1, experts)
    torch.testing.assert_close(weights, q / q.sum(1, keepdim=True))


def test_softmax_before_the_choice_and_the_scaling_factor() -> None:
    built, x = router(pre_softmax=True, topk=1, topk_scaling_factor=2.5), tokens()
    experts, weights = built(x)
    torch.testing.assert_close(weights, 2.5 * logits(built, x).softmax(1).gather(1, experts))


def test_sigmoid_scores_are_normalized_and_the_bias_only_chooses() -> None:
    built, x = router(score_function="sigmoid", expert_bias=True), tokens()
    assert built.expert_bias is not None
    built.expert_bias[3] = 10.0
    experts, weights = built(x)
    assert (experts == 3).any(1).all()
    q = logits(built, x).sigmoid()
    assert torch.equal(experts, (q + built.expert_bias).topk(TOPK).indices)
    chosen = q.gather(1, experts)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))


def test_a_token_gets_experts_of_the_best_groups_only() -> None:
    built, x = router(topk=4, score_function="sigmoid", num_groups=4, group_topk=2), tokens()
    experts, _ = built(x)
    groups = logits(built, x).sigmoid().view(-1, 4, 2)
    best = groups.topk(2).values.sum(-1).topk(2).indices
    assert [sorted({e // 2 for e in row}) for row in experts.tolist()] == [
        sorted(row) for row in best.tolist()
    ]


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss"])
def test_the_auxiliary_loss_has_the_gradient_of_its_formula(kind: Any, score_function: Any) -> None:
    built = router(
        aux_loss_coeff=0.3, load_balancing_type=kind, score_function=score_function, topk=2
    )
    x = tokens()
    got = gradient_of(built, x)
    z = x @ built.weight.t()
    p = z.softmax(-1)
    if score_function == "sigmoid":
        q = z.sigmoid()
        p = q / q.sum(-1, keepdim=True)
    if kind == "aux_loss":
        p = p.view(1, -1, EXPERTS)
    total = torch.zeros((), dtype=torch.float64)
    for sample in p:
        counts = torch.bincount(sample.topk(TOPK).indices.flatten(), minlength=EXPERTS)
        length = len(sample)
        total = total + EXPERTS / (TOPK * length**2) * (counts * sample.sum(0)).sum()
    times = BATCH if kind == "aux_loss" else 1
    (want,) = torch.autograd.grad(0.3 * times * total, built.weight)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_balanced_experts_have_an_auxiliary_loss_of_one() -> None:
    built = router()
    z = torch.zeros(1, EXPERTS, EXPERTS, dtype=torch.float64)
    for token in range(EXPERTS):
        z[0, token, token] = z[0, token, (token + 1) % EXPERTS] = 1e-9
    assert float(router_module._balance_loss(z, built.config, None)) == pytest.approx(1.0)


def test_the_loss_of_a_sample_does_not_depend_on_its_micro_batch() -> None:
    built, x = router(aux_loss_coeff=0.3, z_loss_coeff=0.05), tokens()
    whole = gradient_of(built, x)
    alone = sum(gradient_of(built, sample) for sample in x.split(1))
    torch.testing.assert_close(whole, alone, rtol=1e-12, atol=1e-14)


def test_the_z_loss_is_the_square_of_the_log_sum_exp() -> None:
    built, x = router(z_loss_coeff=0.05), tokens()
    got = gradient_of(built, x)
    z = x @ built.weight.t()
    (want,) = torch.autograd.grad(0.05 * z.logsumexp(-1).square().sum() / LENGTH, built.weight)
    torch.testing.assert_close(got, want)


def test_padding_counts_in_no_loss_and_for_no_bias() -> None:
    built = router(aux_loss_coeff=0.3, z_loss_coeff=0.05, expert_bias=True)
    x, counted = tokens(), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    counted[:, 3:] = False
    got = gradient_of(built, x, counted)
    assert built.sums.sum() == BATCH * 3 * TOPK
    # Other padding gives the same losses.
    changed = x.clone()
    changed[:, 3:] = tokens(seed=5)[:, 3:]
    torch.testing.assert_close(got, gradient_of(built, changed, counted), rtol=1e-12, atol=1e-14)


def test_a_micro_batch_without_samples_adds_no_loss_and_no_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, x = router(aux_loss_coeff=0.3, expert_bias=True), tokens()
    with uncounted():
        assert not gradient_of(built, x).any()
    assert not built.sums.any()
    built.eval()
    assert not gradient_of(built, x).any()
    assert not built.sums.any()


def test_the_bias_moves_towards_equal_numbers_of_tokens() -> None:
    built = router(expert_bias=True, bias_update_rate=0.01)
    built.update(torch.tensor([4.0, 0, 2, 2, 2, 2, 2, 2], dtype=torch.float64))
    assert built.expert_bias is not None
    assert built.expert_bias.tolist() == pytest.approx([-0.01, 0.01] + [0] * 6)


def test_a_recomputation_has_the_choices_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may choose another expert the second time, and its rank would wait for the token."""
    built, x = router(expert_bias=True), tokens().requires_grad_()
    seen: list[Tensor] = []
    weights_of = built._weights

    def noted(z: Tensor, experts: Tensor) -> Tensor:
        seen.append(experts)
        return weights_of(z, experts)

    monkeypatch.setattr(built, "_weights", noted)

    def run(x: Tensor) -> Tensor:
        if seen:  # as if a kernel rounded differently
            with torch.no_grad():
                built.weight.neg_()
        weights: Tensor = built(x).weights
        return weights

    recompute(run, x, restore_rng=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert built.sums.sum() == BATCH * LENGTH * TOPK, "counted once"


def test_the_gradient_of_auxiliary_losses_starts_from_the_factor_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, x = router(aux_loss_coeff=0.3), tokens()
    once = gradient_of(built, x)
    monkeypatch.setattr(router_module, "auxiliary_factor", lambda: 8.0)
    torch.testing.assert_close(gradient_of(built, x), 8 * once)


def test_losses_and_tokens_are_counted_if_they_are_recorded() -> None:
    built, x = router(aux_loss_coeff=0.3, z_loss_coeff=0.05), tokens()
    built(x)
    assert not built.sums.any()
    assert not built.loss_sums.any()
    built.is_recorded = True
    recompute(built, x.requires_grad_())[1].sum().backward()
    with uncounted():
        built(x)
    with torch.no_grad():
        built.eval()(x)
    z = x.detach() @ built.weight.detach().t()
    chosen = torch.zeros_like(z).scatter_(-1, z.topk(TOPK).indices, 1.0)
    assert torch.equal(built.sums, chosen.sum((0, 1)))
    balance = EXPERTS / (TOPK * LENGTH**2) * (chosen.sum(1) * z.softmax(-1).sum(1)).sum()
    squares = z.logsumexp(-1).square().sum() / LENGTH
    torch.testing.assert_close(built.loss_sums, torch.stack([balance, squares]))

"""The router of a mixture of experts: it chooses the experts of each token, and their weights.

    z = x W_rᵀ      q = softmax(z) or sigmoid(z)      chosen = the K experts with the largest q + b

    softmax                w = softmax over the chosen z
    softmax, pre_softmax   w = q of the chosen
    sigmoid                w = q / sum of the chosen q             then w · topk_scaling_factor

The bias b only chooses. It is no parameter: after each step it grows for the experts that got fewer
tokens than the mean, and shrinks for the others.

Auxiliary losses have a gradient and are in no loss that is logged. Each is a mean over the samples
of the step, so that it does not depend on the mesh and, except for "aux_loss", on the size of the
micro-batches:

    seq_aux_loss   α E / (K s²) · sum over experts of (choices in the sample) · (sum of P)
    aux_loss       the same with choices and P of the micro-batch
    z-loss         ζ / s · sum over tokens of logsumexp(z)²

P is softmax(z), or sigmoid(z) over its sum; choices are counted by P, without the bias.

Sources: Fedus et al. 2021, arXiv:2101.03961; DeepSeek-AI 2024, arXiv:2412.19437 (bias, loss of
each sample); Zoph et al. 2022, arXiv:2202.08906 (z-loss).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.parameters import InitMethod, Shard, attach_shard
from pipemega.pipeline.microbatch_loss import auxiliary_factor
from pipemega.pipeline.model.batch_norm import DeferredStatistics, are_counted
from pipemega.pipeline.model.recompute import remembered


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Options of a router, with Megatron's names without `moe_router_`.

    Args:
        num_experts: E.
        topk: K, the experts of a token.
        score_function: the function from z to q.
        pre_softmax: softmax over all experts, not over the chosen ones.
        num_groups, group_topk: choose only within the `group_topk` best of `num_groups` groups of
            experts; None: among all.
        topk_scaling_factor: factor of the weights; None: 1.
        load_balancing_type, aux_loss_coeff, z_loss_coeff: the auxiliary losses.
        expert_bias, bias_update_rate: choose with the bias b, which changes by this rate.
    """

    num_experts: int
    topk: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    topk_scaling_factor: float | None = None
    load_balancing_type: Literal["seq_aux_loss", "aux_loss"] = "seq_aux_loss"
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    expert_bias: bool = False
    bias_update_rate: float = 1e-3


class Routing(NamedTuple):
    """The result of a router.

    Args:
        experts: the chosen experts: [tokens, K] int64.
        weights: their weights: [tokens, K], fp32 or wider.
    """

    experts: Tensor
    weights: Tensor


class RouterStatistics(nn.Module, DeferredStatistics):
    """The load of experts in the current step, and the auxiliary losses of their router.

    Attributes:
        sums: tokens of each expert, if there is a bias or `is_recorded`: [E] fp64.
        loss_sums: the losses without their coefficients, as sums over the samples, if
            `is_recorded`: [balance loss, z-loss] fp64; 0: has no coefficient.
        is_recorded: whether loads and losses are recorded.
    """

    step_buffers = ("sums", "loss_sums")

    loss_sums: Tensor
    is_recorded = False

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config, self.updates_statistics = config, config.expert_bias
        sums, losses = (torch.zeros(n, dtype=torch.float64) for n in (config.num_experts, 2))
        self.register_buffer("sums", sums, persistent=False)
        self.register_buffer("loss_sums", losses, persistent=False)

    def count(self, experts: Tensor, counted: Tensor | None = None) -> None:
        """Count the tokens of each expert.

        Args:
            experts: the chosen experts: [..., K].
            counted: whether a token counts: [...]; None: all count.
        """
        is_used = self.updates_statistics or self.is_recorded
        if self.training and is_used and self.counts():
            # Integers in fp64: exact, whatever their order.
            ones = torch.ones_like(experts, dtype=torch.float64)
            if counted is not None:
                ones *= counted.unsqueeze(-1)
            self.sums.scatter_add_(0, experts.flatten(), ones.flatten())

    def record(self, place: int, loss: Tensor) -> None:
        """Add a loss to `loss_sums`."""
        if self.is_recorded and self.counts():
            self.loss_sums[place] += loss.detach()


class Router(RouterStatistics):
    """Chooses the experts of tokens; every tensor rank computes the same from all tokens.

    Args:
        hidden_size: features of a token.
        init_method: initializes the weight.

    Attributes:
        expert_bias: b, [E] fp32; None: there is none.

    Shape:
        x [batch, sequence, hidden]; counted [batch, sequence], None for all tokens
        ->  `Routing` of batch * sequence tokens

    Source: see the module.
    """

    expert_bias: Tensor | None

    def __init__(self, config: RouterConfig, hidden_size: int, init_method: InitMethod) -> None:
        super().__init__(config)
        shard = Shard((config.num_experts, hidden_size), init_method=init_method)
        self.weight = attach_shard(nn.Parameter(torch.full(shard.shape, torch.nan)), shard)
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Routing:
        # Rounded scores would choose other experts.
        dtype = torch.promote_types(x.dtype, torch.float32)
        z = F.linear(x.to(dtype), self.weight.to(dtype))  # [batch, sequence, E]
        experts = remembered(lambda: self._choose(z, counted))
        weights = self._weights(z, experts)
        if self.training:
            weights = with_auxiliary_losses(weights, z, self.config, counted, self.record)
        return Routing(experts.flatten(0, 1), weights.flatten(0, 1))

    def _choose(self, z: Tensor, counted: Tensor | None) -> Tensor:
        """Return the experts of each token [batch, sequence, K], and count the tokens."""
        c, z = self.config, z.detach()
        q = z.sigmoid() if c.score_function == "sigmoid" else z.softmax(-1)
        if self.expert_bias is not None:
            q = q + self.expert_bias
        if c.num_groups is not None and c.group_topk is not None:
            q = q.masked_fill(~_best_groups(q, c.num_groups, c.group_topk, c.topk), -torch.inf)
        experts = q.topk(c.topk, dim=-1).indices
        self.count(experts, counted)
        return experts

    def _weights(self, z: Tensor, experts: Tensor) -> Tensor:
        c = self.config
        if c.score_function == "sigmoid":
            weights = z.sigmoid().gather(-1, experts)
            if c.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif c.pre_softmax:
            weights = z.softmax(-1).gather(-1, experts)
        else:
            weights = z.gather(-1, experts).softmax(-1)
        return weights if c.topk_scaling_factor is None else weights * c.topk_scaling_factor

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Move the bias towards equal numbers of tokens."""
        if self.expert_bias is not None:
            rate = self.config.bias_update_rate
            self.expert_bias += (rate * torch.sign(sums.mean() - sums)).to(self.expert_bias.dtype)

    def extra_repr(self) -> str:
        return f"{self.config.num_experts} experts, {self.config.topk} per token"


def with_auxiliary_losses(
    weights: Tensor,
    z: Tensor,
    config: RouterConfig,
    counted: Tensor | None = None,
    record: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Return the weights, whose backward also starts the backward of the auxiliary losses.

    Args:
        weights: the weights of the chosen experts, of any shape.
        z: the logits of a router: [batch, sequence, E].
        counted: see `Router`.
        record: gets the balance loss (0) and the z-loss (1), as sums over the samples.
    """
    if not torch.is_grad_enabled():
        return weights
    found: list[tuple[int, float, Tensor]] = []
    if config.aux_loss_coeff:
        found.append((0, config.aux_loss_coeff, _balance_loss(z, config, counted)))
    if config.z_loss_coeff:
        squares = z.logsumexp(-1).square()
        if counted is not None:
            squares = squares * counted
        found.append((1, config.z_loss_coeff, squares.sum() / z.shape[1]))
    if not found:
        return weights
    if record is not None:
        for place, _, loss in found:
            record(place, loss)
    total = torch.stack([coefficient * loss for _, coefficient, loss in found]).sum()
    added: Tensor = _WithLoss.apply(weights, total)  # type: ignore[no-untyped-call]
    return added


def _balance_loss(z: Tensor, config: RouterConfig, counted: Tensor | None) -> Tensor:
    """Return the sum over the samples of the loss that balances the experts."""
    c, (batch, length, _) = config, z.shape
    if c.score_function == "sigmoid":
        q = z.sigmoid()
        p = q / (q.sum(-1, keepdim=True) + 1e-20)
    else:
        p = z.softmax(-1)
    chosen = torch.zeros_like(p, requires_grad=False)
    chosen.scatter_(-1, remembered(lambda: p.detach().topk(c.topk, dim=-1).indices), 1.0)
    if counted is not None:
        p, chosen = p * counted.unsqueeze(-1), chosen * counted.unsqueeze(-1)
    factor = c.num_experts / (c.topk * length**2)
    if c.load_balancing_type == "seq_aux_loss":
        return factor * (chosen.sum(1) * p.sum(1)).sum()
    # The mean over batch * length tokens, counted for each sample.
    return factor / batch * (chosen.sum((0, 1)) * p.sum((0, 1))).sum()


def _best_groups(q: Tensor, groups: int, best: int, topk: int) -> Tensor:
    """Return which experts are in the best groups: [batch, sequence, E] bool.

    The score of a group is the sum of its topk / best largest scores.
    """
    by_group = q.view(*q.shape[:-1], groups, -1)
    scores = by_group.topk(topk // best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, scores.topk(best, dim=-1).indices, True)
    return kept.unsqueeze(-1).expand_as(by_group).flatten(-2)


class _WithLoss(torch.autograd.Function):
    """Identity on the weights; its backward also starts from the auxiliary losses."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        factor = auxiliary_factor() if are_counted() else 0.0
        return gradients[0], torch.full((), factor, dtype=ctx.dtype, device=ctx.device)

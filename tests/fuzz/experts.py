"""Mixtures of experts for random models, and the same in plain torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import WeightedLoss
from pipemega.distributed.mesh import Axis
from pipemega.moe.experts import Experts, MixtureOfExperts
from pipemega.moe.router import Router, RouterConfig
from pipemega.parameters import normal

WIDTH, LENGTH, FFN = 4, 4, 6
# Kind of layer -> options of the router, and which shared expert it has: "", "shared", "gated".
KINDS: dict[str, tuple[Mapping[str, Any], str]] = {
    "experts": ({"aux_loss_coeff": 0.3}, ""),
    "experts, gated": ({"z_loss_coeff": 0.05}, "gated"),
    "experts, softmax first": (
        {"topk": 1, "pre_softmax": True, "aux_loss_coeff": 0.2, "z_loss_coeff": 0.1}, "",
    ),
    "experts, groups": (
        {
            "num_experts": 8, "topk": 4, "score_function": "sigmoid", "num_groups": 4,
            "group_topk": 2, "topk_scaling_factor": 2.5, "aux_loss_coeff": 0.3,
            "expert_bias": True, "bias_update_rate": 0.05,
        },
        "shared",
    ),
    "experts, bias": ({"expert_bias": True, "bias_update_rate": 0.1, "z_loss_coeff": 0.05}, ""),
    "experts, aux_loss": (
        {"score_function": "sigmoid", "load_balancing_type": "aux_loss", "aux_loss_coeff": 0.3},
        "shared",
    ),
}  # fmt: skip


class Mixture(nn.Module):
    """x + a mixture of experts.

    Args:
        kind: a key of `KINDS`.
        tensor, expert: axes of the mesh.

    Attributes:
        is_plain: compute by the formulas, without pipemega.
        loss: of the last plain forward: the sum over samples of the auxiliary losses.
        counts: choices of each expert in the plain forwards of the step.
    """

    def __init__(self, kind: str, tensor: Axis, expert: Axis) -> None:
        super().__init__()
        options, self.shared_kind = KINDS[kind]
        self.config = config = RouterConfig(**{"num_experts": 4, "topk": 2, **options})
        init = normal(0.5)
        experts = Experts(
            config.num_experts, WIDTH, FFN, gated=False, activation=torch.tanh, up_init=init,
            down_init=init, bias=True, expert=expert, tensor=tensor,
        )  # fmt: skip
        self.moe = MixtureOfExperts(
            Router(config, WIDTH, init),
            experts,
            shared=nn.Linear(WIDTH, WIDTH) if self.shared_kind else None,
            shared_gate=nn.Linear(WIDTH, 1) if self.shared_kind == "gated" else None,
            expert=expert,
            tensor=tensor,
        )
        self.is_plain, self.loss = False, torch.zeros(())
        self.counts = torch.zeros(config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._plain(x) if self.is_plain else self.moe(x)
        return x + y

    def _plain(self, x: Tensor) -> Tensor:
        c, moe, up, down = self.config, self.moe, self.moe.experts.up, self.moe.experts.down
        z = x @ moe.router.weight.T
        q = z.sigmoid() if c.score_function == "sigmoid" else z.softmax(-1)
        chosen = self._chosen(q.detach())
        if c.score_function == "sigmoid":
            w = q * chosen / (q * chosen).sum(-1, keepdim=True)
            p = q / q.sum(-1, keepdim=True)
        else:
            p = q
            w = q * chosen
            if not c.pre_softmax:
                w = w / w.sum(-1, keepdim=True)
        w = w * (c.topk_scaling_factor or 1.0)
        y = torch.zeros_like(x)
        for e in range(c.num_experts):
            assert up.bias is not None
            assert down.bias is not None
            hidden = torch.tanh(F.linear(x, up.weight[e], up.bias[e]))
            y = y + w[..., e : e + 1] * F.linear(hidden, down.weight[e], down.bias[e])
        if self.training:
            self.counts += chosen.sum((0, 1))
        best = torch.zeros_like(p).scatter(-1, p.topk(c.topk, -1).indices, 1.0)
        groups = [slice(n, n + 1) for n in range(len(x))]
        if c.load_balancing_type == "aux_loss":
            groups = [slice(None)] * len(x)
        loss = torch.zeros(())
        for group in groups:
            shares = best[group].sum((0, 1)) / (c.topk * best[group].shape[0] * LENGTH)
            loss = loss + c.aux_loss_coeff * c.num_experts * (shares * p[group].mean((0, 1))).sum()
        self.loss = loss + c.z_loss_coeff * z.logsumexp(-1).square().mean(1).sum()
        if moe.shared is not None:
            shared = moe.shared(x)
            y = y + (shared if moe.shared_gate is None else shared * moe.shared_gate(x).sigmoid())
        return y

    def _chosen(self, q: Tensor) -> Tensor:
        """Return 1 for the chosen experts of each token, 0 for the others."""
        c, bias = self.config, self.moe.router.expert_bias
        q = q if bias is None else q + bias
        if c.num_groups is not None and c.group_topk is not None:
            by_group = q.unflatten(-1, (c.num_groups, -1))
            scores = by_group.topk(c.topk // c.group_topk, -1).values.sum(-1)
            worst = scores.topk(c.group_topk, -1).values[..., -1:]
            q = by_group.masked_fill((scores < worst).unsqueeze(-1), -1.0).flatten(-2)
        return torch.zeros_like(q).scatter(-1, q.topk(c.topk, -1).indices, 1.0)

    def end_step(self) -> None:
        """Move the bias, if the layer is plain."""
        if (bias := self.moe.router.expert_bias) is not None:
            signs = torch.sign(self.counts.mean() - self.counts)
            bias += (self.config.bias_update_rate * signs).to(bias.dtype)
        self.counts.zero_()


def ignoring_loss(output: Tensor, labels: Tensor) -> WeightedLoss:
    """Return the squared errors of the tokens that count, as the GPT does: by sequence lengths."""
    errors = (output - labels).square().mean(-1) * _count(labels)
    return WeightedLoss(errors.sum() / LENGTH, _weight(labels))


def _count(labels: Tensor) -> Tensor:
    return labels[..., 0] < 0.3


def _weight(labels: Tensor) -> float:
    return float(_count(labels).sum()) / LENGTH


# As in the GPT.
ignoring_loss.weight_of_labels = _weight  # type: ignore[attr-defined]

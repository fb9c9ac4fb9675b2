"""Experts of transformers with two grouped products, whose weight gradients can be deferred.

    tokens sorted by expert  ->  product with gate_up  ->  gate  ->  product with down  ->  sum

Registered as one of the implementations that transformers chooses from
(`config._experts_implementation`), so every class of experts that offers a choice uses it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipemega.hf.installed_transformers import import_transformers
from pipemega.pipeline.deferred_gradients import grouped_linear

IMPLEMENTATION = "pipemega"


def register_experts() -> None:
    """Make the implementation known to transformers."""
    import_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def enable_deferral(layer: nn.Module) -> None:
    """Let split backward defer the weight gradients of the experts in `layer`."""
    for module in layer.modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "down_proj"):
            vars(module)["grouped_product"] = grouped_linear
            # The sizes of its products depend on the values that the router computes.
            vars(module)["uncompiled_methods"] = ("forward",)


def experts_forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of the chosen experts.

    Shape:
        hidden [tokens, hidden], index and weights [tokens, chosen]  ->  [tokens, hidden]
    """
    chosen = index.shape[-1]
    expert, order = torch.sort(index.reshape(-1), stable=True)  # [tokens * chosen]
    product = getattr(experts, "grouped_product", grouped_linear)
    counts = _tokens_per_expert(expert, experts.num_experts)

    def apply(x: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        y: Tensor = product(x, weight, counts, experts.is_transposed)
        return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y

    x = hidden[order // chosen]
    if experts.has_gate:
        x = experts._apply_gate(apply(x, "gate_up_proj"))
    else:
        x = experts.act_fn(apply(x, "up_proj"))
    x = apply(x, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # transformers 5.9 has none
        x = experts.post_expert_norm(x)
    x = x * weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return x[back].view(len(hidden), chosen, -1).sum(1).to(hidden.dtype)


def _tokens_per_expert(expert: Tensor, num_experts: int) -> Tensor:
    """Return the number of entries of each expert; equal shares on the meta device."""
    if expert.is_meta:
        return torch.tensor([len(e) for e in torch.tensor_split(expert, num_experts)], device="cpu")
    return torch.bincount(expert, minlength=num_experts)

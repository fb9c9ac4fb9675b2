"""Experts of a transformers model: grouped products, on the expert axis, with auxiliary losses.

    tokens sorted by expert  ->  product with gate_up  ->  gate  ->  product with down  ->  sum

Registered as one of the implementations that transformers chooses from
(`config._experts_implementation`), so every class of experts that offers a choice uses it. The
exchange of tokens, and the sum over tensor ranks, are those of `pipemega.moe`. The weight gradients
can be deferred.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipelineError
from pipemega.hf.families import SCORE_FUNCTIONS, divided_experts
from pipemega.hf.placeholders import import_transformers
from pipemega.moe.dispatch import Dispatch
from pipemega.moe.router import RouterConfig, RouterStatistics, with_auxiliary_losses
from pipemega.parameters import attach_shard, shard_of
from pipemega.pipeline.model.recompute import remembered
from pipemega.pipeline.split_backward import grouped_linear

IMPLEMENTATION = "pipemega"


def register_experts() -> None:
    """Make the implementation known to transformers."""
    import_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def are_exchangeable(module: nn.Module) -> bool:
    """Return whether a module of experts runs `experts_forward`."""
    return hasattr(module, "_apply_gate") and hasattr(module, "down_proj")


def enable_deferral(layer: nn.Module) -> None:
    """Let split backward defer the weight gradients of the experts in `layer`."""
    for module in layer.modules():
        if are_exchangeable(module):
            # No other implementation, which a config may name, knows the axes of the mesh.
            vars(module)["forward"] = partial(experts_forward, module)
            vars(module)["grouped_product"] = grouped_linear
            # The sizes of its products depend on the values that the router computes.
            vars(module)["uncompiled_methods"] = ("forward",)


def divide_experts(layer: nn.Module, config: Any, expert: Axis) -> None:
    """Keep the experts of this rank of the expert axis in `layer`, on meta.

    Raises:
        ConfigError: the number of experts is not a multiple of the ranks.
    """
    if expert.size == 1:
        return
    for _, experts in _experts_of(layer, config):
        number: int = experts.num_experts
        if number % expert.size:
            raise ConfigError(
                f"{config.model_type} has {number} experts, which is no multiple of mesh.expert "
                f"({expert.size}), over which they are divided: set mesh.expert to a divisor",
                on_every_rank=True,
            )
        vars(experts)["expert_axis"] = expert
        local = number // expert.size
        rows = (expert.rank * local, (expert.rank + 1) * local)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            own = nn.Parameter(parameter.new_empty(local, *parameter.shape[1:]))
            setattr(experts, name, attach_shard(own, replace(shard_of(parameter), rows=rows)))


def check_expert_ranks(layers: list[nn.Module], config: Any, ranks: int) -> None:
    """Check that `mesh.expert` divides experts of some layer.

    Raises:
        ConfigError: the model has no experts, or transformers has no plan to divide them.
    """
    if any(True for layer in layers for _ in _experts_of(layer, config)):
        return
    has_experts = any(are_exchangeable(module) for layer in layers for module in layer.modules())
    why = "transformers has no plan to divide its experts (base_model_ep_plan)"
    raise ConfigError(
        f"mesh.expert is {ranks}, and the family {config.model_type!r} cannot use it: "
        f"{why if has_experts else 'it has no experts'}; set mesh.expert to 1",
        on_every_rank=True,
    )


def auxiliary_losses(
    description: Any, aux_loss_coeff: float, z_loss_coeff: float
) -> RouterConfig | None:
    """Return the auxiliary losses of a `ModelDescription`, whose numbers of experts are 0.

    None: both coefficients are 0.

    Raises:
        ConfigError: the routers of the family are not known.
    """
    if not (aux_loss_coeff or z_loss_coeff):
        return None
    family = description.config.model_type
    if family not in SCORE_FUNCTIONS:
        raise ConfigError(
            f"model.moe_aux_loss_coeff and model.moe_z_loss_coeff are for the routers of "
            f"{', '.join(SCORE_FUNCTIONS)}, and the model is of family {family!r}: set them to 0",
            on_every_rank=True,
        )
    return RouterConfig(
        num_experts=0,
        topk=0,
        score_function=SCORE_FUNCTIONS[family],
        aux_loss_coeff=aux_loss_coeff,
        z_loss_coeff=z_loss_coeff,
    )


def watch_routers(layer: nn.Module, config: Any, losses: RouterConfig | None) -> None:
    """Count the tokens of the experts in `layer`, in the families of `SCORE_FUNCTIONS`.

    Args:
        losses: see `auxiliary_losses`: the backward of each router starts from them too. None:
            there are none.
    """
    if config.model_type not in SCORE_FUNCTIONS:
        return
    for name, experts in _experts_of(layer, config):
        block = layer.get_submodule(name.rpartition(".")[0])
        router: Any = getattr(block, "gate", None) or block.get_submodule("router")
        of_family = losses or RouterConfig(num_experts=0, topk=0)
        of_layer = replace(of_family, num_experts=experts.num_experts, topk=router.top_k)
        experts.loads = loads = RouterStatistics(of_layer)
        experts.used_share = router.top_k, experts.num_experts
        if losses is not None:
            shape: list[torch.Size] = []
            block.register_forward_pre_hook(partial(_keep_shape, shape))
            router.register_forward_hook(partial(_add_losses, loads, shape))


def _keep_shape(shape: list[torch.Size], block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    shape[:] = [inputs[0].shape[:2]]


def _add_losses(
    loads: RouterStatistics, shape: list[torch.Size], router: nn.Module, _: Any, output: Any
) -> Any:
    logits, weights, index = output
    if router.training:
        # The losses are means over samples, and the logits are [tokens, experts].
        z = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(*shape[0], -1)
        weights = with_auxiliary_losses(weights, z, loads.config, record=loads.record)
    return logits, weights, index


def _counted(experts: Any, index: Tensor) -> Tensor:
    """Return the chosen experts, and count their tokens."""
    if hasattr(experts, "loads"):
        experts.loads.count(index)
    return index


def _experts_of(layer: nn.Module, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of the experts in `layer` that expert ranks can divide."""
    names = divided_experts(config)
    for name, module in layer.named_modules():
        if name in names and are_exchangeable(module):
            yield name, module


def experts_forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of the chosen experts.

    Shape:
        hidden [tokens, hidden], index and weights [tokens, chosen]  ->  [tokens, hidden]

    Raises:
        PipelineError: a recomputation chose other experts than the forward.
    """
    first = remembered(partial(_counted, experts, index))
    if first is not index and not torch.equal(first, index):
        raise PipelineError(
            f"{type(experts).__name__}: the recomputation chose other experts than the forward for "
            f"{int((first != index).any(-1).sum())} of {len(index)} tokens, so that its gradients "
            "would be wrong: its router must be deterministic (no jitter, no dropout before it), "
            "or turn activation checkpointing off"
        )
    tensor = getattr(experts, "tensor_axis", Axis("tensor"))
    expert = getattr(experts, "expert_axis", Axis("expert"))
    dispatch = Dispatch(hidden, index, experts.num_experts, expert, tensor)
    sizes = dispatch.routes.sizes
    product = getattr(experts, "grouped_product", grouped_linear)

    def apply(x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        y: Tensor = product(x, getattr(experts, name), sizes, experts.is_transposed)
        if not experts.has_bias:
            return y, None
        counts = torch.tensor(sizes, device=x.device)
        bias = getattr(experts, f"{name}_bias")
        return y, bias.repeat_interleave(counts, dim=0, output_size=sum(sizes))

    up = "gate_up_proj" if experts.has_gate else "up_proj"
    x, bias = apply(dispatch.arrived(), up)
    x = x if bias is None else x + bias
    x, bias = apply(experts._apply_gate(x) if experts.has_gate else experts.act_fn(x), "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # transformers 5.9 has none
        x, bias = experts.post_expert_norm(x if bias is None else x + bias), None
    # Several tensor ranks have parts of a sum, and slices of the bias.
    return dispatch.combine(x, weights, bias).to(hidden.dtype)

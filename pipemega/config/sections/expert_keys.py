"""The keys of `model` for mixtures of experts, with Megatron's names."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pipemega.config.declarations import (
    Count,
    NotNegative,
    Positive,
    UnsupportedExpertKeys,
    honoured,
    own,
    refused,
    rule,
)
from pipemega.config.sections.hf_section import HFSection
from pipemega.config.sections.pipeline_sections import MeshSection, PlanFile
from pipemega.config.sections.transformer_sections import TransformerSection, near_multiples
from pipemega.pipeline.schedules import AUTO, splits_backward


class ExpertKeys(TransformerSection):
    """A transformer of which some blocks have a mixture of experts in place of the MLP."""

    num_experts: Count | None = own(
        None, "Experts of a block; null: all blocks have one feed-forward network."
    )
    moe_router_topk: Count = own(2, "Experts that a token gets.")
    moe_ffn_hidden_size: Count | None = own(
        None, "Feed-forward size of an expert; null: ffn_hidden_size."
    )
    moe_layer_freq: Count | tuple[Literal[0, 1], ...] = own(
        1, "Which blocks have experts: n for blocks 0, n, 2n ..; or a list of 0 and 1 per block."
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = own(
        "softmax", "Function from the logits of the router to its scores."
    )
    moe_router_pre_softmax: bool = own(
        False, "Softmax over all experts, not over the chosen ones; the weights do not sum to 1."
    )
    moe_router_num_groups: Count | None = own(
        None, "Divide the experts into groups, and choose within the best ones; null: no groups."
    )
    moe_router_group_topk: Count | None = own(
        None, "Groups of which a token gets experts; with moe_router_num_groups."
    )
    moe_router_topk_scaling_factor: Positive | None = own(
        None, "Factor of the weights of the chosen experts; null: 1."
    )
    moe_router_load_balancing_type: Literal["seq_aux_loss", "aux_loss"] = own(
        "seq_aux_loss",
        'Auxiliary loss that balances the experts: of each sample, or (`"aux_loss"`, Megatron\'s '
        "default) of each micro-batch, which depends on the micro-batch size.",
    )
    moe_aux_loss_coeff: NotNegative = own(0.0, "Weight of the auxiliary loss; 0: there is none.")
    moe_z_loss_coeff: NotNegative = own(
        0.0, "Weight of the squared log-sum-exp of the router's logits (ST-MoE: 1e-3)."
    )
    moe_router_enable_expert_bias: bool = own(
        False, "Choose experts with a bias, which changes after each step to balance them."
    )
    moe_router_bias_update_rate: NotNegative = own(
        1e-3, "Change of the expert bias per step; 0: the bias stays as it is."
    )
    moe_shared_expert_intermediate_size: Count | None = own(
        None, "Feed-forward size of an expert that gets all tokens; null: there is none."
    )
    moe_shared_expert_gate: bool = own(
        False, "Multiply the shared expert by the sigmoid of a linear of the token."
    )
    moe_expert_capacity_factor: float | None = refused(
        None,
        "Largest number of tokens of an expert, over the mean.",
        "no token is dropped here, so experts have no capacity: remove "
        "model.moe_expert_capacity_factor, and balance the experts by model.moe_aux_loss_coeff or "
        "model.moe_router_enable_expert_bias",
        own=True,
    )

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each block has experts."""
        frequency = self.moe_layer_freq
        if self.num_experts is None:
            return (False,) * self.num_layers
        if isinstance(frequency, int):
            return tuple(number % frequency == 0 for number in range(self.num_layers))
        return tuple(map(bool, frequency))

    @property
    def expert_size(self) -> int:
        """`moe_ffn_hidden_size`, or its default if it is null."""
        return self.moe_ffn_hidden_size or self.feed_forward_size

    @property
    def active_feed_forward_size(self) -> float:
        """Mean over the blocks of the feed-forward size that a token passes."""
        active = self.moe_router_topk * self.expert_size
        active += self.moe_shared_expert_intermediate_size or 0
        sizes = [active if experts else self.feed_forward_size for experts in self.expert_layers]
        return sum(sizes) / len(sizes)

    def sharded_sizes(self, mesh: MeshSection) -> Mapping[str, int]:
        sharded = {**super().sharded_sizes(mesh)}
        if self.num_experts is not None:
            sharded["moe_ffn_hidden_size"] = self.expert_size
            # Tensor ranks exchange slices of the channels.
            sharded["hidden_size"] = self.hidden_size
            if self.moe_shared_expert_intermediate_size is not None:
                shared = self.moe_shared_expert_intermediate_size
                sharded["moe_shared_expert_intermediate_size"] = shared
        return sharded

    def mesh_errors(self, mesh: MeshSection) -> Iterator[str]:
        yield from super().mesh_errors(mesh)
        if mesh.expert == 1:
            return
        if self.num_experts is None:
            yield (
                f"mesh.expert is {mesh.expert}, and the model has no experts: set it to 1, or set "
                "model.num_experts"
            )
        elif self.num_experts % mesh.expert:
            yield (
                f"model.num_experts ({self.num_experts}) must be a multiple of mesh.expert "
                f"({mesh.expert}), over which the experts are divided; the nearest "
                f"{near_multiples(self.num_experts, mesh.expert)}"
            )

    @rule("num_experts", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax")
    def _experts_of_a_token(self) -> Iterator[str]:
        experts, chosen = self.num_experts, self.moe_router_topk
        if experts is None:
            return
        if chosen > experts:
            yield (
                f"model.moe_router_topk ({chosen}) must be at most model.num_experts ({experts})"
            )
        is_softmax = self.moe_router_score_function == "softmax"
        if chosen == 1 and is_softmax and not self.moe_router_pre_softmax:
            yield (
                "model.moe_router_topk is 1, and the softmax over one chosen expert is always 1: "
                "the router would learn nothing from the loss; set model.moe_router_pre_softmax "
                "to true"
            )

    @rule("num_experts", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk")
    def _groups_of_experts(self) -> Iterator[str]:
        groups, best, chosen = (
            self.moe_router_num_groups, self.moe_router_group_topk, self.moe_router_topk
        )  # fmt: skip
        if groups is None and best is None:
            return
        if groups is None or best is None:
            yield (
                "model.moe_router_num_groups and model.moe_router_group_topk belong together: set "
                "both, or neither"
            )
            return
        experts = self.num_experts or groups
        if experts % groups:
            yield (
                f"model.num_experts ({experts}) must be a multiple of model.moe_router_num_groups "
                f"({groups}); the nearest {near_multiples(experts, groups)}"
            )
        elif best > groups:
            yield (
                f"model.moe_router_group_topk ({best}) must be at most "
                f"model.moe_router_num_groups ({groups})"
            )
        elif chosen % best or chosen > best * (experts // groups):
            yield (
                f"model.moe_router_topk ({chosen}) must be a multiple of "
                f"model.moe_router_group_topk ({best}), and at most {best * (experts // groups)}: "
                f"{best} groups of {experts // groups} experts"
            )

    @rule("moe_layer_freq", "num_layers")
    def _a_frequency_for_each_block(self) -> Iterator[str]:
        frequency = self.moe_layer_freq
        if isinstance(frequency, tuple) and len(frequency) != self.num_layers:
            yield (
                f"model.moe_layer_freq has {len(frequency)} entries, and model.num_layers is "
                f"{self.num_layers}: give 0 or 1 for each block"
            )

    @rule(
        "num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_aux_loss_coeff",
        "moe_z_loss_coeff", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size",
    )  # fmt: skip
    def _keys_need_experts(self) -> Iterator[str]:
        if self.num_experts is not None:
            return
        for name, field in ExpertKeys.model_fields.items():
            if name.startswith("moe_") and getattr(self, name) != field.default:
                yield (
                    f"model.{name} has no effect without experts: set model.num_experts, or remove "
                    "the key"
                )

    @rule("moe_shared_expert_gate", "moe_shared_expert_intermediate_size")
    def _the_gate_needs_a_shared_expert(self) -> Iterator[str]:
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            yield (
                "model.moe_shared_expert_gate is the gate of a shared expert: set "
                "model.moe_shared_expert_intermediate_size, or set it to false"
            )


class ExpertParallelSection(UnsupportedExpertKeys):
    """DeepSpeed's AutoEP: the size of `mesh.expert`."""

    enabled: bool = honoured(False, "Divide the experts over data ranks.")
    autoep_size: Count = honoured(1, "If enabled: `mesh.expert`, unless that is set too.")


def with_expert_axis(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set `mesh.expert` from `expert_parallel.autoep_size` if only the latter is given."""
    experts, mesh = raw.get("expert_parallel"), raw.get("mesh", {})
    if not isinstance(experts, Mapping) or not isinstance(mesh, Mapping) or "expert" in mesh:
        return raw
    ranks = experts.get("autoep_size") if experts.get("enabled") is True else None
    # Any other value is an error of `expert_parallel.autoep_size`.
    is_count = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > 0
    return {**raw, "mesh": {**mesh, "expert": ranks}} if is_count else raw


def errors_of_experts(config: Any) -> Iterator[str]:
    """Yield errors of `mesh.expert` of a `Config`."""
    ranks, model, deepspeed = config.mesh.expert, config.model, config.expert_parallel
    if deepspeed and deepspeed.enabled and deepspeed.autoep_size != ranks:
        yield (
            f"expert_parallel.autoep_size ({deepspeed.autoep_size}) must equal mesh.expert "
            f"({ranks}): make them equal, or remove mesh.expert"
        )
    if ranks == 1:
        return
    # Only transformers knows whether a model of it has experts.
    if model is not None and not isinstance(model, ExpertKeys | HFSection):
        yield (
            f"mesh.expert is {ranks}, and model.type {model.type!r} has no experts that data ranks "
            "can share: set it to 1"
        )
    optimizer = "" if config.optimizer is None else config.optimizer.type
    if optimizer.lower().endswith("lamb"):
        yield (
            f"optimizer.type {optimizer!r} needs the norm of whole parameters, and mesh.expert "
            f"({ranks}) divides those of experts over data ranks: use another optimizer, or set "
            "mesh.expert to 1"
        )


def errors_of_filled_waits(config: Any) -> Iterator[str]:
    """Yield why no W can run within exchanges."""
    if not config.pipeline.fill_waits:
        return
    name = config.pipeline.schedule
    if config.mesh.expert == 1:
        yield (
            "pipeline.fill_waits uses the exchanges of tokens, and with mesh.expert 1 there are "
            "none: remove pipeline.fill_waits, or set mesh.expert to 2 or more"
        )
    if not isinstance(name, PlanFile) and (name == AUTO or not splits_backward(name)):
        yield (
            f"pipeline.fill_waits moves W, and schedule {name!r} has no W of its own: remove "
            "pipeline.fill_waits, or name a schedule with split backward, such as 'zb-h1'"
        )
    others = {
        "activation_checkpointing.cpu_checkpointing": (
            config.activation_checkpointing.cpu_checkpointing
        ),
        "compile.cuda_graphs": config.compile.cuda_graphs,
    }
    for key, is_on in others.items():
        if is_on:
            yield (
                f"pipeline.fill_waits and {key} both change how compute instructions run: set one "
                "of them to false"
            )

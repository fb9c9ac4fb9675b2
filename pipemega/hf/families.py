"""Family: how the layers of a family are sharded over tensor ranks, as data.

transformers has plans for some families (`base_model_tp_plan`); this table completes and corrects
them. Names are relative to a layer. The styles are explained in sharding.py.

Refuses configs that would train something else than transformers does.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Literal

from pipemega.errors import ConfigError
from pipemega.parameters import even_share

Names = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """What the tensor ranks share of one family.

    Args:
        styles: module or parameter -> style.
        divided: module -> attributes with numbers of heads or channels, divided by the ranks.
        divided_config: module -> keys of the config that the module reads in forward, divided.
        sliced_arguments: arguments of a layer that may have one entry per head: dims
            [batch * heads, ...] or [batch, heads, ...].
        shared: parameters of the first layer of a stack that all its layers use.
        no_sequence_parallelism: why slices of the sequence cannot enter a layer.
    """

    styles: dict[str, str] = field(default_factory=dict)
    divided: dict[str, Names] = field(default_factory=dict)
    divided_config: dict[str, Names] = field(default_factory=dict)
    sliced_arguments: Names = ()
    shared: Names = ()
    no_sequence_parallelism: str = ""


def _linears(column: Names, row: Names) -> dict[str, str]:
    return dict.fromkeys(column, "colwise") | dict.fromkeys(row, "rowwise")


def _prefixed(prefix: str, column: Names, row: str) -> dict[str, str]:
    return _linears(tuple(f"{prefix}.{c}" for c in column), (f"{prefix}.{row}",))


_FUSED_GLU = {"mlp.gate_up_proj": "blocks:2", "mlp.down_proj": "rowwise"}
_QKV = ("q_proj", "k_proj", "v_proj")
_BLOOM_MLP = _linears(("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",))
_BLOOM = _linears(("self_attention.query_key_value",), ("self_attention.dense",)) | _BLOOM_MLP
_T5_BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
_T5_ATTENTION = ("layer.0.SelfAttention", "layer.1.EncDecAttention")

FAMILIES: dict[str, Family] = {
    "apertus": Family({"mlp.act_fn": "replicated_with_grad_allreduce"}),
    "cohere": Family({"self_attn.q_norm.weight": "dim:0", "self_attn.k_norm.weight": "dim:0"}),
    "bert": Family(
        _linears(
            (*(f"attention.self.{n}" for n in ("query", "key", "value")), "intermediate.dense"),
            ("attention.output.dense", "output.dense"),
        ),
        divided={"attention.self": ("num_attention_heads", "all_head_size")},
    ),
    "bloom": Family(
        _BLOOM,
        divided={"self_attention": ("num_heads",)},
        sliced_arguments=("alibi",),
    ),
    "deepseek_v2": Family(divided={"self_attn": ("num_heads",)}),
    "deepseek_v3": Family(
        _linears(
            ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"),
            ("self_attn.o_proj",),
        )
        | {"self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj"},
        divided={"self_attn": ("num_heads",)},
    ),
    # With groups of heads (40B, 180B).
    "falcon": Family(
        _BLOOM,
        divided={"self_attention": ("num_heads", "num_kv_heads")},
        # With ALiBi, which is a part of the mask too.
        sliced_arguments=("alibi", "attention_mask"),
    ),
    # One key and one value for all heads, fused with the queries: attention is not sharded.
    "falcon-7b": Family(
        _BLOOM_MLP,
        no_sequence_parallelism="its attention (multi_query) is not sharded over tensor ranks",
    ),
    "glm": Family(_FUSED_GLU),
    "glm4": Family(_FUSED_GLU),
    "gpt2": Family(
        {"attn.c_attn": "blocks:3"} | _linears(("mlp.c_fc",), ("attn.c_proj", "mlp.c_proj")),
        divided={"attn": ("num_heads", "split_size", "embed_dim")},
    ),
    "gpt_oss": Family(
        _prefixed("self_attn", _QKV, "o_proj")
        | {
            "self_attn.sinks": "dim:0",
            "mlp.experts.gate_up_proj": "dim:-1",
            "mlp.experts.gate_up_proj_bias": "dim:-1",
            "mlp.experts.down_proj": "dim:1",
            "mlp.experts": "moe_tp_experts",
        },
    ),
    "gptj": Family(
        _prefixed("attn", _QKV, "out_proj") | _linears(("mlp.fc_in",), ("mlp.fc_out",)),
        divided={"attn": ("num_attention_heads",)},
    ),
    "opt": Family(
        _prefixed("self_attn", _QKV, "out_proj") | _linears(("fc1",), ("fc2",)),
        divided={"self_attn": ("num_heads", "embed_dim")},
        no_sequence_parallelism="its layers join batch and sequence to one dim",
    ),
    "phi3": Family(
        {"self_attn.qkv_proj": "qkv", "self_attn.o_proj": "rowwise", **_FUSED_GLU},
        divided={"self_attn": ("num_key_value_heads",)},
        divided_config={"self_attn": ("num_attention_heads", "num_key_value_heads")},
    ),
    "t5": Family(
        {k: v for a in _T5_ATTENTION for k, v in _prefixed(a, ("q", "k", "v"), "o").items()}
        | {
            k: v
            for i in (1, 2)
            for k, v in _prefixed(f"layer.{i}.DenseReluDense", ("wi", "wi_0", "wi_1"), "wo").items()
        }
        | {_T5_BIAS: "dim:1"},
        divided=dict.fromkeys(_T5_ATTENTION, ("n_heads", "inner_dim")),
        shared=(_T5_BIAS,),
    ),
    "vit": Family(
        _prefixed("attention", _QKV, "o_proj") | _linears(("mlp.fc1",), ("mlp.fc2",)),
    ),
    "whisper": Family(
        _prefixed("self_attn", _QKV, "out_proj")
        | _prefixed("encoder_attn", _QKV, "out_proj")
        | _linears(("fc1",), ("fc2",)),
        divided={"self_attn": ("num_heads",), "encoder_attn": ("num_heads",)},
    ),
}

# Families whose layers have the modules of another one -> its name.
_SAME_MODULES = {
    "camembert": "bert",
    "deit": "vit",
    "electra": "bert",
    "mt5": "t5",
    "roberta": "bert",
    "xlm-roberta": "bert",
}
FAMILIES |= {name: FAMILIES[same] for name, same in _SAME_MODULES.items()}

# Families with a plan of transformers whose gradients have been compared.
_COMPARED_PLANS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2",
    "gpt_neox",
)  # fmt: skip


# Families with experts whose gradients have been compared on several expert ranks -> the function
# from the logits of their routers to scores.
SCORE_FUNCTIONS: dict[str, Literal["softmax", "sigmoid"]] = {
    "mixtral": "softmax", "qwen2_moe": "softmax", "qwen3_moe": "softmax", "deepseek_v3": "sigmoid",
    "olmoe": "softmax", "granitemoe": "softmax", "phimoe": "softmax", "gpt_oss": "softmax",
}  # fmt: skip


def is_compared(config: Any, divides_experts: bool = False) -> bool:
    """Return whether tests compare the gradients of this family on several tensor ranks.

    Args:
        divides_experts: on several expert ranks.
    """
    if divides_experts:
        return config.model_type in SCORE_FUNCTIONS
    return config.model_type in FAMILIES or config.model_type in _COMPARED_PLANS


def family_of(config: Any) -> Family:
    """Return the entry of the table for a config; an empty one for other families."""
    name = config.model_type
    if name == "falcon" and config.multi_query and not config.new_decoder_architecture:
        name = "falcon-7b"
    return FAMILIES.get(name, Family())


def styles_of(config: Any) -> dict[str, str]:
    """Return module or parameter of a layer -> style: HF's plan, completed by the table."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    inner = {key.split(".*.", 1)[1]: style for key, style in plan.items() if ".*." in key}
    return inner | family_of(config).styles


def divided_experts(config: Any) -> Names:
    """Return the modules of a layer whose parameters expert ranks divide, by transformers' plan."""
    plan = getattr(config, "base_model_ep_plan", None) or {}
    return tuple(
        key.split(".*.", 1)[1]
        for key, style in plan.items()
        if ".*." in key and style == "ep_dispatch_experts"
    )


def refuse_unknown_family(folder: object, config: dict[str, Any], families: Container[str]) -> None:
    """Refuse the content of a config.json whose family transformers does not have.

    Raises:
        ConfigError: the model is code of the folder, or of a newer transformers.
    """
    family = config.get("model_type")
    if family in families:
        return
    if "auto_map" in config:
        raise ConfigError(
            f"{folder}: the model {family!r} is Python code in the folder (auto_map in "
            f"config.json, trust_remote_code), which pipemega does not run: use a family of "
            f"transformers, or write the model as LayerSpecs",
            on_every_rank=True,
        )
    raise ConfigError(
        f"{folder}: config.json has model_type {family!r}, which the installed transformers does "
        f"not know: install a newer one, or give the folder of a model of transformers",
        on_every_rank=True,
    )


def refuse_settings(config: Any) -> None:
    """Refuse quantised weights and losses or layers that a pipeline does not carry.

    Raises:
        ConfigError: names the key and the way out.
    """
    text = config.get_text_config()
    for owner in {id(c): c for c in (config, text)}.values():
        if getattr(owner, "quantization_config", None) is not None:
            raise ConfigError(
                "the config has quantization_config: quantised weights cannot be trained; give "
                "the folder of the unquantised model",
                on_every_rank=True,
            )
        if getattr(owner, "output_router_logits", False):
            raise ConfigError(
                "the config has output_router_logits = true: the auxiliary loss of transformers "
                "(router_aux_loss_coef) is a product of means over all layers, which are not in "
                "one stage; set output_router_logits to false, and model.moe_aux_loss_coeff for "
                "a loss of each layer",
                on_every_rank=True,
            )
        for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            rate = getattr(owner, key, None)
            if rate:
                raise ConfigError(
                    f"the config has {key} = {rate}: layers are skipped at random, and the ranks "
                    f"of a pipeline cannot skip them; set {key} to 0",
                    on_every_rank=True,
                )
        if getattr(owner, "apply_spec_augment", False):
            raise ConfigError(
                "the config has apply_spec_augment = true: transformers masks audio with numpy's "
                "random numbers, which differ on tensor ranks and after a resume; set it to false, "
                "and mask in the data",
                on_every_rank=True,
            )


def refuse_other_class_loss(config: Any) -> None:
    """Refuse a classifier for which transformers has another loss than cross entropy.

    Raises:
        ConfigError: names the key and the way out.
    """
    problem = getattr(config, "problem_type", None)
    if problem is None and config.num_labels == 1:
        problem = "regression"
    if problem not in (None, "single_label_classification"):
        raise ConfigError(
            f"the config has num_labels = {config.num_labels}, problem_type = {problem!r}: "
            f"pipemega has the loss of single_label_classification; for another one give "
            f"from_pretrained(..., loss_fn=f)",
            on_every_rank=True,
        )


def check_tensor_ranks(config: Any, ranks: int, sequence_parallel: bool) -> None:
    """Check that the layers can be sharded over the tensor ranks.

    Raises:
        ConfigError: there is no plan, or a number of heads does not fit; names both.
    """
    styles = styles_of(config)
    if not styles:
        raise ConfigError(
            f"transformers has no plan for the family {config.model_type!r} to shard its layers "
            f"(base_model_tp_plan), and pipemega has none: use mesh.tensor = 1 with more pipeline "
            f"ranks",
            on_every_rank=True,
        )
    if getattr(config, "slow_but_exact", False):
        raise ConfigError(
            "the config has slow_but_exact = true: it multiplies slices of whole weights, which "
            "tensor ranks do not have; set it to false, which computes the same",
            on_every_rank=True,
        )
    attention = [name for name in styles if "att" in name.lower()]
    if attention:
        even_share(config.num_attention_heads, ranks, "num_attention_heads")
    reason = family_of(config).no_sequence_parallelism
    if not attention:
        reason = reason or "transformers has no plan for its attention"
    if sequence_parallel and reason:
        raise ConfigError(
            f"mesh.sequence_parallel does not work for the family {config.model_type!r}: {reason}; "
            f"set it to false",
            on_every_rank=True,
        )
    if not any(name.split(".")[-1] in KEY_VALUE for name in attention):
        return
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if groups % ranks and ranks % groups:
        raise ConfigError(
            f"num_key_value_heads ({groups}) must be a multiple of the tensor ranks (mesh.tensor "
            f"= {ranks}), or divide them: each rank needs whole heads",
            on_every_rank=True,
        )


KEY_VALUE = ("k_proj", "v_proj")
"""Linears of keys and values, whose heads may be fewer than the tensor ranks."""

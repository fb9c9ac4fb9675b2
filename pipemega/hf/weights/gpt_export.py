"""Our own GPT as a model of transformers, where its options allow.

GPT2        learned positions, LayerNorm, GELU or squared ReLU, biases, no groups of heads
Llama       RoPE, RMSNorm, SwiGLU; biases everywhere or nowhere
Qwen2       as Llama, with biases of queries, keys and values only
Qwen3       as Llama, without biases, with norms of queries and keys
Mixtral     as Llama without biases, with experts in all blocks
Qwen3Moe    as Qwen3, with experts in some or all blocks

Our own ViT as a ViTForImageClassification of transformers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pipemega.config.sections.gpt_section import GPTSection
from pipemega.config.sections.image_model_sections import ViTSection
from pipemega.errors import CheckpointError
from pipemega.hf.weights.export import CheckpointTensor, ModelToExport
from pipemega.models.gpt import FIRST_BLOCK
from pipemega.models.vit import ViTConfig

_POSITIONS = 1
_NO_EMBEDDING_NORM = "no norm of the token embeddings (model.embedding_norm is true)"

Tensors = dict[str, CheckpointTensor]


def gpt_to_export(section: GPTSection, vocab_size: int) -> ModelToExport:
    """Return a GPT of the config section `model` as a model of transformers.

    Args:
        vocab_size: vocabulary size without padding.

    Raises:
        CheckpointError: no model of transformers has these options; lists them.
    """
    if section.position_embedding_type == "rope":
        family = "Qwen3" if section.qk_layernorm else "Llama"
        if section.num_experts is not None:
            family = "Qwen3Moe" if section.qk_layernorm else "Mixtral"
        _refuse(family, _differences_from_llama(section))
        return _as_llama(section, vocab_size)
    _refuse("GPT2", _differences_from_gpt2(section))
    return _as_gpt2(section, vocab_size)


def _refuse(family: str, differences: list[str]) -> None:
    if differences:
        raise CheckpointError(
            f"this GPT cannot be exported: {family} is the nearest model of transformers, and it "
            f"has {'; '.join(differences)}"
        )


def _differences_from_gpt2(s: GPTSection) -> list[str]:
    checks = {
        f"LayerNorm (model.normalization is {s.normalization!r})": s.normalization == "LayerNorm",
        "no SwiGLU (model.swiglu is true)": not s.swiglu,
        f"no experts (model.num_experts is {s.num_experts})": s.num_experts is None,
        "biases in all linear layers (model.add_bias_linear is false)": s.add_bias_linear,
        f"keys and values for every head (model.num_query_groups is {s.query_groups}, "
        f"model.num_attention_heads is {s.num_attention_heads})": s.query_groups
        == s.num_attention_heads,
        f"heads of hidden_size / num_attention_heads channels (model.kv_channels is "
        f"{s.head_size})": s.head_size * s.num_attention_heads == s.hidden_size,
        "no norms of queries and keys (model.qk_layernorm is true)": not s.qk_layernorm,
        _NO_EMBEDDING_NORM: not s.embedding_norm,
    }
    return [text for text, holds in checks.items() if not holds]


def _differences_from_llama(s: GPTSection) -> list[str]:
    checks = {
        f"RMSNorm (model.normalization is {s.normalization!r})": s.normalization == "RMSNorm",
        "SwiGLU (model.swiglu is false)": s.swiglu,
        f"RoPE on all channels of a head (model.rotary_percent is "
        f"{s.rotary_percent})": s.rotary_percent == 1,
        _NO_EMBEDDING_NORM: not s.embedding_norm,
    }
    if s.qk_layernorm or s.num_experts is not None:
        checks["no biases (model.add_bias_linear is true)"] = not s.add_bias_linear
        checks["no biases (model.add_qkv_bias is true)"] = not s.add_qkv_bias
    if s.num_experts is not None:
        checks |= _expert_checks(s)
    return [text for text, holds in checks.items() if not holds]


def _expert_checks(s: GPTSection) -> dict[str, bool]:
    """Return what Qwen3Moe and Mixtral have; auxiliary losses do not change the outputs."""
    shared, factor = s.moe_shared_expert_intermediate_size, s.moe_router_topk_scaling_factor
    checks = {
        f"a softmax router (model.moe_router_score_function is {s.moe_router_score_function!r})": (
            s.moe_router_score_function == "softmax"
        ),
        f"no groups of experts (model.moe_router_num_groups is {s.moe_router_num_groups})": (
            s.moe_router_num_groups is None
        ),
        "no expert bias (model.moe_router_enable_expert_bias is true)": (
            not s.moe_router_enable_expert_bias
        ),
        f"no factor of the experts (model.moe_router_topk_scaling_factor is {factor})": (
            factor in (None, 1)
        ),
        f"no shared expert (model.moe_shared_expert_intermediate_size is {shared})": shared is None,
    }
    if not s.qk_layernorm:
        sums_to_1 = not s.moe_router_pre_softmax
        checks["expert weights that sum to 1 (model.moe_router_pre_softmax is true)"] = sums_to_1
        every, blocks = s.moe_layer_freq, list(map(int, s.expert_layers))
        frequency = every if isinstance(every, int) else blocks
        checks[f"experts in all blocks (model.moe_layer_freq is {frequency})"] = all(blocks)
    return checks


def _as_gpt2(s: GPTSection, vocab_size: int) -> ModelToExport:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=s.num_positions,
        n_embd=s.hidden_size,
        n_layer=s.num_layers,
        n_head=s.num_attention_heads,
        n_inner=s.feed_forward_size,
        activation_function="relu2" if s.squared_relu else "gelu",
        resid_pdrop=s.hidden_dropout,
        embd_pdrop=s.hidden_dropout,
        attn_pdrop=s.attention_dropout,
        layer_norm_epsilon=s.norm_epsilon,
        initializer_range=s.init_method_std,
        tie_word_embeddings=not s.untie_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=None,
    )

    def block(number: int) -> Tensors:
        at, to = FIRST_BLOCK + number, f"transformer.h.{number}"
        return {
            **_norm(at, "attention_norm", f"{to}.ln_1", True),
            **linear_at(at, "attention.qkv", f"{to}.attn.c_attn", True, transposed=True),
            **linear_at(at, "attention.output", f"{to}.attn.c_proj", True, transposed=True),
            **_norm(at, "mlp_norm", f"{to}.ln_2", True),
            **linear_at(at, "mlp.up", f"{to}.mlp.c_fc", True, transposed=True),
            **linear_at(at, "mlp.down", f"{to}.mlp.c_proj", True, transposed=True),
        }

    tensors = {
        "transformer.wte.weight": parameter_at(0, "weight"),
        "transformer.wpe.weight": parameter_at(_POSITIONS, "weight"),
        **_blocks(s, block),
        **_after_blocks(s, "transformer.ln_f", bias=True),
    }
    return ModelToExport(config, "GPT2LMHeadModel", tensors)


def _llama_config(s: GPTSection, vocab_size: int) -> tuple[Any, str]:
    """Return the config, and the name of the model's class."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": _max_positions(s),
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.query_groups,
        "head_dim": s.head_size,
        "intermediate_size": s.feed_forward_size,
        "hidden_act": "silu",
        "attention_dropout": s.attention_dropout,
        "rms_norm_eps": s.norm_epsilon,
        "initializer_range": s.init_method_std,
        "tie_word_embeddings": not s.untie_embeddings_and_output_weights,
        "rope_parameters": _rope_parameters(s),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    all_biases, qkv_bias = s.add_bias_linear, s.add_bias_linear or s.add_qkv_bias
    if s.num_experts is not None:
        factor = aux_loss_factor(s.moe_router_topk, s.expert_layers)
        sizes["num_experts_per_tok"] = s.moe_router_topk
        sizes["router_aux_loss_coef"] = s.moe_aux_loss_coeff / factor
        if not s.qk_layernorm:
            sizes |= {"num_local_experts": s.num_experts, "intermediate_size": s.expert_size}
            return transformers.MixtralConfig(**sizes), "MixtralForCausalLM"
        config = transformers.Qwen3MoeConfig(
            **sizes,
            num_experts=s.num_experts,
            moe_intermediate_size=s.expert_size,
            norm_topk_prob=not s.moe_router_pre_softmax,
            mlp_only_layers=[n for n, experts in enumerate(s.expert_layers) if not experts],
        )
        return config, "Qwen3MoeForCausalLM"
    if s.qk_layernorm:
        return transformers.Qwen3Config(**sizes), "Qwen3ForCausalLM"
    if qkv_bias and not all_biases:
        return transformers.Qwen2Config(**sizes), "Qwen2ForCausalLM"
    config = transformers.LlamaConfig(**sizes, attention_bias=qkv_bias, mlp_bias=all_biases)
    return config, "LlamaForCausalLM"


def aux_loss_factor(topk: int, expert_layers: Sequence[bool]) -> float:
    """Return `model.moe_aux_loss_coeff` over HF's `router_aux_loss_coef`.

    If all experts get equally many tokens, HF's loss is `topk` for all blocks together, and ours
    is 1 for each block.
    """
    return topk / max(1, sum(expert_layers))


def _as_llama(s: GPTSection, vocab_size: int) -> ModelToExport:
    config, class_name = _llama_config(s, vocab_size)
    all_biases, qkv_bias = s.add_bias_linear, s.add_bias_linear or s.add_qkv_bias
    queries, keys = s.num_attention_heads * s.head_size, s.query_groups * s.head_size
    ffn = s.feed_forward_size

    def block(number: int) -> Tensors:
        at, to = FIRST_BLOCK + number, f"model.layers.{number}"
        found = {
            **_norm(at, "attention_norm", f"{to}.input_layernorm", False),
            **linear_at(at, "attention.output", f"{to}.self_attn.o_proj", all_biases),
            **_norm(at, "mlp_norm", f"{to}.post_attention_layernorm", False),
        }
        if s.qk_layernorm:
            found |= _norm(at, "attention.query_norm", f"{to}.self_attn.q_norm", False)
            found |= _norm(at, "attention.key_norm", f"{to}.self_attn.k_norm", False)
        start = 0
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            rows = (start, start + size)
            found |= linear_at(at, "attention.qkv", f"{to}.self_attn.{name}", qkv_bias, rows=rows)
            start += size
        if s.expert_layers[number]:
            found[f"{to}.mlp.gate.weight"] = parameter_at(at, "mlp.router.weight")
            found[f"{to}.mlp.experts.gate_up_proj"] = parameter_at(at, "mlp.experts.up.weight")
            found[f"{to}.mlp.experts.down_proj"] = parameter_at(at, "mlp.experts.down.weight")
            return found
        found |= linear_at(at, "mlp.down", f"{to}.mlp.down_proj", all_biases)
        found |= linear_at(at, "mlp.up", f"{to}.mlp.gate_proj", all_biases, rows=(0, ffn))
        found |= linear_at(at, "mlp.up", f"{to}.mlp.up_proj", all_biases, rows=(ffn, 2 * ffn))
        return found

    tensors = {
        "model.embed_tokens.weight": parameter_at(0, "weight"),
        **_blocks(s, block),
        **_after_blocks(s, "model.norm", bias=False),
    }
    return ModelToExport(config, class_name, tensors)


def _max_positions(s: GPTSection) -> int:
    """Return `max_position_embeddings`: with "dynamic" scaling the length before it."""
    scaling = s.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        return scaling.original_max_position_embeddings or s.num_positions
    return s.num_positions


def _rope_parameters(s: GPTSection) -> dict[str, Any]:
    if s.rope_scaling is None:
        return {"rope_theta": s.rotary_base, "rope_type": "default"}
    keys = s.rope_scaling.hf_keys()
    if keys["rope_type"] == "dynamic":
        del keys["original_max_position_embeddings"]
    if keys["rope_type"] == "yarn":
        keys.setdefault("factor", s.num_positions / keys["original_max_position_embeddings"])
    return {"rope_theta": s.rotary_base, **keys}


def _blocks(s: GPTSection, block: Callable[[int], Tensors]) -> Tensors:
    return {name: at for number in range(s.num_layers) for name, at in block(number).items()}


def _after_blocks(s: GPTSection, norm: str, bias: bool) -> Tensors:
    """Return the final norm, and the head if it has its own weight."""
    at = FIRST_BLOCK + s.num_layers
    found = _norm(at, "norm", norm, bias)
    if s.untie_embeddings_and_output_weights:
        found["lm_head.weight"] = parameter_at(at + 1, "weight")
    return found


def parameter_at(position: int, name: str, **options: Any) -> CheckpointTensor:
    return CheckpointTensor(f"parameters/layers.{position}.{name}", **options)


def _norm(position: int, ours: str, name: str, bias: bool) -> Tensors:
    return linear_at(position, ours, name, bias)


def linear_at(
    position: int,
    ours: str,
    name: str,
    bias: bool,
    *,
    rows: tuple[int, int] | None = None,
    transposed: bool = False,
) -> Tensors:
    weight = parameter_at(position, f"{ours}.weight", rows=rows, transposed=transposed)
    found = {f"{name}.weight": weight}
    if bias:
        found[f"{name}.bias"] = parameter_at(position, f"{ours}.bias", rows=rows)
    return found


def vit_to_export(section: ViTSection) -> ModelToExport:
    """Return a ViT of the config section `model` as a model of transformers.

    Raises:
        CheckpointError: the ViT has no class token.
    """
    import transformers

    s = section
    if s.pool != "class":
        raise CheckpointError(
            f"this ViT cannot be exported: the ViT of transformers classifies by a class token "
            f"(model.pool is {s.pool!r})"
        )
    config = transformers.ViTConfig(
        hidden_size=s.hidden_size,
        num_hidden_layers=s.num_layers,
        num_attention_heads=s.num_attention_heads,
        intermediate_size=s.feed_forward_size,
        hidden_act="gelu",
        hidden_dropout_prob=s.hidden_dropout,
        attention_probs_dropout_prob=s.attention_dropout,
        layer_norm_eps=s.norm_epsilon,
        image_size=s.image_size,
        patch_size=s.patch_size,
        num_channels=s.num_channels,
        num_labels=s.num_classes,
    )
    head = ViTConfig.first_block + s.num_layers
    tensors = {
        "vit.embeddings.cls_token": parameter_at(0, "class_token"),
        "vit.embeddings.position_embeddings": parameter_at(0, "positions"),
        **linear_at(0, "projection", "vit.embeddings.patch_embeddings.projection", True),
        **linear_at(head, "norm", "vit.layernorm", True),
        **linear_at(head, "linear", "classifier", True),
    }
    for number in range(s.num_layers):
        tensors |= _block(number, s.hidden_size)
    return ModelToExport(config, "ViTForImageClassification", tensors)


def _block(number: int, hidden: int) -> dict[str, CheckpointTensor]:
    at, to = ViTConfig.first_block + number, f"vit.layers.{number}"
    found = {
        **linear_at(at, "attention_norm", f"{to}.layernorm_before", True),
        **linear_at(at, "attention.output", f"{to}.attention.o_proj", True),
        **linear_at(at, "mlp_norm", f"{to}.layernorm_after", True),
        **linear_at(at, "mlp.up", f"{to}.mlp.fc1", True),
        **linear_at(at, "mlp.down", f"{to}.mlp.fc2", True),
    }
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = (index * hidden, (index + 1) * hidden)
        found |= linear_at(at, "attention.qkv", f"{to}.attention.{name}", True, rows=rows)
    return found

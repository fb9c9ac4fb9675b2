"""Tiny configs of all families, their inputs, and HF's unsplit model as the oracle."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto

from pipemega.hf.tasks import model_class_of, task_of
from pipemega.hf_check.split_run import KeepFloat64

VOCAB, LENGTH, NUM_MICROBATCHES = 37, 8, 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 8}
MLA: dict[str, Any] = _MOE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_HIDDEN_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip


def _sized(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**(SIZES | changes))


# Of CONFIGS, those with experts that several data ranks can divide.
EXPERTS = [
    "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "olmoe", "granitemoe", "phimoe", "gpt-oss",
]  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _sized("LlamaConfig", tie_word_embeddings=False),
    "llama-tied": _sized("LlamaConfig", tie_word_embeddings=True, attention_bias=True),
    "mistral": _sized("MistralConfig", sliding_window=4),
    "mixtral": _sized("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _sized("Qwen2Config"),
    "qwen3": _sized("Qwen3Config", head_dim=8, tie_word_embeddings=True),
    "qwen3-moe": _sized("Qwen3MoeConfig", num_experts=4, moe_intermediate_size=16, **_MOE),
    "gemma2": _sized("Gemma2Config", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": _sized("Gemma3TextConfig", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "cohere": _sized("CohereConfig"),
    "olmo2": _sized("Olmo2Config"),
    "gpt-neox": _sized("GPTNeoXConfig", **_HIDDEN_DROPOUT),
    "phi3": _sized("Phi3Config"),
    "glm4": _sized("Glm4Config", head_dim=8),
    "deepseek-v2": _sized("DeepseekV2Config", **MLA),
    "deepseek-v3": _sized("DeepseekV3Config", **MLA),
    "gpt-oss": _sized("GptOssConfig", num_local_experts=4, sliding_window=4, **_MOE),
    "qwen2-moe": _sized(
        "Qwen2MoeConfig", num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, num_experts_per_tok=2, mlp_only_layers=[1],
    ),
    "olmoe": _sized("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "granitemoe": _sized("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "phimoe": _sized(
        "PhimoeConfig", num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0
    ),
    "gpt2": _sized("GPT2Config", **_GPT2_DROPOUT),
    "gptj": _sized(
        "GPTJConfig", n_embd=32, n_layer=4, n_head=4, n_positions=64, rotary_dim=8, **_GPT2_DROPOUT
    ),
    "bloom": _sized("BloomConfig", n_layer=4, n_head=4, **_HIDDEN_DROPOUT),
    "falcon": _sized(
        "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, **_HIDDEN_DROPOUT
    ),
    "falcon-7b": _sized(
        "FalconConfig",
        new_decoder_architecture=False,
        multi_query=True,
        alibi=True,
        **_HIDDEN_DROPOUT,
    ),
    # With biases that depend on the head.
    "falcon-alibi": _sized(
        "FalconConfig", alibi=True, multi_query=False, parallel_attn=False, bias=True,
        num_kv_heads=4, **_HIDDEN_DROPOUT,
    ),
    "opt": _sized("OPTConfig", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "bert": _sized("BertConfig", architectures=["BertForMaskedLM"], **_BERT_DROPOUT),
    "roberta": _sized("RobertaConfig", architectures=["RobertaForMaskedLM"], **_BERT_DROPOUT),
    "electra": _sized("ElectraConfig", architectures=["ElectraForMaskedLM"], **_BERT_DROPOUT),
    "mt5": lambda: transformers.MT5Config(**_T5, num_decoder_layers=3),
    "t5": lambda: transformers.T5Config(**_T5, num_decoder_layers=3, tie_word_embeddings=True),
    "t5-untied": lambda: transformers.T5Config(
        **_T5, num_decoder_layers=2, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=3, decoder_layers=3, dropout=0.0,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_mel_bins=6, max_source_positions=6, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5, **_BERT_DROPOUT,
    ),
}  # fmt: skip


TASKS = ("sequence-classification", "token-classification")


def _classifiers() -> list[str]:
    """Return "family:task" for each class of transformers that classifies texts."""
    found = []
    for family, config in CONFIGS.items():
        for task in TASKS:
            mapping = getattr(modeling_auto, f"MODEL_FOR_{task.upper().replace('-', '_')}_MAPPING")
            if type(config()) in mapping:
                found.append(f"{family}:{task}")
    return found


CLASSIFIERS = _classifiers()

# Families whose masks follow position_ids.
PACKED = [
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3", "cohere",
    "olmo2", "gpt-neox", "phi3", "glm4", "deepseek-v2", "deepseek-v3", "gpt2", "gptj",
]  # fmt: skip


def config_of(family: str, attention: str = "eager", **changes: Any) -> Any:
    """Return the tiny config of a family; with eager attention if it has no other.

    Args:
        family: or "family:task", for one of CLASSIFIERS.
    """
    family, _, task = family.partition(":")
    config = CONFIGS[family]()
    if task:
        config.num_labels, config.classifier_dropout = 3, 0.0
        config.architectures = [model_class_of(config, task).__name__]
    if family == "gemma2" or not model_class_of(config, None)._supports_sdpa:
        attention = "eager"
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = attention
    # The others have no float64 kernel.
    config._experts_implementation = "eager"
    return config


def whole_model(config: Any) -> nn.Module:
    """Return HF's model with random values in all parameters, those of norms included."""
    torch.manual_seed(0)
    model: nn.Module = model_class_of(config, None)._from_config(
        config, dtype=torch.get_default_dtype()
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    return model


def batch_of(config: Any, side: str = "plain", length: int = LENGTH) -> tuple[Any, Tensor]:
    """Return (inputs by HF's names, labels) of NUM_MICROBATCHES samples.

    Args:
        side: "plain"; "packed": two documents in each sample; "padded": the last tokens are
            padding; "long decoder": an even number of tokens for a decoder; "ignored": no label
            of the second sample counts.
    """
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> Tensor:
        return torch.randint(5, VOCAB, (NUM_MICROBATCHES, length), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(NUM_MICROBATCHES, *shape, generator=generator)

    if config.model_type == "vit":
        labels = torch.randint(config.num_labels, (NUM_MICROBATCHES,), generator=generator)
        return {"pixel_values": normal(3, config.image_size, config.image_size)}, labels
    task = task_of(config, model_class_of(config, None))
    inputs: dict[str, Tensor] = {}
    if config.model_type == "whisper":
        inputs["input_features"] = normal(config.num_mel_bins, 2 * config.max_source_positions)
    else:
        inputs["input_ids"] = ids(length)
    labels = ids(length)
    labels[:, :2] = -100
    # Unequal numbers of tokens: the mean of the means is not the mean.
    labels[0, :5] = -100
    if side == "ignored":
        labels[1] = -100
    if task in TASKS:
        labels = torch.randint(config.num_labels, labels.shape, generator=generator).where(
            labels != -100, labels
        )
    if task == "sequence-classification":
        labels = labels[:, -1].clone()
        # The first sample ends before the others: families classify the last token before padding.
        inputs["input_ids"][0, -3:] = 0
        if config.is_encoder_decoder:
            inputs["input_ids"][:, length - 4] = config.eos_token_id
            inputs["decoder_input_ids"] = inputs["input_ids"].roll(1, 1)
    elif config.is_encoder_decoder and task != "token-classification":
        labels = ids(6 if side == "long decoder" else 5)
        inputs["decoder_input_ids"] = labels.roll(1, 1)
    if side == "packed":
        positions = [*range(length - 3), *range(3)]
        inputs["position_ids"] = torch.tensor([positions] * NUM_MICROBATCHES)
    if side == "padded":
        inputs["attention_mask"] = (torch.arange(length) < length - 2).long().repeat(4, 1)
        if task == "sequence-classification":
            inputs["input_ids"][:, -2:] = 0
        elif not config.is_encoder_decoder:
            labels[:, -2:] = -100
    return inputs, labels


def microbatches(batch: tuple[Any, Tensor]) -> list[tuple[Any, Tensor]]:
    """Return the samples one by one; inputs of one tensor as this tensor."""
    inputs, labels = batch
    parts = []
    for m in range(len(labels)):
        cut = {name: value[m : m + 1] for name, value in inputs.items()}
        parts.append((cut if len(cut) > 1 else next(iter(cut.values())), labels[m : m + 1]))
    return parts


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    has_cache = model.config.model_type != "vit"
    logits: Tensor = model(**inputs, **({"use_cache": False} if has_cache else {})).logits
    return logits


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def router_losses(logits: Tensor, config: Any, losses: tuple[float, float]) -> Tensor:
    """Return the mean over the samples of the losses of one router, term by term.

    Args:
        logits: of all samples, [samples * length, experts].
        losses: weights of the auxiliary loss and the z-loss.
    """
    total, chosen = torch.zeros(()), config.num_experts_per_tok
    for z in logits.view(NUM_MICROBATCHES, LENGTH, -1):
        p = z.softmax(-1)
        if config.model_type == "deepseek_v3":
            p = z.sigmoid() / z.sigmoid().sum(-1, keepdim=True)
        for expert in range(z.shape[1]):
            count = sum(expert in row.topk(chosen).indices for row in p)
            factor = z.shape[1] / (chosen * LENGTH**2)
            total = total + losses[0] * factor * count * p[:, expert].sum()
        total = total + losses[1] * z.exp().sum(-1).log().square().mean()
    return total / NUM_MICROBATCHES


def oracle(
    config: Any,
    side: str = "plain",
    length: int = LENGTH,
    rotary_base: float | None = None,
    losses: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return loss, logits and gradients by HF's names of the unsplit model, in float64.

    Args:
        losses: see `router_losses`; they are in the gradients only.
        rotary_base: computes the frequencies of rotary positions in float64; transformers computes
            them in fp32 whatever the dtype of the model is.
    """
    torch.set_default_dtype(torch.float64)
    try:
        model = whole_model(config)
        inputs, labels = batch_of(config, side, length)
        if rotary_base is not None:
            rotary: Any = model.get_submodule("model.rotary_emb")
            count = len(rotary.inv_freq)
            rotary.inv_freq = rotary_base ** -(torch.arange(count) / count)
            inputs["position_ids"] = torch.arange(float(length)).unsqueeze(0)
        routed: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, module in model.named_modules():
            if losses is not None and name.endswith(("mlp.gate", "mlp.router", "moe.router")):
                module.register_forward_hook(lambda *a: routed.append(a[2]))
        with KeepFloat64():
            logits = logits_of(model, inputs)
            loss = token_loss(logits, labels)
            extra = [router_losses(z, config, losses or (0, 0)) for z, _, _ in routed]
            torch.stack([loss, *extra]).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    named = model.named_parameters()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
    tokens = [index.flatten().bincount(minlength=z.shape[-1]) for z, _, index in routed]
    return {
        "loads": [(max(row) / row.double().mean()).item() for row in tokens],
        "router_losses": [each.item() for each in extra],
        "loss": loss.item(),
        "logits": logits.detach().numpy(),
        "gradients": {name: gradient.numpy() for name, gradient in gradients.items()},
    }

"""The built-in GPT with the weights of a folder of `_LLAMAS` or GPT2.

The folder is read by slices, as for models of type "hf". The names are mapped as in `gpt_export`,
in the other direction.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.config import Config
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.errors import ConfigError
from pipemega.hf.hf_module import read_config
from pipemega.hf.weights.gpt_export import aux_loss_factor, gpt_to_export
from pipemega.hf.weights.safetensors_files import WeightSource, mark_transposed
from pipemega.hf.weights.safetensors_source import SafetensorsSource
from pipemega.models import GPTConfig, gpt
from pipemega.parameters import Shard, attach_shard, shard_of
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import LayerSpec

_Part = tuple[str, tuple[int, int] | None, bool]
"""HF's name, the rows of our parameter that it is (None: all), whether HF stores the transpose."""

_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def gpt_section(folder: str | Path, seq_length: int | None = None) -> dict[str, Any]:
    """Return the config section `model` of the GPT that computes the same as a folder's model.

    Dropout is 0, as in the configs of these models; change it in the returned section.

    Args:
        seq_length: tokens per sample; None: all positions of the model.

    Raises:
        ConfigError: the built-in GPT has no such model; names the option.
    """
    _, config = read_config(folder)
    kind = config.model_type
    if kind not in (*_LLAMAS, "gpt2"):
        known = ", ".join(_LLAMAS)
        _refuse(folder, f"its family is {kind!r}, and only {known} and gpt2 fit")
    section = _of_gpt2(folder, config) if kind == "gpt2" else _of_llama(folder, config)
    limit = section["seq_length"]
    if seq_length is not None:
        if kind == "gpt2" and seq_length > limit:
            _refuse(folder, f"it has {limit} learned positions, and seq_length is {seq_length}")
        section["seq_length"] = seq_length
        section["max_position_embeddings"] = max(seq_length, limit)
    sizes = {"vocab_size": config.vocab_size, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return {"type": "gpt", **sizes, **section}


def gpt_from_pretrained(folder: str | Path, config: Config) -> PipelineModule:
    """Return the built-in GPT of a config with first values from a folder.

    Args:
        config: its section `model` is `gpt_section(folder)`, with changes that fit the weights.

    Raises:
        ConfigError: `config.model` is not of type "gpt".
        CheckpointError: the folder is damaged, or has another model.
    """
    if not isinstance(config.model, GPTSection):
        raise ConfigError('gpt_from_pretrained() needs a config with "model": {"type": "gpt"}')
    _, hf_config = read_config(folder)
    net = gpt(GPTConfig.of(config, hf_config.vocab_size))
    exported = gpt_to_export(config.model, hf_config.vocab_size)
    class_name = next(iter(hf_config.architectures or ()), exported.class_name)
    source = SafetensorsSource(folder, hf_config, class_name)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for name, place in exported.tensors.items():
        parts[place.key.removeprefix("parameters/")].append((name, place.rows, place.transposed))
    tied = f"layers.{len(net) - 1}.weight"
    if tied not in parts:
        parts[tied] = parts["layers.0.weight"]
    specs = []
    for position, spec in enumerate(net.specs):
        filled: LayerSpec = copy.copy(spec)
        filled.typename = _Filled(spec.typename, f"layers.{position}", parts, source)
        specs.append(filled)
    return net.with_specs(specs)


class _Filled:
    """Builds a layer and fills its parameters.

    Args:
        typename: the `typename` of the spec of the layer.
        prefix: the prefix of the logical names of its parameters.
    """

    def __init__(
        self,
        typename: Callable[..., nn.Module],
        prefix: str,
        parts: dict[str, list[_Part]],
        source: WeightSource,
    ) -> None:
        self._typename, self._prefix, self._parts, self._source = typename, prefix, parts, source
        self.__name__ = getattr(typename, "__name__", type(typename).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        layer = self._typename(*args, **kwargs)
        for name, parameter in layer.named_parameters():
            if not parameter.is_meta:
                for part in self._parts[f"{self._prefix}.{name}"]:
                    _fill(parameter, part, self._source)
            # Not initialized afterwards.
            attach_shard(parameter, replace(shard_of(parameter), init_method=None))
        return layer


@torch.no_grad()
def _fill(parameter: Tensor, part: _Part, source: WeightSource) -> None:
    """Copy what `parameter`, a shard of ours, has of one tensor of HF."""
    name, rows, transposed = part
    shard = shard_of(parameter)
    if rows is None:
        _load(name, shard, parameter.data, transposed, source)
        return
    first, last = rows
    shape = (last - first, *shard.shape[1:])
    # No segment has rows of two blocks.
    for start, length, offset in shard.segments:
        if first <= start < last:
            own = Shard(shape, dim=0, ranges=((start - first, start - first + length),))
            _load(name, own, parameter.data.narrow(0, offset, length), transposed, source)


def _load(name: str, shard: Shard, into: Tensor, transposed: bool, source: WeightSource) -> None:
    local = attach_shard(nn.Parameter(torch.empty_like(into)), shard)
    source.load(name, mark_transposed(local) if transposed else local)
    into.copy_(local)


def _of_gpt2(folder: str | Path, c: Any) -> dict[str, Any]:
    if c.activation_function not in ("gelu", "relu2"):
        _refuse(
            folder,
            f"its activation_function is {c.activation_function!r}, and the built-in GPT has the "
            f"exact GELU ('gelu') and the square of ReLU ('relu2')",
        )
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx or c.add_cross_attention:
        _refuse(folder, "it scales attention in another way, or has cross-attention")
    return {
        "num_layers": c.n_layer,
        "hidden_size": c.n_embd,
        "num_attention_heads": c.n_head,
        "ffn_hidden_size": c.n_inner or 4 * c.n_embd,
        "seq_length": c.n_positions,
        "squared_relu": c.activation_function == "relu2",
        "norm_epsilon": c.layer_norm_epsilon,
        "untie_embeddings_and_output_weights": not c.tie_word_embeddings,
    }


def _of_llama(folder: str | Path, c: Any) -> dict[str, Any]:
    rope = dict(c.rope_parameters or {})
    scaling = rope.get("rope_type", "default")
    if c.hidden_act != "silu":
        _refuse(folder, f"its hidden_act is {c.hidden_act!r}, and the built-in GPT has 'silu'")
    if scaling != "default":
        _refuse(folder, f"its positions are scaled (rope_type {scaling!r})")
    if getattr(c, "sliding_window", None) and getattr(c, "use_sliding_window", True):
        _refuse(folder, f"it has a sliding_window ({c.sliding_window}) in attention")
    if getattr(c, "attention_bias", False) != getattr(c, "mlp_bias", False):
        _refuse(folder, "it has biases in attention or in the MLP, but not in both")
    return {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads,
        "kv_channels": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "ffn_hidden_size": c.intermediate_size,
        "seq_length": c.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "normalization": "RMSNorm",
        "norm_epsilon": c.rms_norm_eps,
        "swiglu": True,
        "add_bias_linear": bool(getattr(c, "mlp_bias", False)),
        "add_qkv_bias": c.model_type == "qwen2",
        "qk_layernorm": c.model_type in ("qwen3", "qwen3_moe"),
        "untie_embeddings_and_output_weights": not c.tie_word_embeddings,
        **(_experts(folder, c) if c.model_type in ("mixtral", "qwen3_moe") else {}),
    }


def _experts(folder: str | Path, c: Any) -> dict[str, Any]:
    jitter = getattr(c, "router_jitter_noise", 0)
    if jitter:
        _refuse(folder, f"its router_jitter_noise is {jitter}, and our routers add no noise")
    dense, step = getattr(c, "mlp_only_layers", ()), getattr(c, "decoder_sparse_step", 1)
    blocks = [n not in dense and (n + 1) % step == 0 for n in range(c.num_hidden_layers)]
    section = {
        "num_experts": c.num_experts,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(c, "moe_intermediate_size", c.intermediate_size),
        "moe_layer_freq": 1 if all(blocks) else [int(experts) for experts in blocks],
        "moe_router_pre_softmax": not getattr(c, "norm_topk_prob", True),
    }
    if c.output_router_logits:
        factor = aux_loss_factor(c.num_experts_per_tok, blocks)
        # As HF's, the loss of a micro-batch.
        section["moe_router_load_balancing_type"] = "aux_loss"
        section["moe_aux_loss_coeff"] = factor * c.router_aux_loss_coef
    return section


def _refuse(folder: str | Path, reason: str) -> None:
    raise ConfigError(
        f"the built-in GPT cannot have the weights in {folder}: {reason}; train it with "
        f'"model": {{"type": "hf", "path": ...}}',
        on_every_rank=True,
    )

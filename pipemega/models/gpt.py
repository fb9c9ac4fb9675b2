"""GPT as a list of LayerSpecs, in GPT-2 or Llama style.

    GPT-2 style   learned positions, LayerNorm, GELU, biases, tied head
    Llama style   rotary positions, RMSNorm, SwiGLU, no biases, grouped queries, untied head

    position      0           1           2 .. L+1     L+2    L+3
    layer         embedding   positions   blocks       norm   head

The message between layers is `hidden` [batch, sequence, hidden] (a slice of the sequence under
sequence parallelism), or (hidden, positions) if position ids restart at each document.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Su et al.
2021, arXiv:2104.09864 (rotary positions); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config import Config
from pipemega.config.model import ModelSection
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, DataError
from pipemega.kernels import Kernels
from pipemega.models.causal_attention import causal_attention
from pipemega.models.rotary import Rotary
from pipemega.parameters import Shard, attach_shard, even_share, mark_partial_gradient, normal
from pipemega.pipeline.microbatch_loss import WeightedLoss
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.recompute import recompute
from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec, TiedLayerSpec
from pipemega.random import sharded_rng
from pipemega.tensor_parallel import (
    ColumnParallelLinear,
    Dropout,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM, slice_of

Hidden = Tensor | tuple[Tensor, Tensor]


def _default(name: str) -> Any:
    return ModelSection.model_fields[name].default


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of a GPT with Megatron's names; defaults are those of `ModelSection`."""

    vocab_size: int
    seq_length: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    make_vocab_size_divisible_by: int = _default("make_vocab_size_divisible_by")
    position_embedding_type: Literal["learned_absolute", "rope"] = _default(
        "position_embedding_type"
    )
    rotary_base: float = _default("rotary_base")
    rotary_percent: float = _default("rotary_percent")
    normalization: Literal["LayerNorm", "RMSNorm"] = _default("normalization")
    norm_epsilon: float = _default("norm_epsilon")
    swiglu: bool = _default("swiglu")
    add_bias_linear: bool = _default("add_bias_linear")
    add_qkv_bias: bool = _default("add_qkv_bias")
    untie_embeddings_and_output_weights: bool = _default("untie_embeddings_and_output_weights")
    attention_dropout: float = _default("attention_dropout")
    hidden_dropout: float = _default("hidden_dropout")
    init_method_std: float = _default("init_method_std")
    label_smoothing: float = _default("label_smoothing")
    recompute: Literal["none", "selective", "full"] = _default("recompute")
    sequence_parallel: bool = False

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "GPTConfig":
        """Return the GPT of the sections `model` and `mesh`, with the vocabulary of the data.

        Raises:
            ConfigError: the section `model` is missing, or the heads do not divide by mesh.tensor.
        """
        section = config.model
        if section is None:
            raise ConfigError("the config has no section 'model', which defines the GPT to build")
        ranks = config.mesh.tensor
        even_share(section.num_attention_heads, ranks, "model.num_attention_heads")
        even_share(section.query_groups, ranks, "model.num_query_groups")
        own = {f.name for f in fields(cls)}
        return cls(
            **{key: value for key, value in section.model_dump().items() if key in own}
            | {
                "vocab_size": vocab_size,
                "ffn_hidden_size": section.feed_forward_size,
                "num_query_groups": section.query_groups,
                "kv_channels": section.head_size,
                "sequence_parallel": config.mesh.sequence_parallel and config.mesh.tensor > 1,
            }
        )


def gpt(
    config: GPTConfig, kernels: Kernels | None = None, *, boundary: Any = None
) -> PipelineModule:
    """Return the model with its loss; labels are token ids, or -100 for ignored tokens.

    Args:
        kernels: selects the norms; torch's by default.
        boundary: see `PipelineModule`.
    """
    kernels = kernels or Kernels.detect("cpu")
    c, init_method = config, normal(config.init_method_std)
    vocabulary: dict[str, Any] = {
        "axis": TENSOR_AXIS,
        "divisible_by": c.make_vocab_size_divisible_by,
        "init_method": init_method,
        "sequence_parallel": c.sequence_parallel,
    }

    def vocabulary_layer(layer: type[nn.Module]) -> LayerSpec:
        if c.untie_embeddings_and_output_weights:
            return LayerSpec(layer, c.vocab_size, c.hidden_size, **vocabulary)
        return TiedLayerSpec("words", layer, c.vocab_size, c.hidden_size, **vocabulary)

    return PipelineModule(
        [
            vocabulary_layer(TokenEmbedding),
            LayerSpec(Positions, c, TENSOR_AXIS),
            *(LayerSpec(Block, c, kernels, TENSOR_AXIS) for _ in range(c.num_layers)),
            LayerSpec(FinalNorm, c, kernels, TENSOR_AXIS),
            vocabulary_layer(VocabParallelHead),
        ],
        loss_fn=LayerSpec(GPTLoss, c, TENSOR_AXIS),
        boundary=boundary,
    )


class TokenEmbedding(VocabParallelEmbedding):
    """Maps token ids to hidden, or (token ids, positions) to (hidden, positions)."""

    def forward(self, inputs: Hidden) -> Hidden:  # type: ignore[override]
        tokens, positions = inputs if isinstance(inputs, tuple | list) else (inputs, None)
        hidden = super().forward(tokens)
        return hidden if positions is None else (hidden, positions)


class Positions(nn.Module):
    """Adds learned position embeddings, if configured; then dropout.

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._axis, self._sequence_parallel = axis, c.sequence_parallel
        self.dropout = Dropout(c.hidden_dropout, axis=axis, sequence_parallel=c.sequence_parallel)
        self.weight: nn.Parameter | None = None
        if c.position_embedding_type == "learned_absolute":
            shape, init_method = (c.seq_length, c.hidden_size), normal(c.init_method_std)
            shard = Shard(shape, partial_gradient=c.sequence_parallel, init_method=init_method)
            self.weight = attach_shard(nn.Parameter(torch.empty(shape)), shard)

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        if self.weight is None:
            hidden = self.dropout(hidden)
            return hidden if positions is None else (hidden, positions)
        if positions is None:
            length = hidden.shape[1] * (self._axis.size if self._sequence_parallel else 1)
            _check_length(length, self.weight.shape[0])
            added = self.weight[:length].unsqueeze(0)
        else:
            added = F.embedding(positions, self.weight)
        if self._sequence_parallel:
            # The reduction of partial gradients sums the gradient of the slices over the ranks.
            added = slice_of(added, self._axis, SEQUENCE_DIM)
        return self.dropout(hidden + added)  # type: ignore[no-any-return]


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise DataError(
            f"a sample has {length} tokens, and the model has positions for model.seq_length = "
            f"{limit}: shorten the samples, or increase model.seq_length"
        )


def _norm(config: GPTConfig, kernels: Kernels) -> nn.Module:
    norm = kernels.rms_norm if config.normalization == "RMSNorm" else kernels.layer_norm
    module: nn.Module = norm(config.hidden_size, eps=config.norm_epsilon)
    return mark_partial_gradient(module) if config.sequence_parallel else module


class FinalNorm(nn.Module):
    """The norm before the head; drops the positions."""

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        self.norm = _norm(config, kernels)

    def forward(self, inputs: Hidden) -> Tensor:
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.norm(hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        c = config
        self.attention_norm = _norm(c, kernels)
        self.attention = Attention(c, axis)
        self.mlp_norm = _norm(c, kernels)
        self.mlp = MLP(c, axis)
        self.dropout = Dropout(c.hidden_dropout, axis=axis, sequence_parallel=c.sequence_parallel)
        self._recompute = c.recompute == "full"
        self._uses_rng = c.hidden_dropout > 0 or c.attention_dropout > 0

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        if self._recompute:
            restore_rng = self._uses_rng and self.training
            hidden = recompute(self._block, hidden, positions, restore_rng=restore_rng)
        else:
            hidden = self._block(hidden, positions)
        return hidden if positions is None else (hidden, positions)

    def _block(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


def _column_parallel(
    c: GPTConfig, out_features: int | tuple[int, ...], axis: Axis, bias: bool
) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        c.hidden_size,
        out_features,
        axis=axis,
        bias=bias,
        sequence_parallel=c.sequence_parallel,
        init_method=normal(c.init_method_std),
    )


def _row_parallel(c: GPTConfig, in_features: int, axis: Axis) -> RowParallelLinear:
    return RowParallelLinear(
        in_features,
        c.hidden_size,
        axis=axis,
        bias=c.add_bias_linear,
        sequence_parallel=c.sequence_parallel,
        # As in GPT-2: the residual stream is a sum of 2 L outputs.
        init_method=normal(c.init_method_std / math.sqrt(2 * c.num_layers)),
    )


class Attention(nn.Module):
    """Causal self-attention; the heads are sharded over the tensor ranks.

    Shape:
        x [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._axis, self._head = axis, c.kv_channels
        self._heads = c.num_attention_heads // axis.size
        self._groups = c.num_query_groups // axis.size
        self._dropout, self._selective = c.attention_dropout, c.recompute == "selective"
        queries = c.num_attention_heads * c.kv_channels
        keys = c.num_query_groups * c.kv_channels
        qkv_bias = c.add_bias_linear or c.add_qkv_bias
        self.qkv = _column_parallel(c, (queries, keys, keys), axis, qkv_bias)
        self.output = _row_parallel(c, queries, axis)
        self._rotary: Rotary | None = None
        if c.position_embedding_type == "rope":
            self._rotary = Rotary(int(c.kv_channels * c.rotary_percent), c.rotary_base)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x)  # [batch, sequence, (heads + 2 groups) / T * head]
        if self._selective:
            restore_rng = self._dropout > 0 and self.training
            mixed = recompute(self._attend, qkv, positions, restore_rng=restore_rng)
        else:
            mixed = self._attend(qkv, positions)
        return self.output(mixed)  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, positions: Tensor | None) -> Tensor:
        """Return the attention output [batch, sequence, heads / T * head]."""
        d, h, g = self._head, self._heads, self._groups
        q, k, v = (
            rearrange(part, "b s (h d) -> b h s d", d=d)
            for part in torch.split(qkv, [h * d, g * d, g * d], dim=-1)
        )
        if self._rotary is not None:
            q, k = self._rotary(q, k, positions)
        if self._dropout > 0 and self.training:
            # Tensor ranks have different heads, so they need different masks.
            with sharded_rng(self._axis, q.device):
                mixed = causal_attention(q, k, v, self._dropout)
        else:
            mixed = causal_attention(q, k, v)
        return rearrange(mixed, "b h s d -> b s (h d)")


class MLP(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x)) with SwiGLU.

    Shape:
        x [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._swiglu = c.swiglu
        size = c.ffn_hidden_size
        self.up = _column_parallel(c, (size, size) if c.swiglu else size, axis, c.add_bias_linear)
        self.down = _row_parallel(c, size, axis)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)  # [batch, sequence, (2) ffn / T]
        if self._swiglu:
            gate, up = up.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]
        return self.down(F.gelu(up))  # type: ignore[no-any-return]


class GPTLoss(nn.Module):
    """Cross entropy over a vocabulary that is sharded over the tensor ranks.

    Returns the sum of the token losses and the number of tokens that are not ignored, both divided
    by the sequence length: the weight of a micro-batch is about its number of samples, which fits
    fp16.
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._vocab_size = axis, config.vocab_size
        self._length, self._smoothing = config.seq_length, config.label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> WeightedLoss:
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            axis=self._axis,
            vocab_size=self._vocab_size,
            label_smoothing=self._smoothing,
        )
        num_tokens = (labels != -100).sum()
        return WeightedLoss(losses.sum() / self._length, num_tokens.to(losses.dtype) / self._length)

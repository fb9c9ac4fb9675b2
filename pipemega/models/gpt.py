"""One GPT for both families, as a list of LayerSpecs.

    GPT-2 style   learned positions, LayerNorm, GELU, biases, tied head
    Llama style   rotary positions, RMSNorm, SwiGLU, no biases, grouped queries, untied head

    position      0           1           2 .. L+1     L+2    L+3
    layer         embedding   positions   blocks       norm   head

Between layers goes `hidden` [batch, sequence, hidden] (a slice of the sequence under sequence
parallelism), or (hidden, positions) where documents restart their positions.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Su et al.
2021, arXiv:2104.09864 (rotary positions); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config import Config
from pipemega.errors import ConfigError, DataError
from pipemega.kernels import Kernels
from pipemega.mesh import Axis
from pipemega.models.rotary import Rotary
from pipemega.parameters import Shard, describe, even_share, mark_partial, normal
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

Recompute = Literal["none", "selective", "full"]
Hidden = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and choices of a GPT, by Megatron's names."""

    vocab_size: int
    seq_length: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    label_smoothing: float = 0.0
    recompute: Recompute = "none"
    sequence_parallel: bool = False

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "GPTConfig":
        """What the sections `model` and `mesh` say, with the vocabulary of the data.

        Raises:
            ConfigError: there is no section `model`, or the heads do not divide by the ranks.
        """
        section = config.model
        if section is None:
            raise ConfigError("the config has no section 'model': it says what GPT to build")
        for key, number in (
            ("num_attention_heads", section.num_attention_heads),
            ("num_query_groups", section.query_groups),
        ):
            even_share(number, config.mesh.tensor, f"model.{key}")
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
    """The model, with its loss: labels are token ids, -100 where they do not count.

    Args:
        kernels: which norms to use; torch's own by default.
        boundary: see `PipelineModule`.
    """
    kernels = kernels or Kernels.detect("cpu")
    c, draw = config, normal(config.init_method_std)
    vocabulary: dict[str, Any] = {
        "axis": TENSOR_AXIS,
        "divisible_by": c.make_vocab_size_divisible_by,
        "draw": draw,
        "sequence_parallel": c.sequence_parallel,
    }

    def words(layer: type[nn.Module]) -> LayerSpec:
        if c.untie_embeddings_and_output_weights:
            return LayerSpec(layer, c.vocab_size, c.hidden_size, **vocabulary)
        return TiedLayerSpec("words", layer, c.vocab_size, c.hidden_size, **vocabulary)

    return PipelineModule(
        [
            words(Words),
            LayerSpec(Positions, c, TENSOR_AXIS),
            *(LayerSpec(Block, c, kernels, TENSOR_AXIS) for _ in range(c.num_layers)),
            LayerSpec(FinalNorm, c, kernels, TENSOR_AXIS),
            words(VocabParallelHead),
        ],
        loss_fn=LayerSpec(GPTLoss, c, TENSOR_AXIS),
        boundary=boundary,
    )


class Words(VocabParallelEmbedding):
    """Token ids, or (token ids, positions), to hidden or (hidden, positions)."""

    def forward(self, inputs: Hidden) -> Hidden:  # type: ignore[override]
        tokens, positions = inputs if isinstance(inputs, tuple | list) else (inputs, None)
        hidden = super().forward(tokens)
        return hidden if positions is None else (hidden, positions)


class Positions(nn.Module):
    """Adds learned positions, where the model has them; then dropout.

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._sequence_parallel = axis, config.sequence_parallel
        self.dropout = Dropout(
            config.hidden_dropout, axis=axis, sequence_parallel=config.sequence_parallel
        )
        self.weight: nn.Parameter | None = None
        if config.position_embedding_type == "learned_absolute":
            shape = (config.seq_length, config.hidden_size)
            shard = Shard(
                shape,
                partial_gradient=config.sequence_parallel,
                draw=normal(config.init_method_std),
            )
            self.weight = describe(nn.Parameter(torch.empty(shape)), shard)

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
            added = _own_slice(added, self._axis)
        return self.dropout(hidden + added)  # type: ignore[no-any-return]


def _own_slice(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of the sequence; its gradient is summed over ranks by the reduction."""
    length = x.shape[1] // axis.size
    return x.narrow(1, axis.rank * length, length)


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise DataError(
            f"a sample has {length} tokens, and the model has positions for model.seq_length = "
            f"{limit}: cut the samples, or raise model.seq_length"
        )


def _norm(config: GPTConfig, kernels: Kernels) -> nn.Module:
    norm = kernels.rms_norm if config.normalization == "RMSNorm" else kernels.layer_norm
    module: nn.Module = norm(config.hidden_size, eps=config.norm_epsilon)
    return mark_partial(module) if config.sequence_parallel else module


class FinalNorm(nn.Module):
    """The norm in front of the head; lets go of the positions."""

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
        self.attention_norm = _norm(config, kernels)
        self.attention = Attention(config, axis)
        self.mlp_norm = _norm(config, kernels)
        self.mlp = MLP(config, axis)
        self.dropout = Dropout(
            config.hidden_dropout, axis=axis, sequence_parallel=config.sequence_parallel
        )
        self._recompute = config.recompute == "full"
        self._draws = config.hidden_dropout > 0 or config.attention_dropout > 0

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        if self._recompute:
            hidden = recompute(
                self._block, hidden, positions, restore_rng=self._draws and self.training
            )
        else:
            hidden = self._block(hidden, positions)
        return hidden if positions is None else (hidden, positions)

    def _block(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention; the heads are shared out over the tensor ranks.

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
        self.qkv = ColumnParallelLinear(
            c.hidden_size,
            (queries, keys, keys),
            axis=axis,
            bias=c.add_bias_linear or c.add_qkv_bias,
            sequence_parallel=c.sequence_parallel,
            draw=normal(c.init_method_std),
        )
        self.output = RowParallelLinear(
            queries,
            c.hidden_size,
            axis=axis,
            bias=c.add_bias_linear,
            sequence_parallel=c.sequence_parallel,
            # The residual stream adds up 2 L outputs: GPT-2 draws them smaller by the root of that.
            draw=normal(c.init_method_std / math.sqrt(2 * c.num_layers)),
        )
        self._rotary: Rotary | None = None
        if c.position_embedding_type == "rope":
            self._rotary = Rotary(int(c.kv_channels * c.rotary_percent), c.rotary_base)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x)  # [batch, sequence, (heads + 2 groups) / T * head]
        if self._selective:
            mixed = recompute(
                self._attend, qkv, positions, restore_rng=self._dropout > 0 and self.training
            )
        else:
            mixed = self._attend(qkv, positions)
        return self.output(mixed)  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, positions: Tensor | None) -> Tensor:
        """[batch, sequence, heads / T * head]"""
        d, h, g = self._head, self._heads, self._groups
        q, k, v = (
            rearrange(part, "b s (h d) -> b h s d", d=d)
            for part in torch.split(qkv, [h * d, g * d, g * d], dim=-1)
        )
        if self._rotary is not None:
            q, k = self._rotary(q, k, positions)
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=g != h)
        if self._dropout > 0 and self.training:
            # Each tensor rank has heads of its own, so its mask is its own too.
            with sharded_rng(self._axis, q.device):
                mixed = attend(dropout_p=self._dropout)
        else:
            mixed = attend()
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
        self.up = ColumnParallelLinear(
            c.hidden_size,
            (c.ffn_hidden_size, c.ffn_hidden_size) if c.swiglu else c.ffn_hidden_size,
            axis=axis,
            bias=c.add_bias_linear,
            sequence_parallel=c.sequence_parallel,
            draw=normal(c.init_method_std),
        )
        self.down = RowParallelLinear(
            c.ffn_hidden_size,
            c.hidden_size,
            axis=axis,
            bias=c.add_bias_linear,
            sequence_parallel=c.sequence_parallel,
            draw=normal(c.init_method_std / math.sqrt(2 * c.num_layers)),
        )

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)  # [batch, sequence, (2) ffn / T]
        if self._swiglu:
            gate, up = up.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]
        return self.down(F.gelu(up))  # type: ignore[no-any-return]


class GPTLoss(nn.Module):
    """Cross entropy over a vocabulary that is cut over the tensor ranks.

    Returns (sum of the tokens' losses, number of tokens that count), both over the sequence
    length: so a micro-batch weighs about as much as it has samples, which keeps fp16 in range.
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._vocab_size = axis, config.vocab_size
        self._length, self._smoothing = config.seq_length, config.label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            axis=self._axis,
            vocab_size=self._vocab_size,
            label_smoothing=self._smoothing,
        )
        counted = (labels != -100).sum()
        return losses.sum() / self._length, counted.to(losses.dtype) / self._length

"""The block of a transformer: norms, attention and MLP.

Sizes and options of the transformer blocks that the GPT and the ViT share.

The linears of a transformer block, sharded over the tensor ranks.

The norms of a transformer, of the type that its config selects.

Stochastic depth: a sample skips a residual branch.

Source: Huang et al. 2016, arXiv:1603.09382.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config.sections.gpt_section import GPTSection
from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.models.attention import (
    KeyValueCache,
    causal_attention,
    document_attention,
    document_mask,
    takes_block_mask,
)
from pipemega.models.rotary import RopeScaling, Rotary
from pipemega.moe.experts import Experts, MixtureOfExperts
from pipemega.moe.router import Router, RouterConfig
from pipemega.parameters import Shard, attach_shard, mark_partial_gradient, normal
from pipemega.pipeline.model.recompute import ActivationCheckpoints, recompute
from pipemega.random import sharded_rng
from pipemega.tensor_parallel import ColumnParallelLinear, Dropout, RowParallelLinear
from pipemega.tensor_parallel.collectives import unkept


def gpt_default(name: str) -> Any:
    """Return the default of a key of `GPTSection`."""
    return GPTSection.model_fields[name].default


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and options of the blocks with Megatron's names; the defaults come from `GPTSection`.

    Args:
        experts: the router of the layers with experts; None: all layers are dense.
        expert_layers: whether each block has experts.
        expert_ffn_hidden_size: feed-forward size of an expert.
        shared_expert_size, shared_expert_gate: the expert that gets all tokens, and its gate.
        causal: a position sees itself and earlier ones; else all.
        padded_from: first position that is padding, which makes the sequence a multiple of the
            tensor ranks; None: there is none.
    """

    first_block: ClassVar[int]
    """Position of the first block in the pipeline."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    position_embedding_type: Literal["learned_absolute", "rope"] = gpt_default(
        "position_embedding_type"
    )
    rotary_base: float = gpt_default("rotary_base")
    rotary_percent: float = gpt_default("rotary_percent")
    rope_scaling: RopeScaling | None = None
    qk_layernorm: bool = gpt_default("qk_layernorm")
    document_attention: Literal["auto", "mask"] = gpt_default("document_attention")
    squared_relu: bool = gpt_default("squared_relu")
    normalization: Literal["LayerNorm", "RMSNorm"] = gpt_default("normalization")
    norm_epsilon: float = gpt_default("norm_epsilon")
    swiglu: bool = gpt_default("swiglu")
    add_bias_linear: bool = gpt_default("add_bias_linear")
    add_qkv_bias: bool = gpt_default("add_qkv_bias")
    attention_dropout: float = gpt_default("attention_dropout")
    hidden_dropout: float = gpt_default("hidden_dropout")
    init_method_std: float = gpt_default("init_method_std")
    recompute: Literal["none", "selective", "full"] = gpt_default("recompute")
    recompute_method: Literal["uniform", "block"] | None = gpt_default("recompute_method")
    recompute_num_layers: int = gpt_default("recompute_num_layers")
    recompute_keep: tuple[Literal["attention", "linear"], ...] | None = gpt_default(
        "recompute_keep"
    )
    sequence_parallel: bool = False
    experts: RouterConfig | None = None
    expert_layers: tuple[bool, ...] = ()
    expert_ffn_hidden_size: int = 0
    shared_expert_size: int | None = None
    shared_expert_gate: bool = False
    causal: bool = True
    padded_from: int | None = None

    @property
    def checkpoints(self) -> ActivationCheckpoints | None:
        """The blocks that are recomputed; None: not whole blocks."""
        if self.recompute != "full":
            return None
        number, method = self.recompute_num_layers, self.recompute_method
        return ActivationCheckpoints(
            self.first_block,
            self.first_block + self.num_layers,
            size=number if method == "uniform" else 1,
            most=number if method == "block" else None,
        )


def column_parallel(
    c: BlockConfig, out_features: int | tuple[int, ...], axis: Axis, bias: bool
) -> ColumnParallelLinear:
    """Return the linear hidden -> out_features, whose output features are sharded over `axis`."""
    return ColumnParallelLinear(
        c.hidden_size,
        out_features,
        axis=axis,
        bias=bias,
        sequence_parallel=c.sequence_parallel,
        init_method=normal(c.init_method_std),
    )


def row_parallel(c: BlockConfig, in_features: int, axis: Axis) -> RowParallelLinear:
    """Return the linear in_features -> hidden, whose input features are sharded over `axis`."""
    return RowParallelLinear(
        in_features,
        c.hidden_size,
        axis=axis,
        bias=c.add_bias_linear,
        sequence_parallel=c.sequence_parallel,
        # As in GPT-2: the residual stream is a sum of 2 L outputs.
        init_method=normal(c.init_method_std / math.sqrt(2 * c.num_layers)),
    )


def hidden_norm(config: BlockConfig, kernels: Kernels) -> nn.Module:
    """Return a norm over the hidden size.

    Shape:
        [batch, sequence (/ T), hidden]  ->  the same
    """
    module = _norm(config, kernels, config.hidden_size)
    return mark_partial_gradient(module) if config.sequence_parallel else module


def head_norm(config: BlockConfig, kernels: Kernels, axis: Axis) -> nn.Module:
    """Return a norm over the channels of each head; all heads share its parameters.

    Shape:
        [batch, sequence, heads / T, head]  ->  the same
    """
    module = _norm(config, kernels, config.kv_channels)
    # Each tensor rank computes the gradient of its own heads.
    return mark_partial_gradient(module) if axis.size > 1 else module


def _norm(config: BlockConfig, kernels: Kernels, size: int) -> nn.Module:
    norm = kernels.rms_norm if config.normalization == "RMSNorm" else kernels.layer_norm
    return norm(size, eps=config.norm_epsilon)


class Attention(nn.Module):
    """Self-attention, causal or not; the heads are sharded over the tensor ranks.

    Attributes:
        cache: keys and values of earlier positions; x then has only the positions after them.
            None: x has all positions.

    Shape:
        x [batch, sequence (/ T), hidden]  ->  the same;
        positions [batch, sequence], None for 0, 1, 2 ..; documents [batch, sequence]: a token sees
        the tokens of its document, None for one document
    """

    def __init__(self, config: BlockConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        c = config
        self._axis, self._head = axis, c.kv_channels
        self._heads = c.num_attention_heads // axis.size
        self._groups = c.num_query_groups // axis.size
        self._causal, self._padded_from = c.causal, c.padded_from
        self._by_blocks = c.document_attention == "auto" and kernels.flex_attention
        self._dropout = c.attention_dropout
        self._selective = c.recompute == "selective" and c.recompute_keep is None
        queries = c.num_attention_heads * c.kv_channels
        keys = c.num_query_groups * c.kv_channels
        qkv_bias = c.add_bias_linear or c.add_qkv_bias
        self.qkv = column_parallel(c, (queries, keys, keys), axis, qkv_bias)
        self.output = row_parallel(c, queries, axis)
        self.query_norm = head_norm(c, kernels, axis) if c.qk_layernorm else None
        self.key_norm = head_norm(c, kernels, axis) if c.qk_layernorm else None
        self._rotary: Rotary | None = None
        if c.position_embedding_type == "rope":
            dim = int(c.kv_channels * c.rotary_percent)
            self._rotary = Rotary(dim, c.rotary_base, c.rope_scaling)
        self.cache: KeyValueCache | None = None

    def forward(
        self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        qkv = self.qkv(x)  # [batch, sequence, (heads + 2 groups) / T * head]
        if self._selective:
            restore_rng = self._dropout > 0 and self.training
            mixed = recompute(self._attend, qkv, positions, documents, restore_rng=restore_rng)
        else:
            mixed = self._attend(qkv, positions, documents)
        return self.output(mixed)  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Return the attention output [batch, sequence, heads / T * head]."""
        d, h, g = self._head, self._heads, self._groups
        padding = 0
        if self._padded_from is not None:
            # Without padding no position needs a mask, which flash attention does not take.
            padding = qkv.shape[1] - self._padded_from
            qkv = qkv[:, : self._padded_from]
        q, k, v = (
            rearrange(part, "b s (h d) -> b s h d", d=d)
            for part in torch.split(qkv, [h * d, g * d, g * d], dim=-1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads or groups, sequence, head]
        if self._rotary is not None:
            q, k = self._rotary(q, k, positions)
        if self.cache is not None:
            k, v = self.cache.append(k, v)
        drops = self._dropout > 0 and self.training
        if documents is not None and self._by_blocks and not drops and takes_block_mask(q):
            mixed = document_attention(q, k, v, documents)
        else:
            mask = None if documents is None else document_mask(documents)
            mix = self._attend_with_dropout if drops else self._mix
            mixed = mix(q, k, v, mask)
        mixed = rearrange(mixed, "b h s d -> b s (h d)")
        return F.pad(mixed, (0, 0, 0, padding)) if padding else mixed

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0
    ) -> Tensor:
        if self._causal:
            return causal_attention(q, k, v, mask, dropout)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout)

    # It seeds generators, which a graph of torch.compile cannot contain.
    uncompiled_methods = ("_attend_with_dropout",)

    def _attend_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # Tensor ranks have different heads, so they need different masks.
        with sharded_rng(self._axis, q.device):
            return self._mix(q, k, v, mask, self._dropout)


Hidden = Tensor | tuple[Tensor, ...]
"""hidden, (hidden, positions), or (hidden, positions, documents); see `models.gpt`."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(
        self, config: BlockConfig, kernels: Kernels, axis: Axis, experts: Axis | None = None
    ) -> None:
        super().__init__()
        c = config
        self.attention_norm = hidden_norm(c, kernels)
        self.attention = Attention(c, kernels, axis)
        self.mlp_norm = hidden_norm(c, kernels)
        self.mlp = MLP(c, axis) if experts is None else mixture(c, axis, experts)
        if experts is not None:
            self.uncompiled_reason = "its sizes depend on the experts that the router chooses"
        self.dropout: nn.Module = Dropout(
            c.hidden_dropout,
            axis=axis,
            sequence_parallel=c.sequence_parallel,
            padded_from=c.padded_from,
        )
        if c.recompute_keep is not None:
            # Not a branch in `forward`, which is compiled.
            vars(self)["forward"] = partial(_keeping_forward, self, c.recompute_keep)
            self.uncompiled_reason = (
                "model.recompute_keep chooses operators, which a compiled layer fuses"
            )

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, *per_token = inputs if isinstance(inputs, tuple) else (inputs,)
        # No name holds the output of the attention while the MLP runs.
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), *per_token))
        normed = self.mlp_norm(hidden)
        hidden = hidden + self.dropout(self._feed_forward(normed, *per_token))
        return (hidden, *per_token) if per_token else hidden

    def _feed_forward(
        self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        if not isinstance(self.mlp, MixtureOfExperts) or documents is None:
            return self.mlp(x)  # type: ignore[no-any-return]
        # Padding is no part of a document.
        return self.mlp(x, documents >= 0)  # type: ignore[no-any-return]


def _keeping_forward(block: Block, keep: tuple[str, ...], inputs: Hidden) -> Hidden:
    """Run `Block.forward`; recompute it in backward, but keep results of some operators."""

    def run(*inputs: Tensor) -> Hidden:
        return Block.forward(block, inputs if len(inputs) > 1 else inputs[0])

    args = inputs if isinstance(inputs, tuple) else (inputs,)
    # Dropout may also be a part of an adapter.
    result: Hidden = recompute(run, *args, restore_rng=block.training, keep=keep)
    return result


class MLP(nn.Module):
    """down(gelu(up(x))); down(relu(up(x))²); or with SwiGLU down(silu(gate(x)) * up(x)).

    Shape:
        x [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: BlockConfig, axis: Axis) -> None:
        super().__init__()
        c = config
        self._activation = activation_of(c)
        # A recomputation of the block needs it for a dropout after it only.
        self.output_is_kept = c.hidden_dropout > 0
        size = c.ffn_hidden_size
        self.up = column_parallel(c, (size, size) if c.swiglu else size, axis, c.add_bias_linear)
        self.down = row_parallel(c, size, axis)

    def forward(self, x: Tensor) -> Tensor:
        activated = self._activation(self.up(x))  # [batch, sequence, (2) ffn / T] -> [.., ffn / T]
        down: Tensor = self.down(activated) if self.output_is_kept else unkept(self.down, activated)
        return down


def activation_of(config: BlockConfig) -> Callable[[Tensor], Tensor]:
    """Return the function between up, with SwiGLU the gate and up, and down."""
    if config.swiglu:
        return _swiglu
    return _squared_relu if config.squared_relu else F.gelu


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def mixture(config: BlockConfig, axis: Axis, expert: Axis) -> MixtureOfExperts:
    """Return the mixture of experts of a block.

    Args:
        axis, expert: the tensor axis and the expert axis of the mesh.
    """
    c, router = config, config.experts
    assert router is not None
    up = normal(c.init_method_std)
    experts = Experts(
        router.num_experts,
        c.hidden_size,
        c.expert_ffn_hidden_size,
        gated=c.swiglu,
        activation=activation_of(c),
        up_init=up,
        down_init=normal(c.init_method_std / math.sqrt(2 * c.num_layers)),
        bias=c.add_bias_linear,
        expert=expert,
        tensor=axis,
    )
    shared: nn.Module | None = None
    gate: nn.Linear | None = None
    if c.shared_expert_size is not None:
        shared = MLP(replace(c, ffn_hidden_size=c.shared_expert_size), axis)
        if c.shared_expert_gate:
            gate = nn.Linear(c.hidden_size, 1, bias=False)
            shard = Shard((1, c.hidden_size), partial_gradient=c.sequence_parallel, init_method=up)
            gate.weight = attach_shard(nn.Parameter(gate.weight), shard)
    return MixtureOfExperts(
        Router(router, c.hidden_size, up),
        experts,
        shared=shared,
        shared_gate=gate,
        expert=expert,
        tensor=axis,
        sequence_parallel=c.sequence_parallel,
    )


class DropPath(nn.Module):
    """Sets the branch of a sample to 0 with probability `p`, and scales the others by 1 / (1 - p).

    The random numbers come from the default generator, whose state is equal on all tensor ranks.

    Shape:
        branch [batch, ...]  ->  the same
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return branch
        ones = branch.new_ones(branch.shape[0], *(1,) * (branch.dim() - 1))
        return branch * F.dropout(ones, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


def drop_path_rate(last: float, block: int, num_blocks: int) -> float:
    """Return the rate of a block: 0 for the first block of the model, `last` for the last.

    Args:
        block: index of the block in the whole model, not in the stage.
    """
    return last * block / (num_blocks - 1) if num_blocks > 1 else last

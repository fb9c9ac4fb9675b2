"""Self-attention of the transformer blocks."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.kernels import Kernels
from pipemega.models.block_config import BlockConfig
from pipemega.models.block_linear import column_parallel, row_parallel
from pipemega.models.block_norm import head_norm
from pipemega.models.causal_attention import causal_attention
from pipemega.models.document_mask import document_mask
from pipemega.models.kv_cache import KeyValueCache
from pipemega.models.rotary import Rotary
from pipemega.pipeline.recompute import recompute
from pipemega.random import sharded_rng


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
        self._dropout, self._selective = c.attention_dropout, c.recompute == "selective"
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
        mask = None if documents is None else document_mask(documents)
        if self._dropout > 0 and self.training:
            mixed = self._attend_with_dropout(q, k, v, mask)
        else:
            mixed = self._mix(q, k, v, mask)
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

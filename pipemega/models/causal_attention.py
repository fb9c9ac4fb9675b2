"""Causal attention with grouped queries, on the fused kernel of the device.

On a CUDA device torch chooses among three kernels:

    kernel              dtypes        heads of k and v
    flash, cuDNN        bf16, fp16    may be fewer than those of q (`enable_gqa`)
    memory-efficient    and fp32      as many as those of q
    math                all           may be fewer; holds the scores [heads, sequence, sequence]

So k and v are expanded where flash attention does not run; it takes no mask. The fused kernel of a
CPU takes fewer heads in all dtypes, and masks.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# Limits of flash attention in torch 2.13: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_CHANNELS = 256
_FLASH_ARCHITECTURE = 8  # Ampere


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return softmax(q kᵀ / sqrt(head)) v, in which a position sees itself and earlier ones.

    Args:
        mask: which positions each position sees; it is causal itself. None: all earlier ones.
        dropout: probability that a weight of the softmax becomes 0.

    Shape:
        q [batch, heads, queries, head], k and v [batch, groups, sequence, head]  ->  as q;
        the queries are those of the last positions of the sequence; heads / groups consecutive
        heads of q use one head of k and v; mask bool [batch, 1, queries, sequence]
    """
    queries, length = q.shape[2], k.shape[2]
    is_causal = mask is None and queries == length
    if mask is None and 1 < queries < length:
        # torch's own causal mask starts at the first position.
        seen = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        mask = seen.tril(length - queries)
    heads, groups = q.shape[1], k.shape[1]
    takes_groups = takes_grouped_queries(q) and (mask is None or not q.is_cuda)
    if heads != groups and not takes_groups:
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    enable_gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=is_causal, enable_gqa=enable_gqa
    )


def takes_grouped_queries(q: Tensor) -> bool:
    """Return whether a fused kernel of q's device takes fewer heads in k and v than in q."""
    if not q.is_cuda:
        return True
    if q.dtype not in _FLASH_DTYPES or q.shape[-1] > _FLASH_CHANNELS:
        return False
    # The planner counts tensors without values as if they were on a GPU of today.
    return q.is_meta or _has_flash(q.device)


def _has_flash(device: torch.device) -> bool:
    architecture: int = torch.cuda.get_device_properties(device).major
    # ROCm's flash attention takes no grouped queries.
    return architecture >= _FLASH_ARCHITECTURE and torch.version.hip is None

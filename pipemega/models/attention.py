"""Causal attention with grouped queries, on the fused kernel of the device.

On a CUDA device torch chooses among three kernels:

    kernel              dtypes        heads of k and v
    flash, cuDNN        bf16, fp16    may be fewer than the heads of q (`enable_gqa`)
    memory-efficient    and fp32      as many as the heads of q
    math                all           may be fewer; holds the scores [heads, sequence, sequence]

So k and v are expanded where flash attention does not run; it takes no mask. The fused kernel of a
CPU takes fewer heads in all dtypes, and masks.

Attention of samples that contain several documents: no token sees another document.

    mask          every pair of positions is computed, and those of other documents are masked
    block mask    flex_attention computes only blocks in which a position sees another one; on CUDA
                  devices with triton

Keys and values of the positions that attention has seen, for generation.

With a cache, a new token costs the forward of one position instead of the whole sequence.
"""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pipemega.pipeline.model.recompute import outside_recomputation

# Limits of flash attention in torch 2.13: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_CHANNELS = 256
_FLASH_ARCHITECTURE = 8  # Ampere

# Positions in a block of flex_attention.
BLOCK = 128
_SMALLEST_FLEX_HEAD = 16


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return softmax(q kᵀ / sqrt(head)) v, in which a position sees itself and earlier ones.

    Args:
        mask: which positions each position sees; it is causal itself. None: all earlier ones.
        dropout: probability that a weight of the softmax becomes 0.

    Shape:
        q [batch, heads, queries, head], k and v [batch, groups, sequence, head]  ->  as q;
        the queries belong to the last positions of the sequence; heads / groups consecutive
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


def documents_of(positions: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """Return the number of each token's document in its sample; None: one document.

    A document starts where the positions do not continue. Tokens that `attention_mask` excludes
    are documents of their own, so that no other token sees them.

    Shape:
        positions, attention_mask [batch, sequence]  ->  [batch, sequence]
    """
    documents = None
    if positions is not None:
        continues = positions[:, 1:] == positions[:, :-1] + 1
        documents = torch.nn.functional.pad((~continues).cumsum(-1), (1, 0))
    if attention_mask is None:
        return documents
    # Negative numbers: padding. It attends to itself, because a softmax needs one position.
    kept = 0 if documents is None else documents
    return torch.where(attention_mask.bool(), kept, -1)


def document_mask(documents: Tensor) -> Tensor:
    """Return which positions each position sees: itself and the earlier ones of its document.

    Shape:
        documents [batch, sequence]  ->  bool [batch, 1, sequence (query), sequence (key)]
    """
    return _kept_for(documents, _document_mask)


def _document_mask(documents: Tensor) -> Tensor:
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril_().unsqueeze(1)


def takes_block_mask(q: Tensor) -> bool:
    """Return whether flex_attention runs on q's device, for its shape.

    Shape:
        q [batch, heads, sequence, head]
    """
    return q.is_cuda and q.shape[-2] >= BLOCK and q.shape[-1] >= _SMALLEST_FLEX_HEAD


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Return `causal_attention` within the documents, by flex_attention.

    Shape:
        as in `causal_attention`; documents [batch, sequence]
    """
    enable_gqa = q.shape[1] != k.shape[1]
    if q.is_meta:
        # The planner counts one document: as many bytes, and the most FLOPs.
        return causal_attention(q, k, v)
    flex: Callable[..., Any] = flex_attention
    if not torch.compiler.is_compiling():
        flex = _compiled_flex_attention()
    mixed = flex(q, k, v, block_mask=_kept_for(documents, _block_mask), enable_gqa=enable_gqa)
    assert isinstance(mixed, Tensor)
    return mixed


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # The compiler does this with every input, and the user cannot change it.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    return torch.compile(flex_attention)


def _block_mask(documents: Tensor) -> BlockMask:
    """Return the blocks in which a position sees another one, and those in which it sees all.

    Computed from the lowest and highest document of each block: a mask of all pairs of positions
    would be large, and nothing is read from the device. A block that is listed needlessly costs
    time only, because within the blocks `sees` decides.
    """
    length = documents.shape[1]
    padded = F.pad(documents, (0, -length % BLOCK), value=-2).view(len(documents), -1, BLOCK)
    lowest, highest = padded.amin(-1), padded.amax(-1)  # [batch, blocks]
    low, high = lowest.unsqueeze(-1), highest.unsqueeze(-1)  # of queries
    below, above = lowest.unsqueeze(-2), highest.unsqueeze(-2)  # of keys
    number = torch.arange(padded.shape[1], device=documents.device)
    earlier = number.unsqueeze(-1) > number
    whole = (low == high) & (low == below) & (low == above) & earlier
    partly = (low <= above) & (below <= high) & (number.unsqueeze(-1) >= number) & ~whole

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return BlockMask.from_kv_blocks(
        *_listed(partly), *_listed(whole), BLOCK, sees, seq_lengths=(length, length)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and their indices, these first.

    Shape:
        bool [batch, blocks, blocks]  ->  [batch, 1, blocks], [batch, 1, blocks, blocks]
    """
    blocks = blocks.unsqueeze(1).int()
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


Mask = TypeVar("Mask", Tensor, BlockMask)


def _kept_for(documents: Tensor, make: Callable[[Tensor], Mask]) -> Mask:
    """Return `make(documents)`; it is kept for the other layers of the micro-batch."""
    global _kept
    # An inference tensor has no version, which would show a change in place.
    if torch.compiler.is_compiling() or documents.is_inference():
        return make(documents)
    if _kept is None or not _kept.fits(documents, make):
        # Validation creates masks within `torch.inference_mode`; training may use them later.
        with torch.inference_mode(False), torch.no_grad(), outside_recomputation():
            mask = make(documents)
        _kept = _Kept(weakref.ref(documents, _forget), documents._version, make, mask)
    return _kept.mask  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Kept:
    """The mask of the documents that a micro-batch has brought, and the function that made it."""

    documents: "weakref.ref[Tensor]"
    version: int
    make: Callable[[Tensor], Any]
    mask: Any

    def fits(self, documents: Tensor, make: Callable[[Tensor], Any]) -> bool:
        same = self.documents() is documents and self.version == documents._version
        return same and self.make is make


_kept: _Kept | None = None


def _forget(documents: "weakref.ref[Tensor]") -> None:
    global _kept
    if _kept is not None and _kept.documents is documents:
        _kept = None


class KeyValueCache:
    """Keys and values of one attention layer, on the ranks that hold its heads.

    Args:
        capacity: largest number of positions.

    Attributes:
        length: number of positions in the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions; return keys and values of all positions, as views.

        Shape:
            [batch, groups / T, new, head]  ->  [batch, groups / T, length, head]
        """
        if self._keys is None or self._values is None:
            batch, groups, _, head = keys.shape
            self._keys = keys.new_empty(batch, groups, self._capacity, head)
            self._values = torch.empty_like(self._keys)
        start, self.length = self.length, self.length + keys.shape[2]
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

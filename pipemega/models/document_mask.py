"""Attention of samples that contain several documents: no token sees another document."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor


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

    The mask is kept for the other layers of the micro-batch.

    Shape:
        documents [batch, sequence]  ->  bool [batch, 1, sequence (query), sequence (key)]
    """
    global _kept
    # An inference tensor has no version, which would show a change in place.
    if torch.compiler.is_compiling() or documents.is_inference():
        return _document_mask(documents)
    if _kept is not None and _kept.documents() is documents and _kept.version == documents._version:
        return _kept.mask
    # Validation creates masks within `torch.inference_mode`; training may use them later.
    with torch.inference_mode(False), torch.no_grad():
        mask = _document_mask(documents)
    _kept = _Kept(weakref.ref(documents, _forget), documents._version, mask)
    return mask


def _document_mask(documents: Tensor) -> Tensor:
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril_().unsqueeze(1)


@dataclass(frozen=True, eq=False)
class _Kept:
    """The mask of the documents that a micro-batch has brought."""

    documents: "weakref.ref[Tensor]"
    version: int
    mask: Tensor


_kept: _Kept | None = None


def _forget(documents: "weakref.ref[Tensor]") -> None:
    global _kept
    if _kept is not None and _kept.documents is documents:
        _kept = None

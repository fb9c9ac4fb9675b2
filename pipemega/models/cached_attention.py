"""Turns the key-value caches of a GPT's attention on and off."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from pipemega.models.attention import Attention
from pipemega.models.block import Block
from pipemega.models.gpt import FinalNorm, Positions, TokenEmbedding
from pipemega.models.gpt_vocabulary import EmbeddedTokens, WholeHidden
from pipemega.models.kv_cache import KeyValueCache
from pipemega.tensor_parallel import VocabParallelHead

_LAYERS = (
    TokenEmbedding, Positions, Block, FinalNorm, VocabParallelHead,
    # In place of embedding and head, with vocabulary parallelism.
    EmbeddedTokens, WholeHidden,
)  # fmt: skip


def is_cacheable(layers: Iterable[nn.Module]) -> bool:
    """Return whether all layers are those of a GPT, which can continue a sequence from caches."""
    return all(isinstance(layer, _LAYERS) for layer in layers)


@contextmanager
def key_value_caches(layers: Iterable[nn.Module], capacity: int) -> Iterator[None]:
    """Give each attention an empty cache; remove the caches at the end.

    Args:
        capacity: largest number of positions.
    """
    attentions = [
        module for layer in layers for module in layer.modules() if isinstance(module, Attention)
    ]
    for attention in attentions:
        attention.cache = KeyValueCache(capacity)
    try:
        yield
    finally:
        for attention in attentions:
            attention.cache = None

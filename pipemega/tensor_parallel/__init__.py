"""Tensor parallelism: layers sharded over the tensor ranks, as in Megatron.

`layers`: column- and row-parallel linears; `embedding`, `vocabulary`: vocabulary-parallel embedding
and head; `cross_entropy`: vocabulary-parallel loss; `linear_cross_entropy`: head and loss without
the logits of all tokens (`chunked_logits`: its passes; `deferred_logits`: what the head returns);
`dropout`: equal masks on every mesh; `collectives`: conjugate pairs of collectives.
"""

from pipemega.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pipemega.tensor_parallel.deferred_logits import DeferredLogits
from pipemega.tensor_parallel.layers import (
    ColumnParallelLinear,
    Dropout,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from pipemega.tensor_parallel.linear_cross_entropy import cross_entropy_sum

__all__ = [
    "ColumnParallelLinear",
    "DeferredLogits",
    "Dropout",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "cross_entropy_sum",
    "vocab_parallel_cross_entropy",
]

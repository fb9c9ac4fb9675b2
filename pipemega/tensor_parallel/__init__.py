"""Tensor parallelism: layers sharded over the tensor ranks, as in Megatron.

`layers`: column- and row-parallel linears; `embedding`, `vocabulary`: vocabulary-parallel embedding
and head; `cross_entropy`: vocabulary-parallel loss; `dropout`: equal masks on every mesh;
`collectives`: conjugate pairs of collectives.
"""

from pipemega.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pipemega.tensor_parallel.dropout import Dropout
from pipemega.tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from pipemega.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "vocab_parallel_cross_entropy",
]

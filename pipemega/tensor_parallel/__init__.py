"""One layer cut over the tensor ranks: linears, embedding, dropout, loss, and their collectives."""

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

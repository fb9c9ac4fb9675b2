"""The vocabulary shared out over the tensor ranks: where tokens come in, and where they go out."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.mesh import Axis
from pipemega.parameters import Draw, Shard, describe, normal
from pipemega.tensor_parallel.collectives import (
    copy_to_tensor,
    gather_sequence,
    reduce_scatter_sequence,
    sum_in_place,
)
from pipemega.tensor_parallel.layers import Product
from pipemega.tensor_parallel.vocabulary import local_range, require_in_vocabulary, rows_per_rank

# (ids [...], weight [rows, dim]) -> [..., dim]; a pipeline may put its weight gradient off.
Lookup = Callable[[Tensor, Tensor], Tensor]


class _Vocabulary(nn.Module):
    """A weight of one row for each token, this rank's share of them, and the way out."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        axis: Axis,
        divisible_by: int = 128,
        sequence_parallel: bool = False,
        draw: Draw = normal(0.02),  # noqa: B008 (a pure function's value)
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.axis, self.sequence_parallel = axis, sequence_parallel
        rows = rows_per_rank(num_embeddings, axis.size, divisible_by)
        self.start, self.stop = local_range(num_embeddings, rows, axis.rank)
        weight = torch.full((rows, embedding_dim), torch.nan, dtype=dtype, device=device)
        # Padding must be finite: its logits are computed, and then masked.
        weight[self.stop - self.start :].zero_()
        self.weight = describe(
            nn.Parameter(weight),
            Shard(
                (num_embeddings, embedding_dim),
                dim=0,
                ranges=((self.start, self.stop),) if self.start < self.stop else (),
                draw=draw,
            ),
        )

    product: Product = staticmethod(F.linear)

    def logits(self, hidden: Tensor) -> Tensor:
        """The score of each token that this rank holds, padding included.

        Feed it to `vocab_parallel_cross_entropy`, which masks the padding; or join the slices by
        `gather_from_tensor(logits, axis)[..., :num_embeddings]`.

        Shape:
            hidden [..., dim], equal on all tensor ranks  ->  [..., padded vocabulary / T]
            sequence_parallel:  hidden [batch, seq / T, dim]  ->  [batch, seq, padded / T]
        """
        if self.axis.size > 1:
            spread = gather_sequence if self.sequence_parallel else copy_to_tensor
            hidden = spread(hidden, self.axis)
        return self.product(hidden, self.weight)

    def extra_repr(self) -> str:
        padded = self.weight.shape[0] * self.axis.size
        return (
            f"{self.num_embeddings} (padded to {padded}) / {self.axis.size}, {self.embedding_dim}"
        )


class VocabParallelEmbedding(_Vocabulary):
    """A vector for each token id, with the rows of the table shared out over the tensor ranks.

    The table is padded inside to a multiple of `divisible_by * T` rows.  The rows of padding are
    zero and get no gradient; checkpoints do not hold them (`Shard.shape` is without).

    Args:
        num_embeddings: the size of the vocabulary, without padding.
        embedding_dim: the length of a vector, whole on every rank.
        axis: the tensor axis of the mesh.
        divisible_by: model.make_vocab_size_divisible_by.
        sequence_parallel: each rank keeps its slice of the sequence.
        draw: how `initialize_parameters` draws the table; until then it holds NaN.

    Shape:
        ids [batch, seq], equal on all tensor ranks  ->  [batch, seq, dim], likewise
        sequence_parallel:   ->  [batch, seq / T, dim], a slice per rank

    Raises:
        DataError: in forward, an id outside the vocabulary.

    For a tied head, a later stage calls `logits` of its own copy.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    lookup: Lookup = staticmethod(F.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        require_in_vocabulary(ids, self.num_embeddings, "token id")
        if self.axis.size == 1:
            return self.lookup(ids, self.weight)
        elsewhere = (ids < self.start) | (ids >= self.stop)
        rows = self.lookup((ids - self.start).masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)  # [batch, seq, dim]
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.axis)
        return sum_in_place(rows, self.axis)


class VocabParallelHead(_Vocabulary):
    """The untied way out: hidden states to logits, by a table of its own, without bias.

    Args and shapes are those of `VocabParallelEmbedding` and `logits`.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)

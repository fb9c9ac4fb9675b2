"""Embedding and output head with the vocabulary sharded over the tensor ranks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.parameters import InitMethod, Shard, attach_shard, normal
from pipemega.tensor_parallel.collectives import (
    copy_to_tensor,
    gather_sequence,
    reduce_scatter_sequence,
    sum_in_place,
)
from pipemega.tensor_parallel.deferred_logits import DeferredLogits, GradientSink, defers_logits
from pipemega.tensor_parallel.layers import Product
from pipemega.tensor_parallel.output_shard import OutputShard
from pipemega.tensor_parallel.vocabulary import local_range, require_in_vocabulary, rows_per_rank

# (ids [...], weight [rows, dim]) -> [..., dim]; split backward replaces it.
Lookup = Callable[[Tensor, Tensor], Tensor]


class _Vocabulary(nn.Module):
    """Base class: this rank's rows of the [vocabulary, dim] weight, and `logits`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        axis: Axis,
        divisible_by: int = 128,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = normal(0.02),  # noqa: B008 (a pure function's value)
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.axis, self.sequence_parallel = axis, sequence_parallel
        rows = rows_per_rank(num_embeddings, axis.size, divisible_by)
        self.start, self.stop = local_range(num_embeddings, rows, axis.rank)
        weight = torch.full((rows, embedding_dim), torch.nan, dtype=dtype, device=device)
        # Padding must be finite: its logits are computed and then masked.
        weight[self.stop - self.start :].zero_()
        shape = (num_embeddings, embedding_dim)
        ranges = ((self.start, self.stop),) if self.start < self.stop else ()
        shard = Shard(shape, dim=0, ranges=ranges, init_method=init_method)
        self.weight = attach_shard(nn.Parameter(weight), shard)

    product: Product = staticmethod(F.linear)
    # Set by split backward.
    weight_sink: GradientSink | None = None
    # A compiler has nothing to fuse in a lookup or a product.
    compiled_method: str | None = None

    @property
    def output_shard(self) -> OutputShard:
        """Declares `logits` as a slice of the vocabulary, with padding."""
        return OutputShard(self.axis, self.num_embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's slice of the vocabulary, with padding.

        `vocab_parallel_cross_entropy` masks the padding; for the full logits use
        `gather_from_tensor(logits, axis)[..., :num_embeddings]`.

        Shape:
            hidden [..., dim], equal on all tensor ranks  ->  [..., padded vocabulary / T]
            sequence_parallel:  hidden [batch, seq / T, dim]  ->  [batch, seq, padded / T]
        """
        return self.product(self._entering(hidden), self.weight)

    def _entering(self, hidden: Tensor) -> Tensor:
        """Return `hidden` of the whole sequence, for a different part on each rank."""
        if self.axis.size == 1:
            return hidden
        gather_or_copy = gather_sequence if self.sequence_parallel else copy_to_tensor
        return gather_or_copy(hidden, self.axis)

    def extra_repr(self) -> str:
        ranks = self.axis.size
        padded = self.weight.shape[0] * ranks
        return f"{self.num_embeddings} (padded to {padded}) / {ranks}, {self.embedding_dim}"


class VocabParallelEmbedding(_Vocabulary):
    """Embedding with the rows of its weight sharded over the tensor ranks.

    The weight is padded to a multiple of `divisible_by * T` rows. Padding rows are zero and get no
    gradient; checkpoints do not contain them (`Shard.shape` is without padding).

    Args:
        num_embeddings: size of the vocabulary, without padding.
        embedding_dim: size of an embedding vector.
        axis: the tensor axis of the mesh.
        divisible_by: model.make_vocab_size_divisible_by.
        sequence_parallel: each rank keeps its slice of the sequence.
        init_method: used by `initialize_parameters`; the weight is NaN until then. None: the
            caller fills the weight.

    Shape:
        ids [batch, seq]  ->  [batch, seq, dim], both equal on all tensor ranks
        sequence_parallel:   ->  [batch, seq / T, dim], a slice per rank

    Raises:
        DataError: in forward, an id is outside the vocabulary.

    A tied head calls `logits` of its copy of the weight.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    lookup: Lookup = staticmethod(F.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        require_in_vocabulary(ids, self.num_embeddings, "token id")
        if self.axis.size == 1:
            return self.lookup(ids, self.weight)
        not_local = (ids < self.start) | (ids >= self.stop)
        rows = self.lookup((ids - self.start).masked_fill(not_local, 0), self.weight)
        rows = rows.masked_fill(not_local.unsqueeze(-1), 0.0)  # [batch, seq, dim]
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.axis)
        return sum_in_place(rows, self.axis)


class VocabParallelHead(_Vocabulary):
    """Untied output head: maps hidden states to logits, without bias.

    Within `defer_logits` it returns `DeferredLogits`, unless a subclass computes something else.

    Args as in `VocabParallelEmbedding`, shapes as in `logits`.
    """

    def forward(self, hidden: Tensor) -> Tensor | DeferredLogits:
        if not self._is_changed() and defers_logits(self, self):
            return DeferredLogits.of(self, self._entering(hidden), self.num_embeddings)
        return self.logits(hidden)

    def _is_changed(self) -> bool:
        names, own = ("forward", "logits"), vars(self)
        same = (getattr(type(self), name) is getattr(VocabParallelHead, name) for name in names)
        return not all(same) or any(name in own for name in names)

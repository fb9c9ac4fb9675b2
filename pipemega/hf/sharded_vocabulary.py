"""Embedding and head of a Hugging Face model, with the vocabulary sharded over tensor ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.hf.placeholders import ModuleStub
from pipemega.parameters import Shard, attach_shard
from pipemega.tensor_parallel.collectives import copy_to_tensor, reduce_from_tensor
from pipemega.tensor_parallel.deferred_logits import DeferredLogits, GradientSink
from pipemega.tensor_parallel.layers import Product
from pipemega.tensor_parallel.output_shard import OutputShard
from pipemega.tensor_parallel.vocabulary import local_range, require_in_vocabulary, rows_per_rank

# Rows per rank are a multiple of this number, if there are several tensor ranks.
_DIVISIBLE_BY = 8


def sharded_rows(like: Tensor, axis: Axis) -> nn.Parameter:
    """Return this rank's rows of a [vocabulary, ...] parameter, on meta, padded."""
    total, *rest = like.shape
    rows = rows_per_rank(total, axis.size, _DIVISIBLE_BY if axis.size > 1 else 1)
    start, stop = local_range(total, rows, axis.rank)
    shard = Shard((total, *rest), dim=0, ranges=((start, stop),) if start < stop else ())
    local = nn.Parameter(torch.empty(rows, *rest, dtype=like.dtype, device="meta"))
    return attach_shard(local, shard)


class _ShardedRows:
    """Put before the class of an embedding: looks up this rank's rows and sums over the ranks."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        require_in_vocabulary(ids, self._vocabulary, "token id")
        not_local = (ids < self._start) | (ids >= self._stop)
        rows = super().forward((ids - self._start).masked_fill(not_local, 0))  # type: ignore[misc]
        return reduce_from_tensor(rows.masked_fill(not_local.unsqueeze(-1), 0.0), self._axis)


def shard_embedding(module: Any, axis: Axis) -> None:
    """Shard the rows of an embedding in place, whatever else its class computes (scaling)."""
    if axis.size == 1:
        return
    module._axis, module._vocabulary = axis, module.num_embeddings
    module.weight = sharded_rows(module.weight, axis)
    rows = module.weight.shape[0]
    module._start, module._stop = local_range(module._vocabulary, rows, axis.rank)
    padding = module.padding_idx
    is_local = padding is not None and module._start <= padding < module._stop
    module.padding_idx = padding - module._start if is_local else None
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (_ShardedRows, kind), {})


class TableStub(ModuleStub):
    """An embedding that is not called here, but whose weight the head of this segment uses."""

    def __init__(self, embedding: nn.Module, axis: Axis) -> None:
        super().__init__(0, embedding, None)
        # An assignment would find the attribute of the replaced module.
        self._parameters["weight"] = sharded_rows(embedding.weight, axis)  # type: ignore[arg-type]


class ShardedHead(nn.Module):
    """hidden -> logits of this rank's slice of the vocabulary, with padding.

    Args:
        linear: the head of the unsharded model, on meta.
        table: has the weight, if it is tied to that of the embedding.

    Attributes:
        deferred: a list for the outputs that are not computed: it takes them, and `forward` returns
            a tensor without a meaning. None: `forward` returns logits.

    Shape:
        hidden [..., hidden], equal on all tensor ranks  ->  [..., padded vocabulary / T]
    """

    product: Product = staticmethod(F.linear)
    # Set by split backward.
    weight_sink: GradientSink | None = None
    deferred: list[DeferredLogits] | None = None

    def __init__(self, linear: Any, axis: Axis, table: nn.Module | None = None) -> None:
        super().__init__()
        self.axis, self.out_features = axis, linear.out_features
        # Not a submodule: the table has its own name. `build_stages` may replace its weight.
        vars(self)["_table"] = table
        if table is None:
            self._parameters["weight"] = sharded_rows(linear.weight, axis)
        self.bias = None if linear.bias is None else sharded_rows(linear.bias, axis)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and vars(self)["_table"] is not None:
            return vars(self)["_table"].weight
        return super().__getattr__(name)

    @property
    def output_shard(self) -> OutputShard:
        """Declares the output as a slice of the vocabulary, with padding."""
        return OutputShard(self.axis, self.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        entering = copy_to_tensor(hidden, self.axis)
        if self.deferred is not None:
            self.deferred.append(DeferredLogits.of(self, entering, self.out_features))
            return hidden.detach()[..., :1]
        return self.product(entering, self.weight, self.bias)

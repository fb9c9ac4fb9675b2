"""The rows of the embedding and of the output head on one rank, for vocabulary parallelism.

Both are cut over the pipeline ranks and the tensor ranks. They keep their positions and logical
names, `layers.<position>.weight`, so a checkpoint does not depend on the cut.

    pipeline rank 0   tensor rank 0   rows [0, V / 4)
                      tensor rank 1   rows [V / 4, V / 2)
    pipeline rank 1   tensor rank 0   rows [V / 2, 3 V / 4)
                      tensor rank 1   rows [3 V / 4, V)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError
from pipemega.parameters import attach_shard, shard_of
from pipemega.pipeline.model.module import BuildOptions, PipelineModule, build_layer
from pipemega.pipeline.model.spec import LayerSpec
from pipemega.tensor_parallel.collectives import start_all_gather
from pipemega.tensor_parallel.cross_entropy import HeadRows, TokenObjective


class EmbeddedInputs(NamedTuple):
    """The input of the first stage: the inputs of the model, and the rows of their token ids."""

    inputs: Any
    rows: Tensor


@dataclass(frozen=True)
class VocabularySplit:
    """How a model whose first layer is its embedding and whose last is its head is cut.

    Args:
        embedding: the layer in place of the embedding: `EmbeddedInputs` -> output of the embedding.
            Its keyword `dtype` is the dtype of the rows in a plan, which has only the inputs.
        head: the layer in place of the head: hidden -> hidden [batch, sequence, hidden_size], whole
            on every tensor rank.
        mean_loss: (losses of the tokens, labels) -> loss of the micro-batch.
        token_ids: inputs of the model -> token ids [batch, sequence].
        token_loss: the loss of a token.
        hidden_size: size of a row.
    """

    embedding: LayerSpec
    head: LayerSpec
    mean_loss: LayerSpec
    token_ids: Callable[[Any], Tensor]
    token_loss: TokenObjective
    hidden_size: int

    def without_vocabulary(
        self, net: PipelineModule, dtype: torch.dtype | None = None
    ) -> PipelineModule:
        """Return the model of the stages, without the weights of embedding and head.

        Args:
            dtype: dtype of the rows in a plan; None: torch's default dtype.
        """
        embedding = LayerSpec(self.embedding.typename, *self.embedding.args, dtype=dtype)
        specs = (embedding, *net.specs[1:-1], self.head)
        return net.with_specs(specs, loss_fn=self.mean_loss)


class _Rows(Protocol):
    """A layer with rows of the vocabulary."""

    weight: nn.Parameter
    start: int
    stop: int


class ShardObserver(Protocol):
    """Observes the passes E and S of a shard."""

    def measure(self, position: int, x: Tensor) -> AbstractContextManager[None]:
        """Return the context in which the pass of embedding or head runs.

        Args:
            position: position of the layer in the model.
            x: token ids, or the hidden of the tokens that count [tokens, hidden].
        """


class VocabularyShard(nn.Module):
    """The layers of embedding and head with the rows of this rank; their forward is not used.

    Args:
        net: the whole model.
        mesh: its pipeline and tensor axes are the shards.

    Attributes:
        observer: an object that is called around E and S; None by default.

    Raises:
        ConfigError: the model does not say how it is cut.
    """

    def __init__(self, net: PipelineModule, mesh: Mesh, options: BuildOptions) -> None:
        super().__init__()
        split = vocabulary_split(net)
        self.split, self.pipeline, self.tensor = split, mesh.pipeline, mesh.tensor
        axis = shard_axis(mesh)
        last = len(net) - 1
        built = {
            str(position): build_layer(net.specs[position], position, replace(options, tensor=axis))
            for position in (0, last)
        }
        self.layers = nn.ModuleDict(built)
        self.start, self.stop = 0, last + 1
        self.observer: ShardObserver | None = None
        self._hooks: list[Callable[[int], None]] = []
        self._tied = bool(net.tied_parameters)
        if self._tied:
            # A copy with the same storage: its gradient is summed separately, as between stages.
            first = self._rows(0).weight
            copy = nn.Parameter(first.data, first.requires_grad)
            built[str(last)].weight = attach_shard(copy, shard_of(first))

    def logical_names(self) -> list[tuple[str, nn.Parameter]]:
        """Return (logical name, parameter); tied weights have one name."""
        names = ["layers.0.weight", f"layers.{0 if self._tied else self.stop - 1}.weight"]
        return list(zip(names, (self.embedding.weight, self.head.weight), strict=True))

    @property
    def num_rows(self) -> tuple[int, int]:
        """The local rows of embedding and head, without padding."""
        first, last = self.embedding, self.head
        return first.stop - first.start, last.stop - last.start

    @property
    def embedding(self) -> _Rows:
        return self._rows(0)

    @property
    def head(self) -> _Rows:
        return self._rows(self.stop - 1)

    def _rows(self, position: int) -> _Rows:
        return cast(_Rows, self.layers[str(position)])

    def embed(self, ids: Tensor) -> Tensor:
        """Return the local rows of `ids` [..., hidden]; 0 for ids of other shards."""
        layer = self.embedding
        elsewhere = (ids < layer.start) | (ids >= layer.stop)
        rows = F.embedding((ids - layer.start).masked_fill(elsewhere, 0), layer.weight.detach())
        return rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    def embed_gradient(self, ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local rows of `ids`, and `gradient` with 0 for ids of other shards."""
        layer = self.embedding
        elsewhere = (ids < layer.start) | (ids >= layer.stop)
        local = (ids - layer.start).masked_fill(elsewhere, 0)
        return local, gradient.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def joined(self, logits: Sequence[Tensor]) -> Tensor:
        """Return this tensor rank's slice of the whole logits; collective over the tensor ranks.

        Args:
            logits: logits of the rows of each pipeline rank and this tensor rank, with padding.

        Shape:
            [tokens, rows] of each pipeline rank  ->  [tokens, pipeline ranks * rows]
        """
        parts, axis = torch.stack(list(logits), 1), self.tensor  # [tokens, pipeline, rows]
        if axis.size == 1:
            return parts.flatten(1)
        gathered = start_all_gather(parts, axis, 0)().view(axis.size, *parts.shape)
        whole = gathered.permute(1, 2, 0, 3).flatten(1)
        return whole.chunk(axis.size, 1)[axis.rank]

    def head_rows(self) -> HeadRows:
        head = self.head
        return HeadRows(head.weight, head.start, head.stop)

    def register_layer_hook(self, hook: Callable[[int], None]) -> None:
        """Call `hook` with the position of embedding or head before a pass uses its weight."""
        self._hooks.append(hook)

    def observed(self, position: int, x: Tensor) -> AbstractContextManager[None]:
        """Return the context in which E or S runs; see `ShardObserver`."""
        return nullcontext() if self.observer is None else self.observer.measure(position, x)

    def before_use(self, position: int) -> None:
        for hook in self._hooks:
            hook(position)


def vocabulary_split(net: PipelineModule) -> VocabularySplit:
    """Return how `net` is cut for vocabulary parallelism.

    Raises:
        ConfigError: it does not say so; on every rank.
    """
    if net.vocabulary is None:
        raise ConfigError(
            "pipeline.vocabulary 'parallel' needs a model whose embedding and output head can be "
            "cut over the pipeline ranks, which is pipemega's GPT (model.type 'gpt') without LoRA: "
            "use that model, or set pipeline.vocabulary to 'stage'",
            on_every_rank=True,
        )
    return cast(VocabularySplit, net.vocabulary)


def shard_axis(mesh: Mesh) -> Axis:
    """Return the axis of all shards of this data rank; it does not communicate."""
    tensor, pipeline = mesh.tensor, mesh.pipeline
    ranks = tuple(range(pipeline.size * tensor.size))
    return Axis("vocabulary", ranks, pipeline.rank * tensor.size + tensor.rank)

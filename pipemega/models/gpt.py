"""GPT as a list of LayerSpecs, in GPT-2 or Llama style.

    GPT-2 style   learned positions, LayerNorm, GELU, biases, tied head
    Llama style   rotary positions, RMSNorm, SwiGLU, no biases, grouped queries, untied head

    position      0           1           2 .. L+1     L+2    L+3
    layer         embedding   positions   blocks       norm   head

The message between layers is `hidden` [batch, sequence, hidden] (a slice of the sequence under
sequence parallelism); (hidden, positions) if position ids restart at each document; or (hidden,
positions, documents) if moreover no token sees another document. Positions and documents are
[batch, sequence].

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Su et al.
2021, arXiv:2104.09864 (rotary positions); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.errors import DataError
from pipemega.kernels import Kernels
from pipemega.models.block import Block, Hidden
from pipemega.models.block_norm import hidden_norm
from pipemega.models.document_mask import documents_of
from pipemega.models.gpt_config import GPTConfig
from pipemega.models.gpt_vocabulary import gpt_vocabulary
from pipemega.parameters import Shard, attach_shard, normal
from pipemega.pipeline.microbatch_loss import WeightedLoss
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec, TiedLayerSpec
from pipemega.tensor_parallel import (
    DeferredLogits,
    Dropout,
    VocabParallelEmbedding,
    VocabParallelHead,
    cross_entropy_sum,
)
from pipemega.tensor_parallel.collectives import SEQUENCE_DIM, slice_of

GPTInputs = Tensor | tuple[Tensor, Tensor] | dict[str, Tensor]


def gpt(
    config: GPTConfig, kernels: Kernels | None = None, *, boundary: Any = None
) -> PipelineModule:
    """Return the model with its loss; labels are token ids, or -100 for ignored tokens.

    Args:
        kernels: selects the norms; torch's by default.
        boundary: see `PipelineModule`.
    """
    kernels = kernels or Kernels.detect("cpu")
    c, init_method = config, normal(config.init_method_std)
    vocabulary: dict[str, Any] = {
        "axis": TENSOR_AXIS,
        "divisible_by": c.make_vocab_size_divisible_by,
        "init_method": init_method,
        "sequence_parallel": c.sequence_parallel,
    }

    def vocabulary_layer(layer: type[nn.Module]) -> LayerSpec:
        if c.untie_embeddings_and_output_weights:
            return LayerSpec(layer, c.vocab_size, c.hidden_size, **vocabulary)
        return TiedLayerSpec("words", layer, c.vocab_size, c.hidden_size, **vocabulary)

    net = PipelineModule(
        [
            vocabulary_layer(TokenEmbedding),
            LayerSpec(Positions, c, kernels, TENSOR_AXIS),
            *(LayerSpec(Block, c, kernels, TENSOR_AXIS) for _ in range(c.num_layers)),
            LayerSpec(FinalNorm, c, kernels, TENSOR_AXIS),
            vocabulary_layer(VocabParallelHead),
        ],
        loss_fn=LayerSpec(GPTLoss, c, TENSOR_AXIS),
        boundary=boundary,
    )
    net.checkpoints, net.sample_tokens = c.checkpoints, c.seq_length
    net.vocabulary = gpt_vocabulary(c, _per_token)
    return net


class TokenEmbedding(VocabParallelEmbedding):
    """Maps token ids to hidden.

    The inputs are token ids; (token ids, positions), in which a token sees all earlier ones; or a
    dict with transformers' names: `input_ids`, `position_ids` and `attention_mask`. A dict with
    `position_ids` has several documents, each of which starts where the positions do not continue,
    and no token sees another document. `attention_mask` is 0 for padding.

    Shape:
        ids, positions, attention_mask [batch, sequence]  ->  hidden [batch, sequence (/ T), hidden]
        and what the other layers need of each token; see above
    """

    def forward(self, inputs: GPTInputs) -> Hidden:  # type: ignore[override]
        tokens, *per_token = _per_token(inputs)
        hidden = super().forward(tokens)
        return (hidden, *per_token) if per_token else hidden


def _per_token(inputs: GPTInputs) -> tuple[Tensor, ...]:
    """Return the token ids, and what the blocks need of each token."""
    if isinstance(inputs, dict):
        _refuse_foreign_inputs(inputs)
        tokens, positions = inputs["input_ids"], inputs.get("position_ids")
        documents = documents_of(positions, inputs.get("attention_mask"))
        if positions is None and documents is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return (tokens, *(x for x in (positions, documents) if x is not None))
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _refuse_foreign_inputs(inputs: dict[str, Tensor]) -> None:
    foreign = sorted(inputs.keys() - {"input_ids", "position_ids", "attention_mask"})
    if "input_ids" not in inputs or foreign:
        raise DataError(
            "the GPT takes input_ids, and optionally position_ids and attention_mask, but the "
            f"inputs of this batch are {', '.join(sorted(inputs))}"
        )


class Positions(nn.Module):
    """Normalizes the token embeddings and adds learned positions, if configured; then dropout.

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        c = config
        self._axis, self._sequence_parallel = axis, c.sequence_parallel
        self.norm = hidden_norm(c, kernels) if c.embedding_norm else None
        self.dropout = Dropout(c.hidden_dropout, axis=axis, sequence_parallel=c.sequence_parallel)
        self.weight: nn.Parameter | None = None
        if c.position_embedding_type == "learned_absolute":
            shape, init_method = (c.num_positions, c.hidden_size), normal(c.init_method_std)
            shard = Shard(shape, partial_gradient=c.sequence_parallel, init_method=init_method)
            self.weight = attach_shard(nn.Parameter(torch.empty(shape)), shard)

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, *per_token = inputs if isinstance(inputs, tuple) else (inputs,)
        if self.norm is not None:
            hidden = self.norm(hidden)
        hidden = self.dropout(self._added(hidden, *per_token))
        return (hidden, *per_token) if per_token else hidden

    def _added(self, hidden: Tensor, positions: Tensor | None = None, *_: Tensor) -> Tensor:
        if self.weight is None:
            return hidden
        if positions is None:
            length = hidden.shape[1] * (self._axis.size if self._sequence_parallel else 1)
            _check_length(length, self.weight.shape[0])
            added = self.weight[:length].unsqueeze(0)
        else:
            added = F.embedding(positions, self.weight)
        if self._sequence_parallel:
            # The reduction of partial gradients sums the gradient of the slices over the ranks.
            added = slice_of(added, self._axis, SEQUENCE_DIM)
        return hidden + added


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise DataError(
            f"a sample has {length} tokens, and the model has positions for "
            f"model.max_position_embeddings = {limit}: shorten the samples, or increase it"
        )


class FinalNorm(nn.Module):
    """The norm before the head; drops what the blocks need of each token."""

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        self.norm = hidden_norm(config, kernels)

    def forward(self, inputs: Hidden) -> Tensor:
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.norm(hidden)  # type: ignore[no-any-return]


class GPTLoss(nn.Module):
    """Cross entropy over a vocabulary that is sharded over the tensor ranks.

    Takes logits, or the input of the head, whose logits are then never in memory as a whole.
    Returns the sum of the token losses and the number of tokens that are not ignored, both divided
    by the sequence length: the weight of a micro-batch is about its number of samples, which fits
    fp16.
    """

    takes_deferred_logits = True

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._config = axis, config

    def forward(self, logits: Tensor | DeferredLogits, labels: Tensor) -> WeightedLoss:
        c = self._config
        total = cross_entropy_sum(
            logits,
            labels,
            axis=self._axis,
            vocab_size=c.vocab_size,
            factor=1 / c.seq_length,
            label_smoothing=c.label_smoothing,
            z_loss=c.z_loss,
        )
        return WeightedLoss(total, (labels != -100).sum().to(total.dtype) / c.seq_length)

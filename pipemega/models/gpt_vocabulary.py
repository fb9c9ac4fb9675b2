"""How the GPT is cut for vocabulary parallelism: layers without the embedding and the head."""

from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.models.block import Hidden
from pipemega.models.gpt_config import GPTConfig
from pipemega.pipeline.microbatch_loss import WeightedLoss
from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec
from pipemega.pipeline.stage_input import collect_gradients
from pipemega.pipeline.vocabulary_shard import EmbeddedInputs, VocabularySplit
from pipemega.tensor_parallel.collectives import (
    copy_to_tensor,
    gather_sequence,
    reduce_scatter_sequence,
    sum_in_place,
)
from pipemega.tensor_parallel.output_shard import OutputShard
from pipemega.tensor_parallel.shard_softmax import TokenObjective


def gpt_vocabulary(config: GPTConfig, per_token: Any) -> VocabularySplit:
    """Return the cut of a GPT.

    Args:
        per_token: inputs of the model -> (token ids, what the blocks need of each token).
    """
    c = config
    return VocabularySplit(
        embedding=LayerSpec(EmbeddedTokens, c, per_token, TENSOR_AXIS),
        head=LayerSpec(WholeHidden, c, TENSOR_AXIS),
        mean_loss=LayerSpec(SumOfTokenLosses, c),
        token_ids=lambda inputs: per_token(inputs)[0],
        token_loss=TokenObjective(c.vocab_size, c.label_smoothing, c.z_loss),
        hidden_size=c.hidden_size,
    )


class EmbeddedTokens(nn.Module):
    """In place of the embedding: sums the rows that the tensor ranks have found.

    Shape:
        (inputs, rows [batch, sequence, hidden])  ->  the output of the embedding
    """

    def __init__(
        self, config: GPTConfig, per_token: Any, axis: Axis, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._per_token, self._axis = per_token, axis
        self._hidden_size, self._sequence_parallel = config.hidden_size, config.sequence_parallel
        self._dtype = dtype or torch.get_default_dtype()

    def forward(self, inputs: Any) -> Hidden:
        if isinstance(inputs, EmbeddedInputs):
            (_, *per_token), rows = self._per_token(inputs.inputs), inputs.rows
        else:  # the planner has only the inputs
            ids, *per_token = self._per_token(inputs)
            zeros = torch.zeros(*ids.shape, self._hidden_size, dtype=self._dtype, device=ids.device)
            # As in a run, autograd does not keep rows that no layer saves: they are no leaf.
            rows, _ = collect_gradients(zeros.requires_grad_())
        if self._axis.size > 1:
            reduce = reduce_scatter_sequence if self._sequence_parallel else sum_in_place
            rows = reduce(rows, self._axis)
        return (rows, *per_token) if per_token else rows


class WholeHidden(nn.Module):
    """In place of the head: the whole sequence on every tensor rank.

    Backward sums the gradients of the tensor ranks, each of which has other rows of the head.
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._sequence_parallel = axis, config.sequence_parallel
        # Of the logits that the passes compute where the caller needs them.
        self.output_shard = OutputShard(axis, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._axis.size == 1:
            return hidden
        return (gather_sequence if self._sequence_parallel else copy_to_tensor)(hidden, self._axis)


class SumOfTokenLosses(nn.Module):
    """Maps the losses of the tokens and the labels to the loss of `GPTLoss`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self._length = config.seq_length

    def forward(self, losses: Tensor, labels: Tensor) -> WeightedLoss:
        num_tokens = (labels != -100).sum().to(losses.dtype)
        return WeightedLoss(losses.sum() / self._length, num_tokens / self._length)

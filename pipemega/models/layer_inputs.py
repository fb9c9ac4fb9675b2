"""The inputs of the layers of the GPT, for `pipeline.shapes: "declared"`."""

from collections.abc import Callable
from typing import Any

import torch

from pipemega.models.gpt_config import GPTConfig


def layer_inputs(
    config: GPTConfig,
    micro_batch_size: int,
    dtype: torch.dtype,
    *,
    tensor_ranks: int = 1,
    per_token: int = 0,
) -> Callable[[int], Any]:
    """Return a function of a layer's position to its input as meta tensors.

    Args:
        dtype: of the parameters.
        tensor_ranks: shard the sequence under sequence parallelism.
        per_token: numbers that the layers need of each token (`data.inputs_per_token`).

    Shape:
        hidden [micro-batch, sequence (/ T), hidden]; with `per_token` a tuple of it and positions
        (and documents), each [micro-batch, sequence]
    """
    c = config
    length = c.seq_length // tensor_ranks if c.sequence_parallel else c.seq_length
    hidden = torch.empty(
        micro_batch_size, length, c.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    number = torch.empty(micro_batch_size, c.seq_length, dtype=torch.int64, device="meta")
    message = (hidden, *(number.clone() for _ in range(per_token))) if per_token else hidden
    # Embedding, positions, blocks, norm; the norm drops the numbers per token.
    head = c.num_layers + 3

    def input_of(position: int) -> Any:
        return message if position < head else hidden

    return input_of

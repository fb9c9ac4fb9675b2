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
    with_positions: bool = False,
) -> Callable[[int], Any]:
    """Return a function of a layer's position to its input as meta tensors.

    Args:
        dtype: of the parameters.
        tensor_ranks: shard the sequence under sequence parallelism.
        with_positions: the batches contain position ids (`data.reset_position_ids`).

    Shape:
        hidden [micro-batch, sequence (/ T), hidden], or (hidden, positions [micro-batch, sequence])
    """
    c = config
    length = c.seq_length // tensor_ranks if c.sequence_parallel else c.seq_length
    hidden = torch.empty(
        micro_batch_size, length, c.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    positions = torch.empty(micro_batch_size, c.seq_length, dtype=torch.int64, device="meta")
    # Embedding, positions, blocks, norm; the norm drops the position ids.
    head = c.num_layers + 3

    def input_of(position: int) -> Any:
        return (hidden, positions) if with_positions and position < head else hidden

    return input_of

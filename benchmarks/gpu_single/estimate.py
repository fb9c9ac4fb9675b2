"""Estimates the memory of a training step of the GPT from the tensors that it keeps.

Bytes, for N parameters, micro-batches of b samples with s tokens, hidden size h, a heads, L layers
and vocabulary size V:

    weights          2 N     bf16 or fp16
    masters          4 N     fp32
    gradients        4 N     fp32, accumulated over micro-batches
    Adam             8 N     two fp32 moments

Activations of one micro-batch, for fused attention (no s x s matrix) and no dropout:

    a layer          32 bsh  input, query-key-value (3), attention output, sum after attention,
                             outputs of two norms, MLP before and after GELU (8): 16 x 2
                  +   4 bsa  log-sum-exp of attention, fp32
                  +  16 bs   mean and 1/deviation of two norms, fp32
      selective      32 bsh + 16 bs: attention is recomputed; this frees only the log-sum-exp
      full            2 bsh  input; one layer at a time has all of the above
    the loss          6 cV   logits of a chunk of c tokens in 16 bits and in fp32
                  +  10 hV   gradient of the head in fp32, of a chunk in 16 bits and in fp32
                  +   6 bsh + 8 bs  input and output of the last norm, gradient of the output
    the last layer   12 bsh  its largest gradients in backward, after the loss was freed
                  +   2 hV   gradient of the head; it waits for the tied embedding's gradient
        full         42 bsh + 4 bsa + 16 bs: it was just recomputed, from its kept input

At the peak all layers are kept: at the loss, or in backward of the last layer. Not included:
workspaces of libraries, rounding of the allocator, small temporaries.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from pipemega.tensor_parallel.deferred_logits import HeadShard, chunk_length

Recompute = Literal["none", "selective", "full"]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")

# Factor of bsh at the peak of a layer's backward: gradients of the output of the head's norm, of
# the layer's output and of the GELU output.
_GRADIENTS_IN_A_LAYER = 2 + 2 + 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch; the defaults are a GPT with 1.3 B parameters."""

    hidden: int = 2048
    layers: int = 24
    heads: int = 16
    seq: int = 2048
    vocab: int = 50304
    micro_batch: int = 8
    num_microbatches: int = 4

    @property
    def parameters(self) -> int:
        """Number of parameters: embeddings (tied head), weights, biases and norms."""
        h = self.hidden
        return (self.vocab + self.seq) * h + self.layers * (12 * h * h + 13 * h) + 2 * h

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.num_microbatches * self.micro_batch * self.seq


def layer_bytes(sizes: Sizes, recompute: Recompute) -> int:
    """Return the bytes that one layer keeps from forward to backward."""
    tokens, h = sizes.micro_batch * sizes.seq, sizes.hidden
    if recompute == "full":
        return 2 * tokens * h
    log_sum_exp = 4 * tokens * sizes.heads if recompute == "none" else 0
    return tokens * (32 * h + 16) + log_sum_exp


def estimate(sizes: Sizes, recompute: Recompute) -> dict[str, int]:
    """Return bytes by part, and their sum as "total"."""
    n, tokens = sizes.parameters, sizes.micro_batch * sizes.seq
    head = sizes.vocab * sizes.hidden
    weight = torch.empty(sizes.vocab, sizes.hidden, dtype=torch.bfloat16, device="meta")
    chunk = chunk_length(HeadShard(weight, 0, sizes.vocab, sizes.vocab), tokens)
    at_the_loss = 6 * chunk * sizes.vocab + 10 * head + tokens * (6 * sizes.hidden + 8)
    in_the_last_layer = _GRADIENTS_IN_A_LAYER * tokens * sizes.hidden + 2 * head
    if recompute == "full":
        in_the_last_layer += layer_bytes(sizes, "none") - layer_bytes(sizes, "full")
    parts = {
        "weights": 2 * n,
        "masters": 4 * n,
        "gradients": 4 * n,
        "adam": 8 * n,
        "layers": sizes.layers * layer_bytes(sizes, recompute),
        "loss or last layer": max(at_the_loss, in_the_last_layer),
    }
    return parts | {"total": sum(parts.values())}

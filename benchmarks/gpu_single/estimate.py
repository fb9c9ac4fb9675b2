"""How much memory a training step of the GPT should take, by counting what is kept.

Bytes, with N parameters, b samples of s tokens in a micro-batch, width h, a heads, L layers and a
vocabulary of V:

    weights          2 N     bf16 or fp16
    masters          4 N     fp32
    gradients        4 N     fp32, summed over micro-batches
    Adam             8 N     two fp32 moments

and of activations, which are one micro-batch's, where attention never holds its s x s matrix and
there is no dropout:

    a layer          32 bsh  its input, query-key-value (3), attention's output, the sum behind it,
                             two norms' outputs, the wide part before and behind GELU (8): 16 x 2
                  +   4 bsa  attention's log of the denominator, fp32
                  +  16 bs   mean and 1/deviation of two norms, fp32
      selective      32 bsh + 16 bs: attention is run again, and only the denominator goes
      full            2 bsh  its input; one layer at a time has all of the above
    the loss         10 bsV  logits in 16 bits and in fp32, the softmax in fp32
                  +   4 bsh + 8 bs  input and output of the last norm
    the last layer   10 bsh  backward, its widest gradients, where the loss is done with
        full         42 bsh + 4 bsa + 16 bs: it has just been computed again

All layers are kept when the peak comes: at the loss, or in the backward pass of the last layer.
Not counted: the work space of the libraries, the allocator's rounding, and small temporaries.
"""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")

# Of bsh, at the fullest moment of a layer's backward: its output's gradient and that behind GELU.
_GRADIENTS_IN_A_LAYER = 2 + 8


@dataclass(frozen=True)
class Sizes:
    """What is trained; the defaults are a GPT of 1.3 B parameters."""

    hidden: int = 2048
    layers: int = 24
    heads: int = 16
    seq: int = 2048
    vocab: int = 50304
    micro_batch: int = 8
    num_microbatches: int = 4

    @property
    def parameters(self) -> int:
        """Embeddings (the head is tied), and in each layer weights, biases and norms."""
        h = self.hidden
        return (self.vocab + self.seq) * h + self.layers * (12 * h * h + 13 * h) + 2 * h

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.num_microbatches * self.micro_batch * self.seq


def layer_bytes(sizes: Sizes, recompute: Recompute) -> int:
    """What one layer keeps from its forward to its backward pass."""
    tokens, h = sizes.micro_batch * sizes.seq, sizes.hidden
    if recompute == "full":
        return 2 * tokens * h
    denominator = 4 * tokens * sizes.heads if recompute == "none" else 0
    return tokens * (32 * h + 16) + denominator


def estimate(sizes: Sizes, recompute: Recompute) -> dict[str, int]:
    """Bytes by part, and their sum as "total"."""
    n, tokens = sizes.parameters, sizes.micro_batch * sizes.seq
    at_the_loss = tokens * (10 * sizes.vocab + 4 * sizes.hidden + 8)
    in_the_last_layer = _GRADIENTS_IN_A_LAYER * tokens * sizes.hidden
    if recompute == "full":
        in_the_last_layer += layer_bytes(sizes, "none")
    parts = {
        "weights": 2 * n,
        "masters": 4 * n,
        "gradients": 4 * n,
        "adam": 8 * n,
        "layers": sizes.layers * layer_bytes(sizes, recompute),
        "loss or last layer": max(at_the_loss, in_the_last_layer),
    }
    return parts | {"total": sum(parts.values())}

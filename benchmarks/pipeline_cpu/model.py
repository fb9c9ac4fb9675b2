"""The GPT that all systems train, in stock torch modules, and its data.

A GPT-2 block (norm, attention, norm, feed-forward, biases everywhere, exact GELU), learned
positions, a final norm, an untied head, no dropout.  Layers are numbered along the model:

    0              token and position embedding
    1 .. L         blocks
    L + 1          final norm and head

Every layer has its own random generator, so a rank can build only its layers and still gets the
weights of the whole model.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch; the comparison uses the defaults."""

    vocab: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    seq: int = 256
    micro_batch: int = 2
    num_microbatches: int = 8
    seed: int = 1234
    lr: float = 1e-3
    weight_decay: float = 0.01

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.num_microbatches * self.micro_batch * self.seq

    @property
    def num_units(self) -> int:
        """Layers in the numbering above, embedding and head included."""
        return self.layers + 2


class Embedding(nn.Module):
    """ids [batch, seq] -> hidden states [batch, seq, hidden]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        self.position = nn.Embedding(sizes.seq, sizes.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position.weight[: ids.shape[1]]


class Block(nn.Module):
    """One pre-norm transformer block; [batch, seq, hidden] -> the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.up = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.down = nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, qkv: Tensor) -> Tensor:
        batch, seq, width = qkv.shape
        # [batch, seq, 3 * hidden] -> three of [batch, heads, seq, hidden / heads]
        query, key, value = qkv.view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, seq, width // 3)


class Head(nn.Module):
    """[batch, seq, hidden] -> logits [batch, seq, vocab]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.project = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


def build_layer(sizes: Sizes, index: int) -> nn.Module:
    """Return layer `index` with its weights: normal(0.02), biases 0, norms 1."""
    kind = Embedding if index == 0 else Head if index == sizes.num_units - 1 else Block
    layer = kind(sizes)
    generator = torch.Generator().manual_seed(sizes.seed * 1000 + index)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return layer


def build_layers(sizes: Sizes, start: int, stop: int) -> nn.Sequential:
    """Return layers start to stop - 1 as one module."""
    return nn.Sequential(*(build_layer(sizes, index) for index in range(start, stop)))


def initial_state(sizes: Sizes) -> dict[str, Tensor]:
    """Return `layers.INDEX.NAME` -> tensor of the whole model, for systems with other modules."""
    return {
        f"layers.{index}.{name}": value
        for index in range(sizes.num_units)
        for name, value in build_layer(sizes, index).state_dict().items()
    }


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, seq, vocab] against [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(sizes: Sizes, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a whole step, [num_microbatches * micro_batch, seq] each.

    Small ids are frequent, so the model learns from the first step on, and a wrong gradient shows
    in the losses of the next steps.
    """
    generator = torch.Generator().manual_seed(sizes.seed + 1 + step)
    rows = sizes.num_microbatches * sizes.micro_batch
    ids = (torch.rand(rows, sizes.seq + 1, generator=generator) ** 4 * sizes.vocab).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def micro_batches(sizes: Sizes, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a step."""
    inputs, labels = batch(sizes, step)
    return list(zip(inputs.split(sizes.micro_batch), labels.split(sizes.micro_batch), strict=True))

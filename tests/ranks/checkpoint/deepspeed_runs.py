"""Loads a checkpoint that DeepSpeed wrote on 2 x 2 ranks; test_deepspeed_weights.py compares."""

from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.errors import CheckpointError

WORDS, WIDTH = 16, 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.word_embeddings(ids) * self.scale


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.norm(x))


def _same(x: Tensor) -> Tensor:
    return x


def _head(layer: Embedding, x: Tensor) -> Tensor:
    return x @ layer.word_embeddings.weight.T


def _model(width: int) -> PipelineModule:
    tied: dict[str, Any] = {"tied_weight_attr": "word_embeddings.weight"}
    blocks = [LayerSpec(Block, width) for _ in range(3)]
    return PipelineModule(
        [
            _same,
            TiedLayerSpec("embed", Embedding, **tied),
            *blocks,
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec("embed", Embedding, forward_fn=_head, **tied),
        ],
        nn.functional.cross_entropy,
    )


def load(folder: str, tag: str | None, width: int = WIDTH) -> Any:
    """Return logical name -> values, in full; or the text of the error."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "mesh": {"pipeline": 2},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    engine, *_ = initialize(_model(width), config)
    try:
        _, client = engine.load_checkpoint(folder, tag, load_module_only=True)
    except CheckpointError as error:
        return str(error)
    scales = [b.item() for name, b in engine.module.named_buffers() if name.endswith("scale")]
    state = {name: tensor.numpy() for name, tensor in engine.parameter_state().items()}
    return state, client, scales

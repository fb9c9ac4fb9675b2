"""Trains a small ViT on any mesh, and returns everything to compare."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import build_mesh_of, initialize
from pipemega.models import build_model
from tests.ranks.training_runs import train_engine

MICRO, NUM_MICROBATCHES, STEPS = 3, 4, 2
SIZE, CHANNELS, CLASSES = 9, 2, 5

# 9 patches and a class token: 10 positions, which are no multiple of 4 tensor ranks.
MODEL = {
    "type": "vit",
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "image_size": SIZE,
    "patch_size": 3,
    "num_channels": CHANNELS,
    "num_classes": CLASSES,
    "hidden_dropout": 0.1,
    "drop_path": 0.3,
    "init": "torch",
    "label_smoothing": 0.1,
}


def settings(**changes: Any) -> dict[str, Any]:
    """Return a config; a change such as mesh={"tensor": 2} is merged into its section."""
    config: dict[str, Any] = {
        "train_batch_size": NUM_MICROBATCHES * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "seed": 7,
        # With ZeRO the last bit of the norm depends on the slices, so clipped gradients would too.
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "model": dict(MODEL),
    }
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def microbatch(step: int, place: int, soft: bool = False) -> tuple[Tensor, Tensor]:
    """Return micro-batch `place` of the global batch.

    Args:
        soft: labels are probabilities.
    """
    generator = torch.Generator().manual_seed(1000 * step + place)
    images = torch.randn(MICRO, CHANNELS, SIZE, SIZE, generator=generator)
    if soft:
        return images, torch.rand(MICRO, CLASSES, generator=generator).softmax(-1)
    return images, torch.randint(CLASSES, (MICRO,), generator=generator)


def data(engine: Engine, step: int, soft: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of this data rank."""
    ranks, rank = engine.mesh.data.size, engine.mesh.data.rank
    for m in range(engine.batch.num_microbatches):
        yield microbatch(step, m * ranks + rank, soft)


def build(config: Mapping[str, Any]) -> Engine:
    torch.set_default_dtype(torch.float64)
    try:
        loaded = load(config)
        mesh = build_mesh_of(loaded)
        engine, *_ = initialize(build_model(loaded, mesh), loaded, mesh=mesh)
        return engine
    finally:
        torch.set_default_dtype(torch.float32)


def train(config: Mapping[str, Any], soft: bool = False) -> dict[str, Any]:
    """Return losses, norms, gradients of each step, and parameters after the last."""
    return train_engine(build(config), partial(data, soft=soft), STEPS)


def save(config: Mapping[str, Any], folder: str) -> float:
    """Save after one step; return the loss of the next one."""
    engine = build(config)
    engine.train_batch(data(engine, 0))
    engine.save_checkpoint(folder)
    return engine.train_batch(data(engine, 1))


def resume(config: Mapping[str, Any], folder: str) -> float:
    """Load a checkpoint; return the loss of the next step."""
    engine = build(config)
    engine.load_checkpoint(folder)
    return engine.train_batch(data(engine, 1))


def train_all(configs: list[Mapping[str, Any]], soft: bool = False) -> list[dict[str, Any]]:
    """Train several configs one after another."""
    return [train(config, soft) for config in configs]

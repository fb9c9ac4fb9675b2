"""A model with few parameters and large activations, to test the messages of schedules.

NCCL may buffer small messages, and then a send ends before its receive is posted. So an order of
messages that stands still can pass with small activations. On GPUs an activation has 64 MiB here.
The model has linears and embeddings, so that I and W of a split backward both do work.
"""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.engine.engine import Engine

VOCAB, CLASSES, RANK = 64, 8, 16
# Rows and columns of an activation in fp32: 64 MiB on a GPU.
SIZES = {"cuda": (4096, 4096), "cpu": (6, 16)}
STEPS = 3


class Mix(nn.Module):
    """x + tanh(up(down(norm(x)))): an activation of full width, and two narrow matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, RANK)
        self.up = nn.Linear(RANK, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.up(self.down(self.norm(x))))
        return y


def build(device: str, size: int, layers: int, **changes: Any) -> Engine:
    """Return an engine.

    Args:
        size: pipeline ranks.
        layers: number of layers of the model, at least 2.
        changes: sections of the config.
    """
    rows, width = SIZES[device]
    specs: list[Any] = [LayerSpec(nn.Embedding, VOCAB, width)]
    specs += [LayerSpec(Mix, width) for _ in range(layers - 2)]
    specs += [LayerSpec(nn.Linear, width, CLASSES)]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": changes.pop("num_microbatches", 2 * size),
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "seed": 3,
        "mesh": {"device": device, "pipeline": size, "timeout_seconds": 90},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        **changes,
    }
    engine, *_ = initialize(PipelineModule(specs, loss_fn=F.cross_entropy), config)
    return engine


def microbatches(rows: int, step: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens = torch.randint(VOCAB, (rows,), generator=generator)
        yield tokens, tokens % CLASSES


def train(
    device: str, size: int, layers: int, steps: int = STEPS, **changes: Any
) -> dict[str, Any]:
    """Train a few steps and evaluate; return numbers of each step and of each parameter.

    The norm and the sum of a parameter differ if any part of the gradients was wrong.
    """
    engine = build(device, size, layers, **changes)
    count = engine.batch.num_microbatches
    result: dict[str, Any] = {"loss": [], "norm": [], "plans": []}
    rows, first = SIZES[device][0], engine.plan
    for step in range(steps):
        result["loss"].append(engine.train_batch(microbatches(rows, step, count)))
        result["norm"].append(engine.get_global_grad_norm())
        engine.settle()
        result["plans"].append(engine.plan.name)
    result["replaced"] = engine.plan is not first
    result["eval"] = engine.eval_batch(microbatches(rows, 99, count))
    result["parameters"] = {
        name: [float(value.double().norm()), float(value.double().sum())]
        for name, value in engine.parameter_state().items()
    }
    totals = engine.timers.totals()
    result["timed"] = sorted(name for name, seconds in totals.items() if seconds > 0)
    return result


def train_with_cache(device: str, cache: str, **arguments: Any) -> dict[str, Any]:
    """Train with the folder `cache` for measured costs."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}):
        return train(device, **arguments)

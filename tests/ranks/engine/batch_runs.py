"""Steps and evaluations on whole batches, and evaluations of whole data sets, on any mesh."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega
from pipemega.engine.engine import Engine
from tests.ranks.engine.epoch_runs import BATCH, Stream, engine_on, pairs, state_of

STEPS = 3


def batch(step: int, engine: Engine) -> tuple[Tensor, Tensor]:
    """Return the share of this data rank of a global batch."""
    x, y = (torch.stack(part) for part in zip(*pairs(BATCH, seed=step), strict=True))
    data = engine.mesh.data
    own = torch.arange(BATCH).view(data.size, -1)[data.rank]
    return x[own], y[own]


def micro_batches(step: int, engine: Engine) -> list[tuple[Tensor, Tensor]]:
    x, y = batch(step, engine)
    size = engine.batch.micro_batch_size
    return [*zip(x.split(size), y.split(size), strict=True)]


def train(config: dict[str, Any], loss: str = "mean") -> dict[str, Any]:
    """Train on batches and on iterators over the same samples; return what both give."""
    torch.set_default_dtype(torch.float64)
    try:
        results: dict[str, Any] = {}
        for given in ("iterator", "batch"):
            engine = engine_on(None, config, loss)
            found: dict[str, Any] = {"loss": [], "outputs": []}
            for step in range(STEPS):
                if given == "iterator":
                    value = engine.train_batch(iter(micro_batches(step, engine)))
                else:
                    before = engine.infer([x for x, _ in micro_batches(step, engine)])
                    value, kept = engine.train_batch(batch=batch(step, engine), return_outputs=True)
                    assert (kept is None) == (before is None)
                    for one, other in zip(kept or (), before or (), strict=True):
                        assert not one.requires_grad
                        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
                    found["outputs"].append(len(kept or ()))
                found["loss"].append(value)
            found["samples"] = engine.consumed_samples
            results[given] = found | {"parameters": state_of(engine)}
        return results
    finally:
        torch.set_default_dtype(torch.float32)


def evaluate(config: dict[str, Any]) -> dict[str, Any]:
    """Evaluate 13 samples in several ways."""
    torch.set_default_dtype(torch.float64)
    try:
        engine = engine_on(None, config)
        valid = pairs(13, seed=1)
        x, y = (torch.stack(part) for part in zip(*valid, strict=True))
        seen: list[tuple[list[float], list[float]]] = []

        def keep(outputs: Tensor, labels: Tensor) -> None:
            assert len(outputs) == len(labels)
            seen.append((outputs[:, 0].tolist(), labels[:, 0].tolist()))

        data = engine.mesh.data
        # Other numbers on each data rank: all samples on the first one, if there are two.
        own = [*range(13)] if data.rank == 0 else []
        result: dict[str, Any] = {
            "dataset": engine.evaluate(valid, on_output=keep),
            "seen": list(seen),
            "batch": engine.eval_batch(batch=(x[own], y[own])),
            "repeated": engine.evaluate(valid, 3),
        }
        loss, outputs = engine.eval_batch(batch=(x[own], y[own]), return_outputs=True)
        result["outputs"] = None if outputs is None else [len(part) for part in outputs]
        result["again"] = loss
        outputs = engine.infer([x])
        result["reference"] = None
        if outputs is not None:
            result["reference"] = float(nn.functional.mse_loss(outputs[0], y))
        result["stream"] = engine.evaluate(Stream())
        return result
    finally:
        torch.set_default_dtype(torch.float32)


def wrong_batch(kind: str, config: dict[str, Any]) -> None:
    """Give one rank, or all ranks, a batch that cannot be cut."""
    torch.set_default_dtype(torch.float64)
    engine, rank = engine_on(None, config), dist.get_rank()
    x, y = batch(0, engine)
    if kind == "one rank":
        engine.train_batch(batch=(x[:-1], y[:-1]) if rank == 1 else (x, y))
    elif kind == "one rank without a batch":
        engine.train_batch(batch=(x[:-1], y) if rank != 1 else None)
    elif kind == "lengths":
        engine.train_batch(batch=({"x": x}, y[:-1]))
    elif kind == "no dim":
        engine.train_batch(batch=((x, torch.tensor(1.0)), y))
    elif kind == "no pair":
        engine.train_batch(batch={"x": x})
    elif kind == "three":
        engine.train_batch(batch=(x, y, x))
    elif kind == "array":
        engine.train_batch(batch=(x.numpy(), y))
    elif kind == "both":
        engine.train_batch(iter([(x, y)]), batch=(x, y))
    elif kind == "sizes":
        engine.eval_batch(batch=(x[: rank + 1], y[: rank + 1]))
    elif kind == "nothing to evaluate":
        engine.eval_batch()
    elif kind == "epochs":
        engine.set_epochs(2)
        engine.train_batch(batch=(x, y))


def roll_back_a_batch(folder: str) -> list[float]:
    """Train on batches of which the third has nan; the rank of the middle stage gets none."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "mesh": {"pipeline": 3, "device": "cpu", "timeout_seconds": 20},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "checkpoint": {"save": folder, "interval": 1},
        "training": {"on_nonfinite": {"policy": "rollback"}},
    }
    layers = [pipemega.LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
    net = pipemega.PipelineModule(layers, nn.functional.cross_entropy)
    engine, *_ = pipemega.initialize(net, config)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(4):
        inputs = torch.randn(8, 4, generator=generator)
        labels = torch.randint(4, (8,), generator=generator)
        if number == 2:
            inputs[0] = torch.nan
        batch = None if engine.mesh.pipeline.rank == 1 else (inputs, labels)
        losses.append(engine.train_batch(batch=batch))
    assert engine.global_steps == 3
    return losses

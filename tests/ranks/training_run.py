"""Trains a small GPT for a few steps, on any mesh, and hands back all that can be compared."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipemega.assemble import initialize
from pipemega.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.whole import whole_tensors

VOCAB, LENGTH, MICRO = 50, 8, 2
# A multiple of every data size from 1 to 4.
NUM_MICROBATCHES = 12
STEPS = 3

MODEL = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 24,
    "seq_length": LENGTH,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
}


def settings(**changes: Any) -> dict[str, Any]:
    """A config; a change such as mesh={"tensor": 2} is laid over its section."""
    config: dict[str, Any] = {
        "train_batch_size": NUM_MICROBATCHES * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "seed": 7,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        # From a rate above 0: every step is to change the parameters.
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.004, "warmup_max_lr": 0.01, "warmup_num_steps": 3},
        },
        "model": dict(MODEL),
    }
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def microbatch(step: int, place: int) -> tuple[Tensor, Tensor]:
    """The micro-batch at `place` of the global batch; some labels do not count."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    tokens = torch.randint(VOCAB, (MICRO, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    # Unequal numbers of tokens, so that a mean of means is not the mean.
    labels[0, : place % (LENGTH - 1)] = -100
    return tokens[:, :-1], labels


def data(engine: Engine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    ranks, rank = engine.mesh.data.size, engine.mesh.data.rank
    for m in range(engine.batch.num_microbatches):
        yield microbatch(step, m * ranks + rank)


def train(config: Mapping[str, Any], dtype: str = "float64", steps: int = STEPS) -> dict[str, Any]:
    """Losses, norms, gradients of the first step, and parameters after the last."""
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return _train(config, steps)
    finally:
        torch.set_default_dtype(torch.float32)


def build(config: Mapping[str, Any]) -> Engine:
    from pipemega.config import load

    loaded = load(config)
    engine, *_ = initialize(gpt(GPTConfig.of(loaded, VOCAB)), loaded)
    return engine


def _train(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    engine = build(config)
    gradients: list[dict[str, Tensor]] = []
    assert engine.optimizer is not None
    assert engine._step is not None
    targets = engine._step.targets

    def keep(*_: Any) -> None:
        lent = {n: t.grad.clone() for n, t in targets.named.items() if t.grad is not None}
        gradients.append(targets.whole(lent))

    engine.optimizer.register_step_pre_hook(keep)
    result: dict[str, Any] = {"loss": [], "norm": [], "scale": [], "skipped": []}
    for step in range(steps):
        result["loss"].append(engine.train_batch(data(engine, step)))
        assert engine.last_step is not None
        result["norm"].append(engine.last_step.grad_norm)
        result["scale"].append(engine.last_step.loss_scale)
        result["skipped"].append(engine.last_step.skipped)
    result["gradients"] = [whole_tensors(g, engine._model, engine.mesh) for g in gradients]
    result["parameters"] = engine.parameter_state()
    result["eval"] = engine.eval_batch(data(engine, 99))
    # Plain numbers travel between processes without shared memory.
    result["gradients"] = [
        {n: g.double().numpy() for n, g in gs.items()} for gs in result["gradients"]
    ]
    result["parameters"] = {n: p.double().numpy() for n, p in result["parameters"].items()}
    return result


def train_all(cases: list[tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
    """Several runs on one start of the ranks."""
    return [train(config, dtype) for config, dtype in cases]

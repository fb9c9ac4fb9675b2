"""Trains a small GPT for a few steps on any mesh, and returns everything to compare."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pipemega.engine import run_setup
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.models import GPTConfig, gpt, layer_inputs
from pipemega.pipeline import activation_offload
from pipemega.pipeline.model.stages import gather_full_tensors
from tests.ranks.recorded_graphs import graphs_on_cpus

VOCAB, LENGTH, MICRO = 50, 8, 2
# A multiple of every data size from 1 to 4.
NUM_MICROBATCHES = 12
STEPS = 3
# Of a dataset that is read in epochs.
SAMPLES = 2 * NUM_MICROBATCHES * MICRO + 7

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

# For comparisons in fp32. The gradient of a key bias is zero in theory, and in fp32 rounding errors
# of about 1e-12, which depend on the processor: AdamW divides them by eps, and its default of 1e-8
# makes them visible.
ADAMW_FP32 = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}}
}


def settings(**changes: Any) -> dict[str, Any]:
    """Return a config; a change such as mesh={"tensor": 2} is merged into its section."""
    config: dict[str, Any] = {
        "train_batch_size": NUM_MICROBATCHES * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "seed": 7,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        # Starts above 0, so that every step changes the parameters.
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.004, "warmup_max_lr": 0.01, "warmup_num_steps": 3},
        },
        "model": dict(MODEL),
        # On a GPU each test would compile its layers.
        "compile": {"enabled": False},
    }
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def microbatch(step: int, place: int) -> tuple[Tensor, Tensor]:
    """Return micro-batch `place` of the global batch; some labels are ignored (-100)."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    tokens = torch.randint(VOCAB, (MICRO, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    # Unequal numbers of tokens: the mean of the means is not the mean.
    labels[0, : place % (LENGTH - 1)] = -100
    return tokens[:, :-1], labels


def data(engine: Engine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    ranks, rank = engine.mesh.data.size, engine.mesh.data.rank
    for m in range(engine.batch.num_microbatches):
        yield microbatch(step, m * ranks + rank)


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the samples of the first micro-batches."""
    batches = (microbatch(0, place) for place in range(count))
    return [pair for batch in batches for pair in zip(*batch, strict=True)][:count]


def train(config: Mapping[str, Any], dtype: str = "float64", steps: int = STEPS) -> dict[str, Any]:
    """Return losses, norms, gradients of each step, and parameters after the last."""
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with offload_on_cpus(), graphs_on_cpus():
            return train_engine(build(config), data, steps)
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def offload_on_cpus(smallest: int = 64) -> Iterator[None]:
    """Let `cpu_checkpointing` move activations of CPU ranks, from this number of bytes on."""
    with (
        mock.patch.object(activation_offload, "SMALLEST_BYTES", smallest),
        mock.patch.object(run_setup, "offloads_from", return_value=True),
    ):
        yield


def build(config: Mapping[str, Any]) -> Engine:
    from pipemega.config import load

    loaded = load(config)
    gpt_config = GPTConfig.of(loaded, VOCAB)
    boundary = layer_inputs(gpt_config, MICRO, torch.get_default_dtype())
    net = gpt(gpt_config, boundary=boundary)
    # With epochs, the last step has 7 of 24 samples: the last micro-batches have one or none.
    dataset = None if loaded.training.epochs is None else samples(SAMPLES)
    engine, *_ = initialize(net, loaded, dataset)
    return engine


def train_engine(
    engine: Engine, microbatches: Callable[[Engine, int], Iterator[Any]], steps: int = STEPS
) -> dict[str, Any]:
    """Return what `train` returns.

    Args:
        microbatches: (engine, step) -> those of this data rank.
    """
    gradients: list[dict[str, Tensor]] = []
    assert engine.optimizer is not None
    assert engine.steps.optimizer_step is not None
    masters = engine.steps.optimizer_step.masters

    def keep(*_: Any) -> None:
        grads = {n: m.grad.clone() for n, m in masters.named.items() if m.grad is not None}
        gradients.append(masters.gather(grads))

    engine.optimizer.register_step_pre_hook(keep)
    result: dict[str, Any] = {"loss": [], "norm": [], "scale": [], "skipped": []}
    result |= {"params_norm": [], "num_zeros": []}
    for step in range(steps):
        given = microbatches(engine, step) if engine.loader is None else None
        result["loss"].append(engine.train_batch(given))
        assert engine.last_step is not None
        result["norm"].append(engine.last_step.grad_norm)
        result["scale"].append(engine.last_step.loss_scale)
        result["skipped"].append(engine.last_step.skipped)
        engine.settle()  # a post-validated step has its numbers for the log only then
        result["params_norm"].append(engine.last_step.params_norm)
        result["num_zeros"].append(engine.last_step.num_zeros)
    result["gradients"] = [
        gather_full_tensors(g, engine.steps.model, engine.mesh) for g in gradients
    ]
    result["parameters"] = engine.parameter_state()
    result["eval"] = engine.eval_batch(microbatches(engine, 99))
    # Arrays are sent between processes without shared memory.
    result["gradients"] = [
        {n: g.double().numpy() for n, g in gs.items()} for gs in result["gradients"]
    ]
    result["parameters"] = {n: p.double().numpy() for n, p in result["parameters"].items()}
    return result


def train_all(cases: list[tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
    """Train several configs one after another."""
    return [train(config, dtype) for config, dtype in cases]

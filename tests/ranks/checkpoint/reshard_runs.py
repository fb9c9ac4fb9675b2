"""Functions for the rank pool: runs that save on one mesh and resume on another."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from pipemega.checkpoint import newest
from pipemega.checkpoint.dcp_storage import ShardReader
from pipemega.checkpoint.tensors import TensorShard, logical_tensors
from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.models import GPTConfig, gpt
from pipemega.parameters import Shard
from pipemega.storage.filesystem import LocalStorage
from tests.ranks.checkpoint.checkpoint_runs import small_config, small_data, small_net

VOCAB, LENGTH = 50, 12
BEFORE = 2


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, some with label -100; an epoch is not a whole number of steps."""

    fingerprint = "thirty random sentences"

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB, (LENGTH + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % 3] = -100
        return tokens[:-1], labels


def build(config: Mapping[str, Any]) -> Engine:
    torch.set_default_dtype(torch.float64)
    try:
        loaded = load(config)
        engine, *_ = initialize(gpt(GPTConfig.of(loaded, VOCAB)), loaded, Sentences())
        return engine
    finally:
        torch.set_default_dtype(torch.float32)


def unbroken(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train in one process without interruption; return the step after `BEFORE` and the tensors.

    Returns:
        "loss", "norm", "rate" of that step; "tensors": name -> the full tensor after it.
    """
    engine = build(config)
    for _ in range(BEFORE):
        engine.train_batch()
    seen = next_step(engine)
    shards = logical_tensors(engine.steps.model, engine.steps.optimizer_step, engine.mesh)
    return {**seen, "tensors": {name: shard.local.numpy() for name, shard in shards.items()}}


def next_step(engine: Engine) -> dict[str, Any]:
    loss = engine.train_batch()
    last = engine.last_step
    assert last is not None
    return {"loss": loss, "norm": last.grad_norm, "rate": last.learning_rate}


def save_all(cases: list[tuple[Mapping[str, Any], str]]) -> None:
    """Save a checkpoint after `BEFORE` steps of each config, in its folder."""
    for config, folder in cases:
        engine = build(config)
        for _ in range(BEFORE):
            engine.train_batch()
        engine.save_checkpoint(folder)


def resume_under_another_cut(
    config: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[list[tuple[int, ...]], int, dict[str, Any]]:
    """Save after `BEFORE` steps of a run, and resume it with another config.

    Returns:
        the bounds of the stages of both; the step at which the second starts; its next step.
    """
    first = build(config)
    for _ in range(BEFORE):
        first.train_batch()
    first.save_checkpoint(config["checkpoint"]["save"])
    first.close()
    then = build(other)
    bounds = [tuple(engine.steps.model.bounds) for engine in (first, then)]
    return bounds, then.global_steps, next_step(then)


def load_and_save(config: Mapping[str, Any], source: str, target: str) -> None:
    """Load, and save without a step between."""
    engine = build(config)
    engine.load_checkpoint(source)
    engine.save_checkpoint(target)


def tensors_in(folder: str) -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint, unsharded."""
    name = newest(folder)
    assert name is not None
    reader = ShardReader(LocalStorage(folder), f"{name}/tensors")
    found = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in reader.tensors.items()}
    reader.read(
        {key: TensorShard(tensor, Shard(tuple(tensor.shape))) for key, tensor in found.items()}
    )
    return found


def resume_and_compare(
    cases: list[tuple[Mapping[str, Any], list[str]]], expected: Mapping[str, Any]
) -> list[str]:
    """Load each folder, train one step, and return every difference from `expected`."""
    wrong = []
    for config, folders in cases:
        engine = build(config)
        # Its parameters and optimizer state must be overwritten.
        engine.train_batch()
        for folder in folders:
            engine.load_checkpoint(folder)
            wrong += [f"{folder}: {text}" for text in _differences(engine, expected)]
    return wrong


def _differences(engine: Engine, expected: Mapping[str, Any]) -> list[str]:
    seen = next_step(engine)
    wrong = [
        f"{name} is {seen[name]!r}, not {expected[name]!r}"
        for name in seen
        if not abs(seen[name] - expected[name]) <= 1e-10 * abs(expected[name])
    ]
    if engine.consumed_samples != (BEFORE + 1) * engine.batch.train_batch_size:
        wrong.append(f"{engine.consumed_samples} samples were consumed")
    # Compare the shards of every rank, replicas too, with the full tensors.
    for name, shard in logical_tensors(
        engine.steps.model, engine.steps.optimizer_step, engine.mesh
    ).items():
        whole = torch.from_numpy(expected["tensors"][name])
        for offsets, part in shard.incoming.items():
            expected_part = whole
            for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
                expected_part = expected_part.narrow(dim, offset, size)
            error = (part - expected_part).abs().max() if part.numel() else torch.zeros(())
            if not error <= 1e-10 * whole.abs().max():
                wrong.append(f"{name} at {list(offsets)} is {error.item():.1e} off")
    return wrong


def save_small(mesh: Mapping[str, int], folder: str) -> dict[str, Any]:
    """Train a net with running statistics for two steps and save; return its statistics."""
    engine = small(mesh)
    for step in range(2):
        engine.train_batch(small_data(engine, step))
    engine.save_checkpoint(folder)
    return statistics_of(engine)


def load_small(mesh: Mapping[str, int], folder: str) -> tuple[dict[str, Any], list[float]]:
    """Load; return this rank's statistics and random numbers from its global generators."""
    engine = small(mesh)
    engine.load_checkpoint(folder)
    drawn = [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
    return statistics_of(engine), drawn


def small(mesh: Mapping[str, int]) -> Engine:
    config = small_config("AdamW", {"lr": 0.01}, mesh=dict(mesh))
    return initialize(small_net(statistics=True), config)[0]


def statistics_of(engine: Engine) -> dict[str, Any]:
    return {name.split(".", 1)[1]: b.tolist() for name, b in engine.module.named_buffers()}

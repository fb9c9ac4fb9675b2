"""Runs that are saved on one mesh and go on on another, run in the ranks of the pool."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from pipemega.assemble import initialize
from pipemega.checkpoint import newest
from pipemega.checkpoint.disk import LocalDisk
from pipemega.checkpoint.pieces import Piece
from pipemega.checkpoint.storage import Reader
from pipemega.checkpoint.tensors import logical_tensors
from pipemega.config import load
from pipemega.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.parameters import Shard
from tests.ranks.checkpoint_run import small_config, small_data, small_net

VOCAB, LENGTH = 50, 12
BEFORE = 2


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, of which some do not count; an epoch is not a whole number of steps."""

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
    """The run in one process that is never interrupted: its step after `BEFORE`, and what it has.

    Returns:
        "loss", "norm", "rate" of that step; "tensors": name -> the whole tensor after it.
    """
    engine = build(config)
    for _ in range(BEFORE):
        engine.train_batch()
    seen = next_step(engine)
    pieces = logical_tensors(engine._model, engine._step, engine.mesh)
    return {**seen, "tensors": {name: piece.local.numpy() for name, piece in pieces.items()}}


def next_step(engine: Engine) -> dict[str, Any]:
    loss = engine.train_batch()
    last = engine.last_step
    assert last is not None
    return {"loss": loss, "norm": last.grad_norm, "rate": last.learning_rate}


def save_all(cases: list[tuple[Mapping[str, Any], str]]) -> None:
    """A checkpoint after `BEFORE` steps of each config, in its folder."""
    for config, folder in cases:
        engine = build(config)
        for _ in range(BEFORE):
            engine.train_batch()
        engine.save_checkpoint(folder)


def pass_on(config: Mapping[str, Any], source: str, target: str) -> None:
    """Loads, and saves without a step between."""
    engine = build(config)
    engine.load_checkpoint(source)
    engine.save_checkpoint(target)


def tensors_in(folder: str) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint, whole."""
    name = newest(folder)
    assert name is not None
    reader = Reader(LocalDisk(folder), f"{name}/tensors")
    found = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in reader.tensors.items()}
    reader.read({key: Piece(tensor, Shard(tuple(tensor.shape))) for key, tensor in found.items()})
    return found


def go_on(
    cases: list[tuple[Mapping[str, Any], list[str]]], expected: Mapping[str, Any]
) -> list[str]:
    """Takes up each of the folders, makes a step, and says what is not as it should be."""
    wrong = []
    for config, folders in cases:
        engine = build(config)
        # It has numbers of its own that must not stay.
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
    # On every rank, replicas too, what it has against its place in the whole.
    for name, piece in logical_tensors(engine._model, engine._step, engine.mesh).items():
        whole = torch.from_numpy(expected["tensors"][name])
        for chunk, part in piece.incoming.values():
            there = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                there = there.narrow(dim, offset, size)
            error = (part - there).abs().max() if part.numel() else torch.zeros(())
            if not error <= 1e-10 * whole.abs().max():
                wrong.append(f"{name} at {list(chunk.offsets)} is {error.item():.1e} off")
    return wrong


def save_small(mesh: Mapping[str, int], folder: str) -> dict[str, Any]:
    """A net with running statistics after two steps; the statistics of this rank."""
    engine = small(mesh)
    for step in range(2):
        engine.train_batch(small_data(engine, step))
    engine.save_checkpoint(folder)
    return statistics_of(engine)


def load_small(mesh: Mapping[str, int], folder: str) -> tuple[dict[str, Any], list[float]]:
    """The statistics that this rank has then, and numbers from its own random streams."""
    engine = small(mesh)
    engine.load_checkpoint(folder)
    drawn = [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
    return statistics_of(engine), drawn


def small(mesh: Mapping[str, int]) -> Engine:
    config = small_config("AdamW", {"lr": 0.01}, mesh=dict(mesh))
    return initialize(small_net(statistics=True), config)[0]


def statistics_of(engine: Engine) -> dict[str, Any]:
    return {name.split(".", 1)[1]: b.tolist() for name, b in engine.module.named_buffers()}

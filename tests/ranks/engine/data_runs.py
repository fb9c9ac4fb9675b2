"""Runs on data that draws random numbers, on any mesh; test_training_data.py starts them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pipemega import LayerSpec, PipelineModule, Trainer, initialize
from pipemega.engine.engine import Engine

WIDTH = 4

Pair = tuple[Tensor, Tensor]
Config = dict[str, Any]


class AugmentedPairs(Dataset[Pair]):
    """Inputs and labels of a sample come from the same draws: other draws give other gradients."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Pair:
        x = torch.rand(WIDTH, dtype=torch.float64) + float(np.random.rand()) + index
        return x / 20, torch.tanh(x)


class OwnGenerator(AugmentedPairs):
    """Draws from an unseeded generator of its own in some samples."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    def __getitem__(self, index: int) -> Pair:
        x, labels = super().__getitem__(index)
        return x, labels + (self.random.random() if index % 3 == 0 else 0.0)


def mix_pairs(samples: list[Pair]) -> Pair:
    factor = torch.rand((), dtype=torch.float64)
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return x * factor, y * factor


def engine_on(data: Any, config: Config, collate_fn: Any = None) -> Engine:
    net = PipelineModule(
        [LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Dropout(0.1), LayerSpec(nn.Linear, WIDTH, WIDTH)],
        nn.functional.mse_loss,
    )
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "seed": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = initialize(net, settings | config, data, collate_fn=collate_fn)
    return engine


def train(
    kind: str, steps: int, config: Config, folder: str = "", save_at: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """Train from the checkpoint in `folder`, if there is one; return losses and parameters."""
    torch.set_default_dtype(torch.float64)
    try:
        mixed = kind == "mixed"
        engine = engine_on(AugmentedPairs(), config, mix_pairs if mixed else None)
        if folder and any(Path(folder).iterdir()):
            engine.load_checkpoint(folder)
        losses = []
        while engine.global_steps < steps:
            losses.append(engine.train_batch())
            if engine.global_steps == save_at:
                engine.save_checkpoint(folder)
        parameters = {n: p.numpy() for n, p in engine.parameter_state().items()}
        assert engine.loader is not None
        engine.loader.close()
        return losses, parameters
    finally:
        torch.set_default_dtype(torch.float32)


def shuffled_iterator(seed: int) -> Iterator[Pair]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.rand(2, WIDTH, generator=generator)
        yield x, x.flip(-1)


def read_differently(what: str, config: Config) -> None:
    """Train on data that differs between ranks, in one of several ways."""
    rank = dist.get_rank()
    if what == "iterator":
        engine, iterator = engine_on(None, config), shuffled_iterator(rank)
        engine.train_batch(iterator)
    elif what == "evaluation":
        engine = engine_on(None, config)
        engine.train_batch(shuffled_iterator(0))
        engine.eval_batch(shuffled_iterator(rank))
    elif what == "own generator":
        torch.set_default_dtype(torch.float64)
        engine_on(OwnGenerator(), config).train_batch()
    elif what == "other list":
        x = torch.rand(16, WIDTH, generator=torch.Generator().manual_seed(rank))
        engine_on([*zip(x, x, strict=True)], config).train_batch()
    elif what == "same data ranks":
        batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
        torch.set_default_dtype(torch.float64)
        engine_on(DataLoader(AugmentedPairs(), batch_sampler=batches), config).train_batch()
    elif what == "DataLoader":
        engine_on(None, config).train_batch(DataLoader(AugmentedPairs(), 2))  # type: ignore[arg-type]


def read_parts(config: Config) -> float:
    """Give inputs to the first stage only, and labels to the last stage only."""
    engine = engine_on(None, config)
    is_first, is_last = engine.mesh.pipeline.rank == 0, engine.mesh.pipeline.rank == 1
    iterator = ((x if is_first else None, y if is_last else None) for x, y in shuffled_iterator(0))
    return engine.train_batch(iterator)


def train_on_loader(
    steps: int, config: Config, folder: str = "", save_at: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """Train on a shuffled DataLoader; with several data ranks on a DistributedSampler."""
    torch.set_default_dtype(torch.float64)
    try:
        data = AugmentedPairs()
        rank, size = dist.get_rank(), config.get("mesh", {}).get("data", 1)
        # Users do not seed all ranks equally.
        torch.manual_seed(rank)
        if size > 1:
            # With the axes in the order pipeline, data.
            sampler = DistributedSampler(data, size, rank % size, seed=4)
            loader = DataLoader(data, 2, sampler=sampler)
        else:
            loader = DataLoader(data, 2, shuffle=True)
        engine = engine_on(loader, config)
        if folder and any(Path(folder).iterdir()):
            engine.load_checkpoint(folder)
        losses = []
        while engine.global_steps < steps:
            losses.append(engine.train_batch())
            if engine.global_steps == save_at:
                engine.save_checkpoint(folder)
        return losses, {n: p.numpy() for n, p in engine.parameter_state().items()}
    finally:
        torch.set_default_dtype(torch.float32)


def count_collectives(deterministic: bool, config: Config) -> int:
    """Return the all-gathers of three training steps."""
    data = AugmentedPairs()
    data.deterministic = deterministic  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    try:
        engine = engine_on(data, config)
        calls = 0
        original = dist.all_gather

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args, **options)

        dist.all_gather = counted
        try:
            for _ in range(5):
                engine.train_batch()
        finally:
            dist.all_gather = original
        return calls
    finally:
        torch.set_default_dtype(torch.float32)


def evaluate_augmented(config: Config) -> list[float]:
    """Return the validation losses of a Trainer on data that draws random numbers."""
    torch.set_default_dtype(torch.float64)
    try:
        training = {"train_steps": 2, "eval_interval": 1, "eval_steps": 2, "progress": False}
        engine = engine_on(AugmentedPairs(), {**config, "training": training})
        trainer = Trainer(engine, AugmentedPairs())
        trainer.fit()
        return [loss for _, loss in trainer.validation]
    finally:
        torch.set_default_dtype(torch.float32)

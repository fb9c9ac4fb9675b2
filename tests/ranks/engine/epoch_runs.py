"""Runs in epochs and on whole batches, on any mesh; test_epochs.py and test_batches.py start them.

`reference` is a plain loop of torch over the same samples.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pipemega import LayerSpec, PipelineModule, WeightedLoss, initialize
from pipemega.data.sample_reader import EpochOrder
from pipemega.engine.engine import Engine

WIDTH, SEED, LR = 4, 3, 0.1
BATCH = 8
# Two epochs of two full steps and one of 5 samples.
SAMPLES, EPOCHS = 21, 2

Config = dict[str, Any]
Pair = tuple[Tensor, Tensor]


def pairs(count: int = SAMPLES, seed: int = 0) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return [(row, row.flip(-1).cos()) for row in x]


class Stream(IterableDataset[Pair]):
    def __iter__(self) -> Iterator[Pair]:
        return iter(pairs())


def weighted(output: Tensor, labels: Tensor) -> WeightedLoss:
    """Average over the samples whose first label is large."""
    counted = labels[:, 0] > 0.5
    return WeightedLoss((((output - labels) ** 2).mean(-1) * counted).sum(), counted.sum())


def in_place(output: Tensor, labels: Tensor) -> Tensor:
    """Change the outputs of the model."""
    return output.mul_(2.0).sub_(labels).square().mean()


LOSSES: dict[str, Any] = {
    "mean": nn.functional.mse_loss,
    "weighted": weighted,
    "in place": in_place,
}


def layers() -> list[Any]:
    sizes = [(WIDTH, 6), (6, 6), (6, 6), (6, WIDTH)]
    found: list[Any] = []
    for size in sizes:
        found += [LayerSpec(nn.Linear, *size), torch.tanh]
    return found[:-1]


def engine_on(
    data: Any, config: Config, loss: str = "mean", net: list[Any] | None = None
) -> Engine:
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "seed": SEED,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
    }
    engine, *_ = initialize(
        PipelineModule(net or layers(), loss_fn=LOSSES[loss]), settings | config, data
    )
    return engine


def data_of(kind: str, config: Config) -> Any:
    if kind == "map-style":
        return pairs()
    if kind == "iterable":
        return Stream()
    data, micro = pairs(), config.get("train_micro_batch_size_per_gpu", 2)
    size = config.get("mesh", {}).get("data", 1)
    if size == 1:
        return DataLoader(data, micro)  # type: ignore[arg-type]
    # The axes are in the order pipeline, data.
    sampler = DistributedSampler(data, size, dist.get_rank() % size, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(data, micro, sampler=sampler)  # type: ignore[arg-type]


def state_of(engine: Engine) -> dict[str, Any]:
    return {n: p.numpy() for n, p in engine.parameter_state().items()}


def train(
    kind: str, config: Config, loss: str = "mean", folder: str = "", save_at: int = 0
) -> dict[str, Any]:
    """Train until the run is complete, from the checkpoint in `folder` if there is one.

    Returns:
        losses, samples and epoch of each step here; the final state; and after each step, what an
        evaluation of other data returned.
    """
    torch.set_default_dtype(torch.float64)
    try:
        section = {"epochs": EPOCHS} | config.get("training", {})
        engine = engine_on(data_of(kind, config), {**config, "training": section}, loss)
        if folder and any(Path(folder).iterdir()):
            engine.load_checkpoint(folder)
        result: dict[str, Any] = {"steps": [], "total": engine.total_steps, "start": engine.epoch}
        while not engine.is_complete:
            value = engine.train_batch()
            result["steps"].append((value, engine.step_samples, engine.epoch))
            if engine.global_steps == save_at:
                engine.save_checkpoint(folder)
        result |= {"steps done": engine.global_steps, "samples": engine.consumed_samples}
        result["evaluation"] = engine.evaluate(pairs(13, seed=1))
        result["parameters"] = state_of(engine)
        assert engine.loader is not None
        engine.loader.close()
        return result
    finally:
        torch.set_default_dtype(torch.float32)


def order_of(kind: str, epoch: int, data_size: int, micro: int) -> list[list[int]]:
    """Return the samples of each step of an epoch."""
    if kind == "map-style":
        keys = EpochOrder(SAMPLES, SEED, True).keys(epoch * SAMPLES, (epoch + 1) * SAMPLES)
        order = [key.sample for key in keys]
    elif kind == "iterable" or data_size == 1:
        order = [*range(SAMPLES)]
    else:
        # DistributedSampler repeats the first sample, so that all ranks have as many.
        padded = [*range(SAMPLES), *range(-SAMPLES % data_size)]
        own = BATCH // data_size
        by_rank = [padded[rank::data_size] for rank in range(data_size)]
        starts = range(0, len(by_rank[0]), own)
        return [[n for part in by_rank for n in part[at : at + own]] for at in starts]
    return [order[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]


def reference(kind: str, loss: str, data_size: int, drop_last: bool = False) -> dict[str, Any]:
    """Train the unsplit model with torch alone, from the initial parameters of an engine."""
    torch.set_default_dtype(torch.float64)
    try:
        start = engine_on(pairs(), {}, loss)
        parts = [nn.Linear(*p.args) if isinstance(p, LayerSpec) else nn.Tanh() for p in layers()]
        net = nn.Sequential(*parts)
        state = start.parameter_state()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(state[f"layers.{name}"])
        optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9)
        data, steps = pairs(), []

        def mean_loss(samples: list[Pair]) -> Tensor:
            x, y = (torch.stack(part) for part in zip(*samples, strict=True))
            result = LOSSES[loss](net(x), y)
            return result if loss == "mean" else result.sum / result.weight

        for epoch in range(EPOCHS):
            for indices in order_of(kind, epoch, data_size, 2):
                if drop_last and len(indices) < BATCH:
                    continue
                optimizer.zero_grad()
                value = mean_loss([data[n] for n in indices])
                value.backward()
                optimizer.step()
                steps.append((value.item(), len(indices)))
        with torch.no_grad():
            evaluation = mean_loss(pairs(13, seed=1)).item()
        parameters = {f"layers.{n}": p.detach().numpy() for n, p in net.named_parameters()}
        return {"steps": steps, "parameters": parameters, "evaluation": evaluation}
    finally:
        torch.set_default_dtype(torch.float32)


class Batches(nn.BatchNorm1d):
    """A layer whose buffers each forward changes."""


def running_statistics(config: Config) -> dict[str, Any]:
    """Return the buffers after one epoch of a full step and one of 3 samples."""
    torch.set_default_dtype(torch.float64)
    try:
        net = [*layers()[:3], LayerSpec(Batches, 6), *layers()[3:]]
        engine = engine_on(pairs(BATCH + 3), {**config, "training": {"epochs": 1}}, net=net)
        while not engine.is_complete:
            engine.train_batch()
        return {n: b.numpy() for n, b in engine.module.named_buffers()}
    finally:
        torch.set_default_dtype(torch.float32)


def rates_by_epoch(config: Config, folder: str = "", save_at: int = 0) -> list[float]:
    """Return the learning rate of each step, with a schedule over epochs."""
    scheduler = {
        "type": "linear",
        "by": "epoch",
        "params": {"max_lr": 0.1, "min_lr": 0.02, "decay_steps": 4},
    }
    torch.set_default_dtype(torch.float64)
    try:
        whole = {**config, "training": {"epochs": 4}, "scheduler": scheduler}
        engine = engine_on(pairs(), whole)
        if folder and any(Path(folder).iterdir()):
            engine.load_checkpoint(folder)
        rates = []
        while not engine.is_complete:
            engine.train_batch()
            assert engine.last_step is not None
            rates.append(engine.last_step.learning_rate)
            if engine.global_steps == save_at:
                engine.save_checkpoint(folder)
        return rates
    finally:
        torch.set_default_dtype(torch.float32)


def uneven_loaders(config: Config) -> None:
    """Train on DataLoaders that have another number of batches on each data rank."""
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank() % 2
    batches = [[0, 1], [2, 3]] if rank == 0 else [[4, 5], [6, 7], [8, 9], [10, 11], [12, 13]]
    loader = DataLoader(pairs(), batch_sampler=batches)  # type: ignore[arg-type]
    engine = engine_on(loader, {**config, "training": {"epochs": 1}})
    while not engine.is_complete:
        engine.train_batch()


def take_data_later(config: Config, folder: str) -> list[Any]:
    """Resume in the middle of an epoch, with data that the engine gets after `initialize`."""
    torch.set_default_dtype(torch.float64)
    try:
        engine = engine_on(None, config)
        engine.load_checkpoint(folder)
        engine.set_epochs(EPOCHS)
        engine.set_training_data(pairs())
        found: list[Any] = [(engine.epoch, engine.total_steps)]
        while not engine.is_complete:
            found.append(engine.train_batch())
        return found
    finally:
        torch.set_default_dtype(torch.float32)

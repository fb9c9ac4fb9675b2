"""Runs whose batch grows (`training.rampup_batch_size`), counted in samples or in epochs.

`reference` is a plain loop of torch over the same samples.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipemega import LayerSpec
from pipemega.data.sample_reader import EpochOrder
from pipemega.engine.engine import Engine
from pipemega.engine.train_step import PlanChange, StepFeature, TrainStep
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.schedules import build_plan
from tests.ranks.engine.epoch_runs import (
    SAMPLES,
    SEED,
    Config,
    Pair,
    data_of,
    engine_on,
    layers,
    pairs,
    state_of,
)

# Steps of 4, 8, 12 and 16 samples.
START, INCREMENT, RAMP, FULL = 4, 4, 30, 16
TRAIN_SAMPLES, EPOCHS = 110, 3
LR, MIN_LR, WARMUP = 0.1, 0.01, 10


def settings(config: Config, length: Config) -> Config:
    training = {"rampup_batch_size": [START, INCREMENT, RAMP], **length}
    scheduler = {
        "type": "cosine",
        "params": {
            "min_lr": MIN_LR,
            "warmup_samples": WARMUP,
            "warmup_init_lr": 0.02,
            "decay_samples": TRAIN_SAMPLES,
        },
    }
    own = {"train_batch_size": FULL, "scheduler": scheduler}
    return own | config | {"training": training | config.get("training", {})}


def start_of(kind: str, config: Config, length: Config) -> Engine:
    data = None if kind in ("iterator", "batch") else data_of(kind, config)
    return engine_on(data, settings(config, length))


def given_data(kind: str, engine: Engine) -> Config:
    """Return what the caller passes to `train_batch`: the samples of the step, in their order."""
    if kind not in ("iterator", "batch"):
        return {}
    first, data, mesh = engine.consumed_samples, pairs(), engine.mesh.data
    order = EpochOrder(SAMPLES, SEED, True)

    def stacked(start: int, count: int) -> Any:
        chosen = [data[key.sample] for key in order.keys(start, start + count)]
        return tuple(torch.stack(part) for part in zip(*chosen, strict=True))

    if kind == "batch":
        return {"batch": stacked(first, size_at(first))}
    starts = range(first + 2 * mesh.rank, first + 4 * FULL, 2 * mesh.size)
    return {"data_iter": (stacked(start, 2) for start in starts)}


def train(
    kind: str,
    config: Config,
    length: Config,
    folder: str = "",
    save_at: int = 0,
    watch: Callable[[Engine], None] = lambda _: None,
) -> dict[str, Any]:
    """Train until the run is complete, from the checkpoint in `folder` if there is one.

    Args:
        watch: called with the engine before the first step.
    """
    torch.set_default_dtype(torch.float64)
    try:
        engine = start_of(kind, config, length)
        watch(engine)
        if folder and any(Path(folder).iterdir()):
            engine.load_checkpoint(folder)
        result: dict[str, Any] = {"steps": [], "total": engine.total_steps}
        while not engine.is_complete:
            loss = engine.train_batch(**given_data(kind, engine))
            assert engine.last_step is not None
            result["steps"].append((loss, engine.step_samples, engine.last_step.learning_rate))
            assert engine.plan.num_microbatches * 2 * engine.mesh.data.size >= engine.step_samples
            if engine.global_steps == save_at:
                engine.save_checkpoint(folder)
        result |= {"count": engine.global_steps, "samples": engine.consumed_samples}
        result["parameters"] = state_of(engine)
        if engine.loader is not None:
            engine.loader.close()
        return result
    finally:
        torch.set_default_dtype(torch.float32)


def size_at(consumed: int) -> int:
    """Megatron's rule."""
    if consumed > RAMP:
        return FULL
    increments = (FULL - START) // INCREMENT
    return START + int(consumed / (RAMP / increments)) * INCREMENT


def rate_at(consumed: int) -> float:
    """Megatron's cosine."""
    if consumed <= WARMUP:
        return 0.02 + (LR - 0.02) * consumed / WARMUP
    ratio = (consumed - WARMUP) / (TRAIN_SAMPLES - WARMUP)
    return MIN_LR + (LR - MIN_LR) * 0.5 * (math.cos(math.pi * ratio) + 1)


def steps_of(kind: str, length: Config) -> list[list[int]]:
    """Return the samples of each step."""
    shuffled = kind in ("map-style", "iterator", "batch")
    epochs = length.get("epochs")
    order = EpochOrder(SAMPLES, SEED, shuffled)
    steps: list[list[int]] = []
    consumed = 0
    while True:
        size = size_at(consumed)
        if epochs is None and consumed + size > TRAIN_SAMPLES:
            return steps
        if epochs is not None:
            if consumed == epochs * SAMPLES:
                return steps
            size = min(size, SAMPLES - consumed % SAMPLES)
        steps.append([key.sample for key in order.keys(consumed, consumed + size)])
        consumed += size


def reference(kind: str, length: Config) -> dict[str, Any]:
    """Train the unsplit model with torch alone, from the initial parameters of an engine."""
    torch.set_default_dtype(torch.float64)
    try:
        state = engine_on(pairs(), {}).parameter_state()
        parts = [nn.Linear(*p.args) if isinstance(p, LayerSpec) else nn.Tanh() for p in layers()]
        net = nn.Sequential(*parts)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(state[f"layers.{name}"])
        optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9)
        data: list[Pair] = pairs()
        steps: list[tuple[float, int, float]] = []
        gradients: list[dict[str, Any]] = []
        consumed = 0
        for indices in steps_of(kind, length):
            rate = optimizer.param_groups[0]["lr"] = rate_at(consumed)
            optimizer.zero_grad()
            chosen = [data[n] for n in indices]
            x, y = (torch.stack(part) for part in zip(*chosen, strict=True))
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            named = net.named_parameters()
            gradients.append({f"layers.{n}": _gradient(p) for n, p in named})
            optimizer.step()
            steps.append((loss.item(), len(indices), rate))
            consumed += len(indices)
        parameters = {f"layers.{n}": p.detach().numpy() for n, p in net.named_parameters()}
        found = {"steps": steps, "parameters": parameters, "samples": consumed}
        return found | {"gradients": gradients}
    finally:
        torch.set_default_dtype(torch.float32)


def _gradient(parameter: nn.Parameter) -> Any:
    assert parameter.grad is not None
    return parameter.grad.clone().numpy()


# Runs whose stages move


# Schedule, chunks, and the bounds of the seven layers.
Cut = tuple[str, int, list[int]]


class Moves(StepFeature):
    """Lets the engine move its stages after some steps, as schedule `auto` does."""

    def __init__(self, cuts: Mapping[int, Cut]) -> None:
        self._cuts = cuts

    def next_change(self, step: TrainStep, trace: object) -> PlanChange | None:
        if step.number not in self._cuts:
            return None
        name, chunks, bounds = self._cuts[step.number]
        plan = build_plan(name, step.plan.num_ranks, step.plan.num_microbatches, chunks)
        return PlanChange(step.plan, (lower(plan), tuple(bounds)))

    def on_change(self, change: PlanChange, obstacle: str) -> None:
        assert obstacle == ""


def train_on_moving_stages(
    kind: str,
    config: Config,
    length: Config,
    cuts: Mapping[int, Cut],
    folder: str = "",
    save_at: int = 0,
) -> dict[str, Any]:
    """Train as `train`; after step n the stages move to those of `cuts[n]`.

    Returns:
        as `train`, the bounds of each step, and the gradients that this rank has in it.
    """

    def watch(engine: Engine) -> None:
        engine.add_feature(Moves(cuts))
        assert engine.optimizer is not None
        engine.optimizer.register_step_pre_hook(partial(record, engine))

    def record(engine: Engine, *_: Any) -> None:
        assert engine.steps.optimizer_step is not None
        bounds.append(engine.steps.model.bounds)
        named = engine.steps.optimizer_step.masters.named.items()
        gradients.append({n: p.grad.clone().numpy() for n, p in named if p.grad is not None})

    bounds: list[tuple[int, ...]] = []
    gradients: list[dict[str, Any]] = []
    result = train(kind, config, length, folder, save_at, watch=watch)
    return result | {"bounds": bounds, "gradients": gradients}

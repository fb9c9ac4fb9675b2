"""Trains layers with unusual parameters, beside plain torch in this process."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.engine.engine import Engine

BATCH, STEPS = 4, 3
DOUBLE = torch.float64


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1, 4, 4)


class Odd(nn.Module):
    """A layer with one parameter of an unusual layout or shape; [.., 1, 4, 4] -> the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        weight = torch.linspace(-1.0, 1.0, 32, dtype=DOUBLE).reshape(4, 8)
        if kind == "channels_last":
            layers = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
            self.convs = nn.Sequential(*layers).to(DOUBLE, memory_format=torch.channels_last)
        elif kind == "transposed":
            self.weight = nn.Parameter(weight[:, :4].contiguous().t())
        elif kind == "gaps":
            self.weight = nn.Parameter(weight[:, ::2])
        elif kind == "empty":
            self.weight = nn.Parameter(weight[:0])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there is nothing to initialize
                self.linear = nn.Linear(4, 0, dtype=DOUBLE)
        elif kind == "scalar":
            self.weight = nn.Parameter(torch.tensor(1.5, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "channels_last":
            y: Tensor = self.convs(x)
            return y
        if self.kind == "empty":
            return x + self.linear(x).sum() + self.weight.sum()
        return x * self.weight if self.kind == "scalar" else x @ self.weight


def layers(kind: str) -> list[Any]:
    specs = [LayerSpec(Odd, kind), LayerSpec(nn.Linear, 4, 4, dtype=DOUBLE), torch.tanh]
    if kind == "transposed":
        tied = TiedLayerSpec("odd", Odd, kind)
        specs = [tied, *specs[1:], tied]
    else:
        specs.append(LayerSpec(nn.Linear, 4, 4, dtype=DOUBLE))
    return [LayerSpec(Image), *specs]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, 1, 4, 4, generator=generator, dtype=DOUBLE)
    return x, y


def build(kind: str, changes: Mapping[str, Any]) -> Engine:
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "training": {"weight_decay_norms_and_biases": True},
        **changes,
    }
    return initialize(PipelineModule(layers(kind), F.mse_loss), config)[0]


def train(engine: Engine, first: int, steps: int) -> list[Any]:
    found = []
    data = engine.mesh.data
    for step in range(first, first + steps):
        part = slice(data.rank * BATCH // data.size, (data.rank + 1) * BATCH // data.size)
        x, y = batch(step)
        pair = x[part], y[part]
        given = step % 2 == 0
        iterator = iter([(a[None], b[None]) for a, b in zip(*pair, strict=True)])
        loss = engine.train_batch(batch=pair) if given else engine.train_batch(iterator)
        engine.settle()
        found.append((loss, engine.get_global_grad_norm()))
    engine.check_replicas()
    return found


def compared(
    kind: str, changes: Mapping[str, Any], other: Mapping[str, Any], folder: str
) -> dict[str, float]:
    """Train, save, load on another mesh and train on; return the distances from plain torch.

    Args:
        changes: changes to the config.
        other: further changes to the config of the run that loads.
    """
    engine = build(kind, changes)
    first = engine.parameter_state()
    found = train(engine, 0, STEPS)
    engine.save_checkpoint(folder)
    resumed = build(kind, {**changes, **other})
    resumed.load_checkpoint(folder)
    found += train(resumed, STEPS, STEPS)
    expected, wanted = plain(kind, changes["optimizer"], first)
    now = resumed.parameter_state()
    assert now.keys() == wanted.keys()
    return {
        "losses and norms": max(
            abs(a - b)
            for x, y in zip(found, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        ),
        **{n: float((now[n] - wanted[n]).abs().max()) for n in wanted if wanted[n].numel()},
    }


def plain(
    kind: str, section: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Train the same steps with torch; return losses and norms, and the parameters."""
    built = [x.build(None) if isinstance(x, LayerSpec) else x for x in layers(kind)]  # type: ignore[arg-type]
    if kind == "transposed":
        built[-1].weight = built[1].weight
    named = {
        f"layers.{i}.{n}": p
        for i, layer in enumerate(built)
        if isinstance(layer, nn.Module)
        for n, p in layer.named_parameters()
    }
    names = {id(p): n for n, p in reversed(named.items())}
    named = {n: p for n, p in named.items() if names[id(p)] == n}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state[name])
    options = {"weight_decay": 0.0, **section["params"]}
    options.pop("fused", None)
    optimizer = getattr(torch.optim, section["type"])(named.values(), **options)
    found = []
    for step in range(2 * STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        h: Any = x
        for layer in built:
            h = layer(h)
        loss = F.mse_loss(h, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(named.values(), 0.1)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {n: p.detach() for n, p in named.items()}


def all_compared(cases: list[Any], folder: str) -> list[dict[str, float]]:
    return [compared(*case, f"{folder}/{number}") for number, case in enumerate(cases)]


def rolled_back(overlap: bool) -> tuple[list[float], int]:
    """Return losses and rollbacks of steps that post-validation undoes and clips."""
    late = {"schedule": "zb-h1", "optimizer_sync": "post_validate", "optimizer_sync_after": 0}
    changes = {
        "mesh": {"pipeline": 2},
        "pipeline": late,
        "zero_optimization": {"stage": 1, "overlap_comm": overlap},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine = build("channels_last", changes)
    losses = [loss for loss, _ in train(engine, 0, 8)]
    assert engine.last_step is not None
    return losses, engine.last_step.rollbacks


def complex_replicas() -> str:
    """Return the class of the error of a complex parameter whose replicas differ."""
    layer = LayerSpec(ComplexScale)
    net = PipelineModule([layer, LayerSpec(nn.Linear, 4, 4, dtype=DOUBLE)], F.mse_loss)
    section = {"type": "SGD", "params": {"lr": 0.1}}
    engine = initialize(net, {"train_batch_size": 4, "optimizer": section})[0]
    engine.check_replicas()
    with torch.no_grad():
        engine.module[0].layers["0"].scale.add_(engine.mesh.data.rank * 1j)
    try:
        engine.check_replicas()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class ComplexScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).real

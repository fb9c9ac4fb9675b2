"""Freezes and unfreezes layers between steps, beside plain torch in this process."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.engine.engine import Engine
from pipemega.errors import PipemegaError
from tests.ranks.small_models import squared_error

WIDTH, BATCH, DOUBLE = 4, 4, torch.float64
# The layers that are frozen in each step; 0 and 6 are tied. Behind frozen first layers messages
# need no gradient.
FROZEN: list[set[int]] = [set(), {0, 6}, {0, 2, 6}, {2, 4}, set(), {0, 2, 6}, {5}, set()]
RESUMED = 5  # the step before which the run is saved and continued in another engine


def layers() -> list[Any]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=DOUBLE)
    norm = LayerSpec(nn.LayerNorm, WIDTH, dtype=DOUBLE)
    tied = TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH, dtype=DOUBLE)
    return [tied, torch.tanh, linear, torch.tanh, linear, norm, tied]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=DOUBLE)
    return x, y


def build(changes: Mapping[str, Any], first: set[int] | None = None) -> Engine:
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.3,
        "training": {"weight_decay_norms_and_biases": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        **changes,
    }
    specs = layers()
    for position in first or ():
        specs[position] = LayerSpec(_frozen_linear)
    return initialize(PipelineModule(specs, squared_error), config)[0]


def _frozen_linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=DOUBLE).requires_grad_(False)


def freeze(engine: Engine, positions: set[int]) -> None:
    for stage in engine.local_stages:
        for position, layer in stage.layers.items():
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                parameter.requires_grad_(int(position) not in positions)


def train(engine: Engine, steps: range) -> list[tuple[float, float]]:
    found, data = [], engine.mesh.data
    for step in steps:
        freeze(engine, FROZEN[step])
        part = slice(data.rank * BATCH // data.size, (data.rank + 1) * BATCH // data.size)
        pair = tuple(tensor[part] for tensor in batch(step))
        iterator = iter([(a[None], b[None]) for a, b in zip(*pair, strict=True)])
        loss = engine.train_batch(batch=pair) if step % 2 else engine.train_batch(iterator)
        found.append((loss, engine.get_global_grad_norm() or 0.0))
    engine.settle()
    engine.check_replicas()
    return found


def compared(changes: Mapping[str, Any], other: Mapping[str, Any], folder: str) -> float:
    """Train, save while layers are frozen, and train on with `other`; return the distance."""
    engine = build(changes)
    first = engine.parameter_state()
    found = train(engine, range(RESUMED))
    engine.save_checkpoint(folder)
    engine = build({**changes, **other})
    engine.load_checkpoint(folder)
    found += train(engine, range(RESUMED, len(FROZEN)))
    expected, wanted = plain({**changes}.get("optimizer"), first)
    now = engine.parameter_state()
    assert now.keys() == wanted.keys()
    distances = [
        abs(a - b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
    ]
    return max(distances + [float((now[n] - wanted[n]).abs().max()) for n in wanted])


def all_compared(cases: list[Any], folder: str) -> list[float]:
    return [compared(*case, f"{folder}/{number}") for number, case in enumerate(cases)]


def plain(section: Any, state: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
    built = [x.build(None) if isinstance(x, LayerSpec) else x for x in layers()]
    modules = {i: layer for i, layer in enumerate(built) if isinstance(layer, nn.Module)}
    built[6].weight = built[0].weight
    named = {f"layers.{i}.{n}": p for i, m in modules.items() for n, p in m.named_parameters()}
    named.pop("layers.6.weight")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state[name])
    section = section or {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    options = {"weight_decay": 0.0, **section["params"]}
    optimizer = getattr(torch.optim, section["type"])(named.values(), **options)
    found = []
    for step, frozen in enumerate(FROZEN):
        for position, module in modules.items():
            module.requires_grad_(position not in frozen)
        h, y = batch(step)
        optimizer.zero_grad(set_to_none=True)
        for layer in built:
            h = layer(h)
        loss = squared_error(h, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(named.values(), 0.3)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {n: p.detach() for n, p in named.items()}


def refusals() -> list[str]:
    """Return the errors of: unfreezing a layer that was never trained, ranks that disagree."""
    found = []
    for case in ("unfrozen", "ranks"):
        engine = build({"mesh": {"pipeline": 1}}, {2} if case == "unfrozen" else None)
        freeze(engine, {4} if case == "ranks" and engine.mesh.rank == 1 else set())
        before = engine.parameter_state()
        for _ in range(2):
            try:
                engine.train_batch(batch=tuple(t[:2] for t in batch(0)))
                found.append("")
            except PipemegaError as error:
                found.append(str(error))
        after = engine.parameter_state()
        assert all(torch.equal(before[name], after[name]) for name in before)
    return found


def held(changes: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names of the parameters that stay, and that move, while layer 2 is frozen."""
    engine = build(changes)
    train(engine, range(1))
    before = engine.parameter_state()
    for step in (1, 2):
        freeze(engine, {2})
        x, y = (t[: BATCH // engine.mesh.data.size].bfloat16() for t in batch(step))
        engine.train_batch(batch=(x, y))
    after = engine.parameter_state()
    same = {name for name in before if torch.equal(before[name], after[name])}
    return same, before.keys() - same

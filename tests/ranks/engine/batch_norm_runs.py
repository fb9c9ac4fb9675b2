"""Trains a small ResNet with deferred batch norms, on a mesh or as one torch module."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import Engine, build_mesh, build_model, initialize, load_config, module_state_dict
from pipemega.pipeline.model.stages import gather_full_tensors
from tests.torch_resnet import TorchResNet

STEPS, RATE, CLASSES, MICRO, COUNT = 2, 0.1, 5, 3, 4

MODEL: dict[str, Any] = {
    "type": "resnet", "depth": 18, "stem": "cifar", "width": 2, "image_size": 8,
    "num_classes": CLASSES, "batch_norm": "deferred",
}  # fmt: skip


def images(number: int, count: int = MICRO) -> tuple[Tensor, Tensor]:
    """Return micro-batch `number` of the run."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x.to(torch.get_default_dtype()), torch.randint(CLASSES, (count,), generator=generator)


def micro_batches(step: int, ranks: int = 1, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield those of a data rank; a step has COUNT on all ranks together."""
    for m in range(COUNT // ranks):
        yield images(100 * step + m * ranks + rank)


def engine_of(config: dict[str, Any], dataset: Any = None) -> tuple[Engine, Any]:
    settings: dict[str, Any] = {
        "train_batch_size": MICRO * COUNT,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    settings |= {key: value for key, value in config.items() if key != "model"}
    loaded = load_config(settings | {"model": MODEL | config.get("model", {})})
    mesh = build_mesh(loaded)
    net = build_model(loaded, mesh)
    engine, *_ = initialize(net, loaded, dataset, mesh=mesh)
    return engine, net


def train(config: dict[str, Any], dtype: str = "float64", steps: int = STEPS) -> dict[str, Any]:
    """Return the losses, the gradients of each step, and the state at the start and the end."""
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        engine, net = engine_of(config)
        start = module_state_dict(net, engine)
        data = engine.mesh.data
        gradients: list[dict[str, Tensor]] = []
        step = engine.steps.optimizer_step
        assert step is not None
        assert engine.optimizer is not None
        masters = step.masters

        def keep(*_: Any) -> None:
            local = {n: m.grad.clone() for n, m in masters.named.items() if m.grad is not None}
            whole = gather_full_tensors(masters.gather(local), engine.steps.model, engine.mesh)
            gradients.append({net.module_name(n): g for n, g in whole.items()})

        engine.optimizer.register_step_pre_hook(keep)
        losses, skipped = [], []
        for number in range(steps):
            losses.append(engine.train_batch(micro_batches(number, data.size, data.rank)))
            losses.append(engine.eval_batch(micro_batches(9, data.size, data.rank)))
            skipped.append(engine.skipped_steps)
        end = module_state_dict(net, engine)
        return {
            "losses": losses, "gradients": gradients, "start": start, "end": end,
            "skipped": skipped, "bounds": engine.steps.model.bounds,
        }  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)


def train_all(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(config) for config in configs]


class WholeStatistics:
    """Running statistics of whole steps, from the inputs of all batch norms of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._inputs: dict[nn.BatchNorm2d, list[Tensor]] = {}
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = 0.0
                norm.register_forward_pre_hook(self._keep)

    def _keep(self, norm: Any, given: tuple[Tensor]) -> None:
        if norm.training:
            self._inputs.setdefault(norm, []).append(given[0].detach())

    def update(self, batches: int) -> None:
        for norm, given in self._inputs.items():
            values = torch.cat(given).transpose(0, 1).flatten(1)
            norm.running_mean.mul_(0.9).add_(0.1 * values.mean(1))
            norm.running_var.mul_(0.9).add_(0.1 * values.var(1))
            norm.num_batches_tracked.fill_(batches)
        self._inputs.clear()


def train_plain(
    start: dict[str, Tensor], steps: Iterable[list[tuple[Tensor, Tensor]]]
) -> dict[str, Any]:
    """Train one torch module from `start`, one micro-batch after the other."""
    torch.set_default_dtype(torch.float64)
    try:
        module = TorchResNet((2, 2, 2, 2), 2, CLASSES, bottleneck=False, cifar=True)
        module.load_state_dict(start)
        statistics = WholeStatistics(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        losses, gradients = [], []
        for number, batches in enumerate(steps, 1):
            module.train()
            optimizer.zero_grad()
            samples = sum(len(labels) for _, labels in batches)
            parts = []
            for x, labels in batches:
                part = F.cross_entropy(module(x), labels) * (len(labels) / samples)
                part.backward()
                parts.append(part.item())
            losses.append(sum(parts))
            gradients.append({n: p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
            statistics.update(number)
            module.eval()
            with torch.no_grad():
                parts = [F.cross_entropy(module(x), y).item() for x, y in micro_batches(9)]
            losses.append(sum(parts) / COUNT)
        return {"losses": losses, "gradients": gradients, "end": module.state_dict()}
    finally:
        torch.set_default_dtype(torch.float32)


def train_epoch(config: dict[str, Any]) -> dict[str, Tensor]:
    """Train an epoch with a partial step of 4 samples; return the state of the module."""
    torch.set_default_dtype(torch.float64)
    try:
        data = [(x[0], y[0]) for x, y in (images(n, 1) for n in range(MICRO * COUNT + 4))]
        engine, net = engine_of({"training": {"epochs": 1}, **config}, data)
        while not engine.is_complete:
            engine.train_batch()
        return module_state_dict(net, engine)
    finally:
        torch.set_default_dtype(torch.float32)

"""Runs in fp8, which torchao emulates on CPUs; `engine/test_fp8.py` compares them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.engine.engine import Engine
from pipemega.pipeline.model import fp8_linears
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.ranks.training_runs import build, data, settings, train, train_engine

MODEL = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "num_layers": 4}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
OFF = {"fp8": {"enabled": False}}


def fp8_settings(recipe: str = "tensorwise", **changes: Any) -> dict[str, Any]:
    """Return the config of a run in fp8; the changes are merged into it."""
    model = {**MODEL, **changes.pop("model", {})}
    fp8 = {"enabled": True, "recipe": recipe}
    changes = {"bf16": {"enabled": True}, "fp8": fp8, "optimizer": dict(SGD), **changes}
    return settings(model=model, **changes)


@contextmanager
def emulated() -> Iterator[None]:
    """Let torchao emulate the products of engines that are built within."""
    fp8_linears.EMULATE = True
    try:
        yield
    finally:
        fp8_linears.EMULATE = False


def train_all(configs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Train several configs one after another."""
    with emulated():
        return [train(config, "float32", steps=3) for config in configs]


def _converted(linear: nn.Linear, recipe: str) -> nn.Module:
    """Return what torchao makes of a linear; it has the same parameters."""
    import dataclasses

    float8 = fp8_linears._import("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True)
    return float8.convert_to_float8_training(nn.Sequential(linear), config=config)[0]


def train_gpt_of_torchao(recipe: str) -> dict[str, Any]:
    """Train the GPT with fp8 off, after torchao has converted its linears."""
    engine = build({**fp8_settings(recipe), **OFF})
    for module in engine.module.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            linear = nn.Linear(1, 1)
            linear.weight, linear.bias = module.weight, module.bias
            converted = _converted(linear, recipe)
            vars(module)["product"] = partial(_call, converted)
    return train_engine(engine, data, 3)


def _call(converted: nn.Module, x: Tensor, *_: Any) -> Tensor:
    return converted(x)


class Mlp(nn.Module):
    """A block of torch's linears, one of which fp8 leaves out because of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.odd = nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.odd(x).mean(-1, keepdim=True)


class ConvertedMlp(Mlp):
    """The same block after torchao's conversion."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.up, self.down = _converted(self.up, recipe), _converted(self.down, recipe)


def train_layers(cases: list[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Train layers of torch's linears; (recipe of torchao's own conversion or "", config)."""
    return [_train_layers(recipe, config) for recipe, config in cases]


def _train_layers(recipe: str, config: Mapping[str, Any]) -> dict[str, Any]:
    factory: Callable[[], nn.Module] = partial(ConvertedMlp, recipe) if recipe else Mlp
    layers = [LayerSpec(factory) for _ in range(4)]
    net = PipelineModule([*layers, LayerSpec(nn.Linear, 32, 16)], nn.functional.mse_loss)
    with emulated():
        engine, *_ = initialize(net, {k: v for k, v in config.items() if k != "model"})
    return train_engine(engine, _microbatches, 3)


def _microbatches(engine: Engine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    ranks, rank = engine.mesh.data.size, engine.mesh.data.rank
    for m in range(engine.batch.num_microbatches):
        generator = torch.Generator().manual_seed(1000 * step + m * ranks + rank)
        x = torch.randn(2, 5, 32, generator=generator)
        # The loss takes tensors of one dtype.
        yield x, x[..., :16].bfloat16()

"""Checks the arguments of `initialize` that users of DeepSpeed and torch often confuse."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipemega.errors import ConfigError
from pipemega.pipeline.deepspeed_arguments import OPTIMIZER, refuse_arguments
from pipemega.pipeline.module import PipelineModule

_ARGUMENTS = (
    "model", "config", "training_data", "overrides", "collate_fn", "mesh", "plan",
)  # fmt: skip


def check_arguments(model: Any, training_data: Any, unsupported: Mapping[str, Any]) -> None:
    """Check the types of the arguments of `initialize`.

    Raises:
        ConfigError: an argument is of the wrong type or not supported; the same on every rank.
    """
    refuse_arguments("initialize()", unsupported, _ARGUMENTS)
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"initialize() takes a PipelineModule as model, not {_advice(model)}",
            on_every_rank=True,
        )
    if isinstance(training_data, Optimizer):
        raise ConfigError(
            f"training_data is the optimizer {type(training_data).__name__}: {OPTIMIZER}",
            on_every_rank=True,
        )


def _advice(model: Any) -> str:
    name = type(model).__name__
    if isinstance(model, nn.Sequential):
        return "an nn.Sequential: write PipelineModule(model, loss_fn=...)"
    if isinstance(model, nn.Module):
        return (
            f"the nn.Module {name}: write PipelineModule([layer, layer, ...], loss_fn=...) with "
            f"its layers in order; PipelineModule([model], loss_fn=...) works on one pipeline rank"
        )
    if isinstance(model, list | tuple):
        return f"a {name}: write PipelineModule(layers, loss_fn=...)"
    if isinstance(model, type):
        return f"the class {model.__name__}: write PipelineModule([layer, ...], loss_fn=...)"
    return f"{model!r}" if model is None or isinstance(model, str) else f"a {name}"

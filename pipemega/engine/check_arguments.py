"""Checks the arguments of `initialize` that users of DeepSpeed and torch often confuse."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipemega.config.group_keys import read_groups
from pipemega.errors import ConfigError
from pipemega.optimizer.build_step import OptimizerArguments
from pipemega.optimizer.given_optimizer import GivenGroups, GivenOptimizer
from pipemega.pipeline.deepspeed_arguments import refuse_arguments
from pipemega.pipeline.module import PipelineModule

_ARGUMENTS = (
    "model", "config", "training_data", "overrides", "collate_fn", "mesh", "plan", "example",
    "optimizer", "lr_scheduler", "model_parameters",
)  # fmt: skip


def check_arguments(
    model: Any, training_data: Any, example: Any, unsupported: Mapping[str, Any]
) -> None:
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
            f"training_data is the optimizer {type(training_data).__name__}: "
            f"{_maker_advice(training_data)}",
            on_every_rank=True,
        )
    if example is not None and not (isinstance(example, tuple | list) and len(example) == 2):
        raise ConfigError(
            f"initialize(example=...) is a {type(example).__name__}, and must be the pair (inputs, "
            "labels) of one micro-batch",
            on_every_rank=True,
        )


def optimizer_arguments(
    optimizer: Any, lr_scheduler: Any, model_parameters: Any
) -> OptimizerArguments:
    """Check the types of the arguments of `initialize` about the optimizer, and return them.

    Raises:
        ConfigError: an argument is of the wrong type; the same on every rank.
    """
    problem = None
    if isinstance(optimizer, GivenOptimizer):
        return OptimizerArguments(
            optimizer.attach, lr_scheduler, optimizer.groups, test_optimizer=optimizer.copied
        )
    if isinstance(optimizer, Optimizer):
        problem = f"optimizer is the {type(optimizer).__name__} itself: {_maker_advice(optimizer)}"
    elif optimizer is not None and not callable(optimizer):
        problem = f"optimizer must be a function of parameter groups, not {optimizer!r}"
    elif isinstance(lr_scheduler, LRScheduler):
        name = type(lr_scheduler).__name__
        problem = (
            f"lr_scheduler is the {name} itself, which is over another optimizer than the "
            f"engine's: write lr_scheduler=lambda optimizer: {name}(optimizer, ...)"
        )
    elif lr_scheduler is not None and not callable(lr_scheduler):
        problem = f"lr_scheduler must be a function of the optimizer, not {lr_scheduler!r}"
    if problem is not None:
        raise ConfigError(problem, on_every_rank=True)
    groups: Any = None
    if isinstance(model_parameters, GivenGroups):
        groups = model_parameters
    elif model_parameters is not None:
        try:
            groups = read_groups(model_parameters, "model_parameters")
        except ValueError as error:
            raise ConfigError(
                f"{error}. The engine trains all parameters that require a gradient: set "
                "requires_grad to False in the layers whose parameters are frozen",
                on_every_rank=True,
            ) from error
    return OptimizerArguments(optimizer, lr_scheduler, groups)


def _maker_advice(optimizer: Optimizer) -> str:
    name, lr = type(optimizer).__name__, optimizer.defaults.get("lr", 1e-4)
    return (
        "the engine's optimizer updates master weights and shards of this rank, so it is built "
        f"from them: write optimizer=lambda params: {name}(params, lr={float(lr):g}), or set the "
        "config section 'optimizer'"
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

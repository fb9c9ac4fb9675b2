"""Builds and checks the optimizer of `initialize(optimizer=...)`; all ranks get the same error."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipemega.config.group_keys import GroupSpec
from pipemega.distributed.mesh import Axis, gather_objects, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.optimizer.param_groups import check_options, listed

Groups = list[dict[str, Any]]
OptimizerMaker = Callable[[Groups], Any]
"""Parameter groups -> torch optimizer over these parameters."""


def build_user_optimizer(
    make: OptimizerMaker,
    groups: Groups,
    named: Mapping[str, Tensor],
    specs: Sequence[GroupSpec],
    world: Axis,
) -> Optimizer:
    """Call `make`, and check what it returns; collective.

    Args:
        groups: what `make` gets.
        named: logical name -> the parameters in `groups`.
        specs: of the groups; their options must be options of the optimizer.
        world: all ranks.

    Raises:
        ConfigError: `make` fails, or returns something that the engine cannot use; the same on
            every rank.
    """

    def build() -> Optimizer:
        optimizer = call(make, groups, named)
        check_options(specs, optimizer)
        return optimizer

    optimizer = on_all_ranks(world, build)
    check_group_counts(len(optimizer.param_groups), world)
    return optimizer


def check_group_counts(count: int, world: Axis) -> None:
    """Check that all ranks have as many parameter groups as this one; collective.

    Raises:
        ConfigError: they have not; on every rank.
    """
    counts = gather_objects(count, world)
    other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise ConfigError(
            f"the optimizer has {counts[0]} parameter groups on rank 0 and {counts[other]} on rank "
            f"{other}: keep groups without parameters, so that schedules and checkpoints see the "
            "same groups on every rank",
            on_every_rank=True,
        )


def call(make: OptimizerMaker, groups: Groups, named: Mapping[str, Tensor]) -> Optimizer:
    """Call `make` and check the result on this rank.

    Raises:
        ConfigError: the reason why the engine cannot use the result.
    """
    # Copies: an optimizer adds its defaults to the groups that it gets.
    optimizer = made_by(make, [{**group, "params": list(group["params"])} for group in groups])
    name = type(optimizer).__name__
    if _needs_closure(optimizer):
        raise ConfigError(
            f"{name}.step() needs a closure that evaluates the model again, which a pipeline "
            "cannot do: use an optimizer whose step() needs none, such as AdamW"
        )
    _check_parameters(optimizer, named)
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"a parameter group of {name} has no option 'lr', which the engine reports in each "
            "step: add it to the groups, 1.0 if the optimizer has no learning rate"
        )
    return optimizer


def made_by(make: Callable[[Any], Any], parameters: Any) -> Optimizer:
    """Return the optimizer that the function of the caller makes of the parameters.

    Raises:
        ConfigError: it fails, or returns something else.
    """
    try:
        optimizer = make(parameters)
    except Exception as error:
        raise ConfigError(f"optimizer raised {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer must return a torch.optim.Optimizer, and it returns {_shown(optimizer)}: "
            "write optimizer=lambda params: AdamW(params, lr=1e-4)"
        )
    return optimizer


def _check_parameters(optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
    """Check that the optimizer has exactly the parameters that it was given."""
    name = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [key for key, p in named.items() if id(p) not in held]:
        raise ConfigError(
            f"the optimizer {name} drops {len(missing)} of the {len(named)} parameters that this "
            f"rank has given it: {listed(missing)}. A parameter that is not to be trained has "
            "requires_grad False in its layer; all others belong in the optimizer"
        )
    given = {id(p) for p in named.values()}
    others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in given]
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
        raise ConfigError(
            f"the optimizer {name} holds {len(others)} parameters that it was not given, such as "
            f"of shape {shapes}: build it over the argument of the function, which are the master "
            "weights or slices that this rank updates, and not over the parameters of a module"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` has a parameter without a default."""
    # Of the class: a scheduler replaces the method of the object by a function with `self`.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is p.empty for p in parameters)


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

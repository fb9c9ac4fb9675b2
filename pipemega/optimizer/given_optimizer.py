"""Optimizers and parameter groups that were built over the parameters of the model itself.

    optimizer.param_groups[k]    lr, betas, ...    params: parameters of the model
                                                           |  logical names
                                                           v
                                                   params: masters of this rank

The object of the caller becomes the optimizer of the engine, as in DeepSpeed: a scheduler that was
built over it, and code that changes the options of its groups, work as before.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.errors import ConfigError
from pipemega.optimizer.param_groups import listed, options_of
from pipemega.optimizer.user_optimizer import Groups, made_by

# Set by torch and by schedulers on the object, for this object only.
_OF_ONE_OBJECT = ("step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class GivenGroups:
    """Groups of parameters of the model, by the logical names of the parameters.

    Args:
        groups: parameters; or groups as torch's optimizers take them, {"params": [...], "lr": 1.0}.
        names: id of each local parameter of the model -> its logical name.

    Raises:
        ConfigError: an entry is neither, or a parameter is not one of the model.
    """

    def __init__(
        self, groups: Iterable[Tensor | Mapping[str, Any]], names: Mapping[int, str]
    ) -> None:
        entries: list[Any] = list(groups)
        if not any(isinstance(entry, Mapping) for entry in entries):
            entries = [{"params": entries}]
        self._options: list[dict[str, Any]] = []
        self._names: list[list[str]] = []
        for number, entry in enumerate(entries):
            if not isinstance(entry, Mapping) or "params" not in entry:
                raise ConfigError(
                    f"parameter group {number} must be a dict with the key 'params', and is a "
                    f"{type(entry).__name__}: give either parameters or groups"
                )
            given = entry["params"]
            parameters = [given] if isinstance(given, Tensor) else list(given)
            self._options.append(options_of(entry))
            self._names.append([_name_of(p, names, number) for p in parameters])

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[str]:
        """The logical names of all parameters in the groups."""
        return frozenset(name for group in self._names for name in group)

    def of(self, named: Mapping[str, Tensor]) -> Groups:
        """Return the groups with other tensors for the parameters.

        Args:
            named: logical name -> tensor; names that are missing there are left out.
        """
        return [
            {**options, "params": [named[name] for name in names if name in named]}
            for options, names in zip(self._options, self._names, strict=True)
        ]


class GivenOptimizer:
    """A torch optimizer that was built over parameters of the model; for `initialize(optimizer=)`.

    Args:
        optimizer: without state: it has made no step.
        names: id of each local parameter of the model -> its logical name.

    Raises:
        ConfigError: it has state already, or holds a parameter that is not of the model.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        if len(optimizer.state):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} has the state of "
                f"{len(optimizer.state)} parameters already, which the engine cannot take over: "
                "give an optimizer that has made no step and loaded no state; "
                "engine.load_checkpoint() restores the state that engine.save_checkpoint() saved"
            )
        self.optimizer = optimizer
        self.groups = GivenGroups(optimizer.param_groups, names)

    def attach(self, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Give the optimizer the parameters of `groups`, and return it; options are unchanged."""
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            own["params"] = group["params"]
        return self.optimizer

    def copied(self, groups: Groups) -> Optimizer:
        """Return a copy of the optimizer over `groups`, without state and hooks."""
        kept = {k: v for k, v in vars(self.optimizer).items() if k not in _OF_ONE_OBJECT}
        twin: Optimizer = object.__new__(type(self.optimizer))
        # Adds what torch needs and is missing here.
        twin.__setstate__({**kept, "state": defaultdict(dict), "param_groups": groups})
        return twin


def as_optimizer(given: Any, parameters: Any) -> Optimizer:
    """Return the optimizer of the caller: `given`, or what this function makes of `parameters`.

    Raises:
        ConfigError: it is neither an optimizer nor a function that makes one.
    """
    if isinstance(given, Optimizer):
        return given
    if not callable(given):
        raise ConfigError(
            f"initialize(optimizer=...) takes a torch.optim.Optimizer, or a function of the "
            f"parameters that returns one, not a {type(given).__name__}",
            on_every_rank=True,
        )
    return made_by(given, parameters)


def freeze_others(
    named: Mapping[str, nn.Parameter], groups: GivenGroups, log: logging.Logger
) -> None:
    """Freeze the parameters that are in no group: the engine trains all that require a gradient.

    Args:
        named: logical name -> parameter of this rank.
    """
    kept = groups.names
    others = [n for n, p in named.items() if p.requires_grad and n not in kept]
    for name in others:
        named[name].requires_grad_(False)
    if others:
        log.info(
            f"{len(others)} parameters of this rank are in no parameter group, so they are not "
            f"trained: {listed(others)}"
        )


def _name_of(parameter: Any, names: Mapping[int, str], group: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        shape = tuple(parameter.shape) if isinstance(parameter, Tensor) else type(parameter)
        raise ConfigError(
            f"parameter group {group} holds a parameter of shape {shape} that is not one of the "
            "model: build the groups and the optimizer over model.parameters(), after the last "
            "change of the model"
        )
    return name

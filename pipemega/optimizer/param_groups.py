"""Groups of an optimizer's parameters, chosen by logical name.

    index   0           1                    2      3 ..
    group   the rest    its norms, biases    spec 0, its norms, biases, spec 1, ..

The groups of norms and biases exist only if `training.weight_decay_norms_and_biases` is false, and
for a spec only if it has no weight decay of its own.  Each rank has the same groups, empty ones
included: a schedule has a rate for each.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipemega.config.group_keys import GroupSpec
from pipemega.config.name_suggestions import did_you_mean
from pipemega.errors import CheckpointError, ConfigError
from pipemega.optimizer.plain_values import decode_text, encode_text
from pipemega.parameters import shard_of

_log = logging.getLogger(__name__)

# Names of parameters that a message lists.
_MOST_LISTED = 3


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    specs: Sequence[GroupSpec] = (),
    *,
    decay_norms_and_biases: bool = True,
) -> list[dict[str, Any]]:
    """Return the groups of the parameters, as torch's optimizers take them.

    Args:
        specs: the first whose pattern matches a name gets the parameter.
        decay_norms_and_biases: if False, parameters with a logical shape of at most one dim get a
            weight decay of 0, unless their spec has a weight decay.
    """
    groups: list[dict[str, Any]] = []
    places: list[tuple[int, int]] = []  # of each spec: the indices of its group for (other, flat)
    for options in ({}, *(spec.options for spec in specs)):
        at = len(groups)
        groups.append({"params": [], **options})
        splits = not decay_norms_and_biases and "weight_decay" not in options
        if splits:
            groups.append({"params": [], **options, "weight_decay": 0.0})
        places.append((at, at + splits))
    for name, parameter in named_parameters:
        is_flat = len(shard_of(parameter).shape) <= 1
        groups[places[_place(name, specs)][is_flat]]["params"].append(parameter)
    return groups


def _place(name: str, specs: Sequence[GroupSpec]) -> int:
    """Return 1 + the index of the first spec that matches; 0 if none does."""
    matches = (i for i, spec in enumerate(specs, 1) if re.search(spec.pattern, name))
    return next(matches, 0)


def check_specs(specs: Sequence[GroupSpec], names: Sequence[str]) -> None:
    """Refuse a spec without parameters.

    Args:
        names: logical names of the trainable parameters of the whole model.

    Raises:
        ConfigError: no name matches, or only names that an earlier group has; on every rank.
    """
    used = {_place(name, specs) for name in names}
    for number, spec in enumerate(specs, 1):
        if number in used:
            continue
        taken = [name for name in names if re.search(spec.pattern, name)]
        if taken:
            earlier = specs[_place(taken[0], specs) - 1]
            raise ConfigError(
                f"{spec.key}.params {spec.pattern!r} matches only parameters that an earlier group "
                f"has: {earlier.key}.params {earlier.pattern!r} matches {listed(taken)}. The first "
                "matching group is used: reorder the groups, or remove one",
                on_every_rank=True,
            )
        raise ConfigError(
            f"{spec.key}.params {spec.pattern!r} matches none of the {len(names)} trainable "
            f"parameters of the model: {listed(names)}",
            on_every_rank=True,
        )


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    text = ", ".join(f"'{name}'" for name in names[:_MOST_LISTED])
    more = len(names) - _MOST_LISTED
    return f"{text} and {more} more" if more > 0 else text


def check_options(specs: Sequence[GroupSpec], optimizer: Optimizer) -> None:
    """Refuse options that the optimizer does not have.

    Raises:
        ConfigError: names the group, the option and the nearest one.
    """
    known = list(optimizer.defaults)
    if optimizer.param_groups:
        # Optimizers that have no default for an option need it in all groups.
        known += set.intersection(*({*options_of(group)} for group in optimizer.param_groups))
    for spec in specs:
        for option in spec.options:
            # Without defaults the optimizer checks its groups itself.
            if optimizer.defaults and option not in known:
                raise ConfigError(
                    f"{spec.key} has the option {option!r}, which {type(optimizer).__name__} does "
                    f"not have{did_you_mean(option, known)}"
                )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group: everything but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


class SharedState:
    """Saves and restores what an optimizer of the user keeps for groups, or for all parameters.

    Optimizers keep state in the options of groups, and in `optimizer.state` under keys that are no
    parameters.  An option that the user has changed since the
    run was saved is not restored; functions and other objects are not saved.

    Args:
        optimizer: as built, before a schedule changes its options.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [_encoded(options_of(group)) for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the options of each group, as built and now, and the other state, as text.

        Raises:
            CheckpointError: the optimizer keeps state elsewhere, which would be lost.
        """
        if type(self._optimizer).state_dict is not Optimizer.state_dict:
            raise CheckpointError(
                f"{type(self._optimizer).__name__} has a state_dict() of its own, as optimizers "
                "have that keep state outside of optimizer.state, such as wrappers of another "
                "optimizer: a checkpoint would not contain it. Train without checkpoints "
                "(checkpoint.save null), or use an optimizer that keeps its state as those of "
                "torch.optim do",
                on_every_rank=True,
            )
        groups = [
            {"built": built, "now": _encoded(options_of(group))}
            for built, group in zip(self._built, self._optimizer.param_groups, strict=True)
        ]
        state: Mapping[Any, Any] = self._optimizer.state
        others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        return {"groups": groups, "others": _encoded(others)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; log what the user has changed.

        Raises:
            CheckpointError: the run that saved had another number of groups.
        """
        groups, saved_groups = self._optimizer.param_groups, state["groups"]
        if len(saved_groups) != len(groups):
            raise CheckpointError(
                f"the optimizer {type(self._optimizer).__name__} has {len(groups)} parameter "
                f"groups, and the run that saved the checkpoint had {len(saved_groups)}: restore "
                "the groups, or load without the optimizer state (checkpoint.load_optimizer_states "
                "false)"
            )
        for number, saved in enumerate(saved_groups):
            self._load_group(number, decode_text(saved["built"]), decode_text(saved["now"]))
        others: dict[Any, Any] = self._optimizer.state
        others.update(decode_text(state["others"]))

    def _load_group(self, number: int, before: dict[str, Any], saved: dict[str, Any]) -> None:
        """Restore the options of a group.

        Args:
            before: the options as the saved run has built them.
            saved: the options when it was saved.
        """
        group, built = self._optimizer.param_groups[number], decode_text(self._built[number])
        for key, value in saved.items():
            # A key in neither is one that the optimizer has added in a step.
            if encode_text(built.get(key)) == encode_text(before.get(key)):
                group[key] = value
            elif key in built:
                _log.info(
                    "parameter group %d: %s is %s, as the optimizer was built; the checkpoint has "
                    "%s",
                    number,
                    key,
                    built[key],
                    value,
                )


def _encoded(values: Mapping[Any, Any]) -> str:
    """Return the values that a checkpoint can contain, as text."""
    kept = {}
    for key, value in values.items():
        with suppress(ValueError):
            encode_text(value)
            kept[key] = value
    return encode_text(kept)

"""Optimizer state by logical name, so that a checkpoint can be read on any mesh."""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.errors import CheckpointError


def pack(
    optimizer: Optimizer, targets: Mapping[str, nn.Parameter], masters: Set[str]
) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps for each logical parameter: tensors as they are, not copies.

    Args:
        targets: logical name -> what the optimizer works on.
        masters: the names for which that is a master weight, which is part of the state.

    Returns:
        name -> {"master": ..., "exp_avg": ..., "step": ...}, each with what its optimizer keeps;
        tensors are this rank's shards, of the shape of the parameter.
    """
    group_step = {
        id(p): torch.tensor(float(group["step"]))
        for group in optimizer.param_groups
        if _counts_by_group(optimizer) and "step" in group
        for p in group["params"]
    }
    packed: dict[str, dict[str, Any]] = {}
    for name, target in targets.items():
        packed[name] = dict(optimizer.state.get(target, {}))
        if packed[name] and id(target) in group_step:
            packed[name]["step"] = group_step[id(target)]
        if name in masters:
            packed[name]["master"] = target.detach()
    return packed


@torch.no_grad()
def unpack(
    optimizer: Optimizer,
    targets: Mapping[str, nn.Parameter],
    masters: Set[str],
    packed: Mapping[str, Mapping[str, Any]],
) -> None:
    """Copies a `pack` back into the optimizer and the masters; nothing changes if it does not fit.

    Raises:
        CheckpointError: a parameter of this rank is missing, or of another shape.
    """
    for name, target in targets.items():
        _check(name, target, packed, has_master=name in masters)
    names = {id(target): name for name, target in targets.items()}
    # Through torch's own loading, which knows on which device each optimizer wants its step.
    whole = optimizer.state_dict()
    whole["state"] = {}
    for group, described in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, index in zip(group["params"], described["params"], strict=True):
            entry = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in packed[names[id(parameter)]].items()
                if key != "master"
            }
            if "step" in entry and _counts_by_group(optimizer):
                described["step"] = int(entry.pop("step"))
            if entry:
                whole["state"][index] = entry
    optimizer.load_state_dict(whole)
    for name in masters & targets.keys():
        targets[name].copy_(packed[name]["master"])


def _counts_by_group(optimizer: Optimizer) -> bool:
    """apex's optimizers count steps in the group, torch's for each parameter."""
    return torch.typename(optimizer).startswith("apex.")


def _check(
    name: str, target: Tensor, packed: Mapping[str, Mapping[str, Any]], *, has_master: bool
) -> None:
    if name not in packed:
        raise CheckpointError(
            f"the checkpoint has no optimizer state for '{name}': it is of another model, or the "
            "parameter was frozen when it was saved"
        )
    if has_master and "master" not in packed[name]:
        raise CheckpointError(
            f"the checkpoint has no fp32 master weight of '{name}': it was saved by a run without "
            "bf16 or fp16; load the module only, or set the precision as it was"
        )
    for key, value in packed[name].items():
        # Per element, or, where some dims are 1, per row or column: Adafactor's.
        if (
            isinstance(value, Tensor)
            and value.dim() == target.dim()
            and any(n not in (1, m) for n, m in zip(value.shape, target.shape, strict=True))
        ):
            raise CheckpointError(
                f"the checkpoint's {key} of '{name}' has the shape {tuple(value.shape)}, and the "
                f"parameter has {tuple(target.shape)} here: it is of another model or mesh"
            )

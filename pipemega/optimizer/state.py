"""Optimizer state by logical name, so that a checkpoint can be read on any mesh."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipemega.errors import CheckpointError
from pipemega.optimizer.targets import Targets


def pack(optimizer: Optimizer, targets: Targets) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps for each logical parameter: tensors as they are, not copies.

    Returns:
        name -> {"master": ..., "exp_avg": ..., "step": ...}, each with what its optimizer keeps
        and with its master weight, if it has one; tensors are this rank's shards, of the shape of
        the parameter.  Where a target is a slice of that, they are 1-D, and "span": (start, stop)
        says which elements of the flattened parameter they are.
    """
    group_step = {
        id(p): torch.tensor(float(group["step"]))
        for group in optimizer.param_groups
        if _counts_by_group(optimizer) and "step" in group
        for p in group["params"]
    }
    packed: dict[str, dict[str, Any]] = {}
    for name, target in targets.named.items():
        packed[name] = dict(optimizer.state.get(target, {}))
        if packed[name] and id(target) in group_step:
            packed[name]["step"] = group_step[id(target)]
        if name in targets.masters:
            packed[name]["master"] = target.detach()
        if targets.spans is not None:
            packed[name]["span"] = targets.spans[name]
    return packed


@torch.no_grad()
def unpack(optimizer: Optimizer, targets: Targets, packed: Mapping[str, Mapping[str, Any]]) -> None:
    """Copies a `pack` back into the optimizer and the masters; nothing changes if it does not fit.

    Raises:
        CheckpointError: a parameter of this rank is missing, of another shape, or another slice.
    """
    for name in targets.named:
        _check(name, targets, packed)
    names = {id(target): name for name, target in targets.named.items()}
    # Through torch's own loading, which knows on which device each optimizer wants its step.
    whole = optimizer.state_dict()
    whole["state"] = {}
    for group, described in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, index in zip(group["params"], described["params"], strict=True):
            entry = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in packed[names[id(parameter)]].items()
                if key not in ("master", "span")
            }
            if "step" in entry and _counts_by_group(optimizer):
                described["step"] = int(entry.pop("step"))
            if entry:
                whole["state"][index] = entry
    optimizer.load_state_dict(whole)
    for name in targets.masters & targets.named.keys():
        targets.named[name].copy_(packed[name]["master"])


def _counts_by_group(optimizer: Optimizer) -> bool:
    """apex's optimizers count steps in the group, torch's for each parameter."""
    return torch.typename(optimizer).startswith("apex.")


def _check(name: str, targets: Targets, packed: Mapping[str, Mapping[str, Any]]) -> None:
    target = targets.named[name]
    if name not in packed:
        raise CheckpointError(
            f"the checkpoint has no optimizer state for '{name}': it is of another model, or the "
            "parameter was frozen when it was saved"
        )
    if name in targets.masters and "master" not in packed[name]:
        raise CheckpointError(
            f"the checkpoint has no fp32 master weight of '{name}': it was saved by a run without "
            "bf16 or fp16; load the module only, or set the precision as it was"
        )
    span = packed[name].get("span")
    wanted = None if targets.spans is None else targets.spans[name]
    if span is not None or wanted is not None:
        _check_span(name, span, wanted)
    for key, value in packed[name].items():
        if isinstance(value, Tensor) and not _fits(value, target):
            raise CheckpointError(
                f"the checkpoint's {key} of '{name}' has the shape {tuple(value.shape)}, and the "
                f"parameter has {tuple(target.shape)} here: it is of another model or mesh"
            )


def _fits(value: Tensor, target: Tensor) -> bool:
    """A scalar; per element; or, where some dims are 1, per row or column: Adafactor's."""
    if value.dim() != target.dim():
        return value.dim() == 0 or target.dim() != 1
    return all(n in (1, m) for n, m in zip(value.shape, target.shape, strict=True))


def _check_span(name: str, span: Any, wanted: tuple[int, int] | None) -> None:
    if wanted is None or span is None or tuple(span) != wanted:
        told = [
            "all of it" if part is None else f"elements {part[0]} to {part[1]}"
            for part in (span, wanted)
        ]
        raise CheckpointError(
            f"the state holds {told[0]} of '{name}', and this data rank works on {told[1]}: it is "
            "of another mesh, or of another zero_optimization"
        )

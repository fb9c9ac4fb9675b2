"""Optimizer state by logical name, so that a checkpoint can be loaded on any mesh."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipemega.errors import CheckpointError
from pipemega.optimizer.master_params import MasterParams


def pack(optimizer: Optimizer, masters: MasterParams) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of each logical parameter: the tensors, not copies.

    Returns:
        name -> {"master": ..., "exp_avg": ..., "step": ...}, each with the keys of the optimizer
        and, if it has one, its master weight; tensors are this rank's shards, of the shape of the
        parameter.  Where masters are slices, tensors are 1-D, and "span": (start, stop) gives
        their elements in the flattened parameter.
    """
    group_step = {
        id(p): torch.tensor(float(group["step"]))
        for group in optimizer.param_groups
        if _counts_by_group(optimizer) and "step" in group
        for p in group["params"]
    }
    packed: dict[str, dict[str, Any]] = {}
    for name, master in masters.named.items():
        packed[name] = dict(optimizer.state.get(master, {}))
        if packed[name] and id(master) in group_step:
            packed[name]["step"] = group_step[id(master)]
        if name in masters.saved_masters:
            packed[name]["master"] = master.detach()
        if masters.spans is not None:
            packed[name]["span"] = masters.spans[name]
    return packed


@torch.no_grad()
def unpack(
    optimizer: Optimizer,
    masters: MasterParams,
    packed: Mapping[str, Mapping[str, Any]],
    *,
    any_shape: bool = False,
    copy: bool = True,
) -> None:
    """Copy the result of `pack` to the optimizer and the masters; change nothing on an error.

    Args:
        any_shape: the optimizer of a user may keep state of any shape for a whole master.
        copy: copy the tensors of the optimizer's state; otherwise the optimizer gets them.

    Raises:
        CheckpointError: a parameter of this rank is missing, or has another shape or slice.
    """
    for name in masters.named:
        _check(name, masters, packed, any_shape=any_shape and masters.spans is None)
    names = {id(master): name for name, master in masters.named.items()}
    # torch's own load_state_dict puts `step` on the device that each optimizer needs.
    state = optimizer.state_dict()
    # Keys that are no parameters are not ours.
    state["state"] = {k: v for k, v in state["state"].items() if not isinstance(k, int)}
    for group, described in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], described["params"], strict=True):
            entry = {
                key: _laid_out(value, parameter, copy=copy) if isinstance(value, Tensor) else value
                for key, value in packed[names[id(parameter)]].items()
                if key not in ("master", "span")
            }
            if "step" in entry and _counts_by_group(optimizer):
                described["step"] = int(entry.pop("step"))
            if entry:
                state["state"][index] = entry
    optimizer.load_state_dict(state)
    _keep_dtypes(optimizer, state["state"])
    for name in masters.saved_masters & masters.named.keys():
        masters.named[name].copy_(packed[name]["master"])


def _laid_out(value: Tensor, master: Tensor, *, copy: bool) -> Tensor:
    """Return state with the strides of its master, as fused optimizers need it."""
    if value.shape == master.shape and value.stride() != master.stride():
        return torch.empty_like(master, dtype=value.dtype, device=value.device).copy_(value)
    return value.clone() if copy else value


def _keep_dtypes(optimizer: Optimizer, loaded: Mapping[Any, Any]) -> None:
    """Restore state whose dtype torch's `load_state_dict` has changed to that of the parameter.

    An optimizer may keep averages in bf16, or quantized. State in fp32 or fp64 follows the
    parameters: the run that saved may have had parameters of another precision.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entry in loaded.items():
        if not isinstance(index, int):
            continue
        state = optimizer.state[parameters[index]]
        for key, value in entry.items():
            # torch handles `step`: fused kernels need it in fp32.
            if key == "step" or not isinstance(value, Tensor) or key not in state:
                continue
            if value.dtype not in (torch.float32, torch.float64):
                state[key] = value.to(state[key].device)


def _counts_by_group(optimizer: Optimizer) -> bool:
    """Return whether steps are counted per group, as apex does; torch counts per parameter."""
    return torch.typename(optimizer).startswith("apex.")


def _check(
    name: str,
    masters: MasterParams,
    packed: Mapping[str, Mapping[str, Any]],
    *,
    any_shape: bool,
) -> None:
    master = masters.named[name]
    if name not in packed:
        raise CheckpointError(
            f"the checkpoint has no optimizer state for '{name}': it was saved from another model, "
            "or while the parameter was frozen"
        )
    if name in masters.saved_masters and "master" not in packed[name]:
        raise CheckpointError(
            f"the checkpoint has no fp32 master weight of '{name}': it was saved by a run without "
            "bf16 or fp16; load the module only, or set the precision of that run"
        )
    span = packed[name].get("span")
    wanted = None if masters.spans is None else masters.spans[name]
    if span is not None or wanted is not None:
        _check_span(name, span, wanted)
    for key, value in packed[name].items():
        fits = not isinstance(value, Tensor) or _fits(value, master)
        if not fits and (key == "master" or not any_shape):
            raise CheckpointError(
                f"the checkpoint's {key} of '{name}' has the shape {tuple(value.shape)}, and the "
                f"parameter has {tuple(master.shape)} here: it was saved from another model or mesh"
            )


def _fits(value: Tensor, master: Tensor) -> bool:
    """Return whether state has a shape for `master`.

    It may be a scalar, per element, or, as Adafactor's, per row or column (some dims are 1).
    """
    if value.dim() != master.dim():
        return value.dim() == 0 or master.dim() != 1
    return all(n in (1, m) for n, m in zip(value.shape, master.shape, strict=True))


def _check_span(name: str, span: Any, wanted: tuple[int, int] | None) -> None:
    if wanted is None or span is None or tuple(span) != wanted:
        saved, needed = (
            "all elements" if part is None else f"elements {part[0]} to {part[1]}"
            for part in (span, wanted)
        )
        raise CheckpointError(
            f"the state holds {saved} of '{name}', and this data rank updates {needed}: it was "
            "saved on another mesh, or with another zero_optimization"
        )

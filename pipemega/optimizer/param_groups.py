"""Groups of an optimizer's parameters, chosen by logical name.

    index   0           1                    2      3 ..
    group   the rest    its norms, biases    spec 0, its norms, biases, spec 1, ..

The groups of norms and biases exist only if `training.weight_decay_norms_and_biases` is false, and
for a spec only if it has no weight decay of its own.  Each rank has the same groups, empty ones
included: a schedule has a rate for each.

Values of optimizers and schedules as bytes, so that a checkpoint can contain them.

Numbers, text and None are JSON; all others (lists, dicts, tensors in them) are a file of torch.save
that is loaded with weights_only, so that loading runs no code.

Optimizer state by logical name, so that a checkpoint can be loaded on any mesh.
"""

import base64
import io
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipemega.config.name_suggestions import did_you_mean
from pipemega.config.sections.optimizer_section import GroupSpec
from pipemega.errors import CheckpointError, ConfigError, short_cause
from pipemega.optimizer.masters import MasterParams
from pipemega.parameters import shard_of

_JSON, _TORCH = b"j", b"t"


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        ValueError: it contains something other than tensors and plain values.
    """
    if value is None or type(value) in (bool, int, float, str):
        return _JSON + json.dumps(value).encode()
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    # Pickling calls methods of the object, which can raise anything.
    except Exception as error:
        raise ValueError(short_cause(error)) from error
    return _TORCH + buffer.getvalue()


def decode(data: bytes) -> Any:
    """Return the value of `encode`; its tensors are on the CPU."""
    kind, rest = data[:1], data[1:]
    if kind == _JSON:
        return json.loads(rest)
    return torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)


def encode_text(value: Any) -> str:
    """Return `encode` as text."""
    return base64.b64encode(encode(value)).decode()


def decode_text(text: str) -> Any:
    """Return the value of `encode_text`."""
    return decode(base64.b64decode(text))


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
        specs: the first spec whose pattern matches a name gets the parameter.
        decay_norms_and_biases: if False, parameters with a logical shape of at most one dim get a
            weight decay of 0, unless their spec has a weight decay.
    """
    groups: list[dict[str, Any]] = []
    places: list[tuple[int, int]] = []  # for each spec: indices of its group for (other, flat)
    for options in ({}, *(spec.options for spec in specs)):
        at = len(groups)
        groups.append({"params": [], **options})
        splits = not decay_norms_and_biases and "weight_decay" not in options
        if splits:
            groups.append({"params": [], **options, "weight_decay": 0.0})
        places.append((at, at + splits))
    for name, parameter in named_parameters:
        is_flat = shard_of(parameter).dims <= 1
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
        ConfigError: no name matches a spec, or only names that an earlier group has; on every
            rank.
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
        optimizer: the optimizer as it was built, before a schedule changes its options.
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
                "(checkpoint.save null), or use an optimizer that keeps its state as optimizers of "
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


def pack(optimizer: Optimizer, masters: MasterParams) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of each logical parameter: the tensors, not copies.

    Returns:
        name -> {"master": ..., "exp_avg": ..., "step": ...}, each with the keys of the optimizer
        and, if it has one, its master weight; tensors are this rank's shards, with the shape of the
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
    """Restore state whose dtype torch's `load_state_dict` has changed to the parameter's dtype.

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

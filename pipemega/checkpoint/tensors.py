"""The tensors of a checkpoint, and their names.

parameters/<logical name>             the master weight if there is one, else the parameter
buffers/<logical name>                running statistics and other buffers, of the first data rank
optimizer/<kind>/<logical name>       exp_avg, exp_avg_sq, step, momentum_buffer, ...
optimizer/value:<kind>/<logical name> state that is no tensor, as bytes
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.checkpoint.collective_io import CollectiveIO
from pipemega.checkpoint.load_options import LoadOptions
from pipemega.checkpoint.shards import Range, TensorIndex, TensorShard, assign_writes
from pipemega.distributed.mesh import Mesh
from pipemega.errors import CheckpointError
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.plain_values import decode, encode
from pipemega.parameters import Shard, shard_of
from pipemega.pipeline.local_model import LocalModel

# Prefix of the kind of state that is no tensor.
_VALUE = "value:"
# Optimizers with the same state: each can load the state of the other.
_SAME_STATE = {"AdamW": "Adam", "FusedAdam": "Adam"}


def logical_tensors(
    model: LocalModel, step: OptimizerStep | None, mesh: Mesh
) -> dict[str, TensorShard]:
    """Return this rank's shards of all tensors of the run: views, no copies."""
    shards = model_tensors(model, step, mesh)
    # All data ranks hold these; each of them writes a part.
    replicated = {k: s for k, s in shards.items() if k.startswith("parameters/") and s.span is None}
    for name, entry in _optimizer_entries(step).items():
        for kind in entry.keys() - {"master", "span"}:
            key, local = f"optimizer/{kind}/{name}", entry[kind]
            if not isinstance(local, Tensor):
                key = f"optimizer/{_VALUE}{kind}/{name}"
                shards[key] = _value_shard(model, mesh, name, entry, kind)
                continue
            shard = _tensor_shard(model, mesh, name, local, _span_of(entry, kind, local))
            _check_shape(kind, name, shard, entry, shard_of(model.parameters[name]))
            shards[key] = shard
            if "span" not in entry:
                replicated[key] = shard
            elif shard.span is None and (entry["span"][0] != 0 or entry["span"][1] == 0):
                # A scalar, such as `step`: the data rank with the first element writes it.
                shard.write_range = (0, 0)
    # Sorted, because the order must be the same on all ranks.
    assign_writes((s for _, s in sorted(replicated.items()) if s.write_range != (0, 0)), mesh.data)
    return shards


def model_tensors(
    model: LocalModel, step: OptimizerStep | None, mesh: Mesh
) -> dict[str, TensorShard]:
    """Return this rank's shards of parameters and buffers."""
    entries = _optimizer_entries(step)
    shards: dict[str, TensorShard] = {}
    for name, parameter in model.parameters.items():
        entry = entries.get(name, {})
        weight = entry.get("master", parameter.detach())
        span = _span_of(entry, "master", weight) if "master" in entry else None
        shards[f"parameters/{name}"] = _tensor_shard(model, mesh, name, weight, span)
    for name, buffer in model.persistent_buffers.items():
        shard = TensorShard(buffer, Shard(tuple(buffer.shape)))
        shard.write_range = (0, shard.numel if _writes_buffers(mesh) else 0)
        shards[f"buffers/{name}"] = shard
    return shards


def names_in_run(
    shards: Mapping[str, TensorShard], model: LocalModel, ranks: CollectiveIO
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the keys of all ranks with shapes, and further names of shared parameters; collective.

    Other programs may store a shared parameter under each of its names.
    """
    in_run: dict[str, tuple[int, ...]] = {}
    others = {f"layers.{position}.{name}" for one in model.ties for position, name in one.places}
    mine = {key: tuple(shard.size()) for key, shard in shards.items()}
    for keys, names in ranks.all_gather((mine, model.other_names)):
        in_run |= keys
        others |= names
    return in_run, others


def match_imported(
    stored: TensorIndex, in_run: Iterable[str], others: Collection[str], model: LocalModel
) -> tuple[TensorIndex, dict[str, str]]:
    """Match imported weights: other programs store tied layers once, or in all their places.

    They may also not say which tensors are buffers.

    Returns:
        the index as if the run had saved it; and key of the run -> stored key, where they differ.

    Args:
        in_run, others: see `names_in_run`.
    """
    first_of = {position: tied.places[0][0] for tied in model.ties for position, _ in tied.places}
    matched: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    renamed: dict[str, str] = {}
    for key in sorted(in_run):
        group, _, name = key.partition("/")
        _, position, inner = name.split(".", 2)
        first = f"layers.{first_of.get(int(position), position)}.{inner}"
        found = (f"{g}/{n}" for n in (name, first) for g in (group, "parameters", "buffers"))
        source = next((candidate for candidate in found if candidate in stored), None)
        if source is not None:
            matched[key] = stored[source]
            if source != key:
                renamed[key] = source
    used = {*matched, *renamed.values()}
    left = {k: v for k, v in stored.items() if k not in used and k.split("/")[1] not in others}
    return {**matched, **left}, renamed


def optimizer_tensors_to_load(
    stored: TensorIndex, model: LocalModel, step: OptimizerStep, mesh: Mesh
) -> dict[str, TensorShard]:
    """Return tensors to read the optimizer state into: the current ones if they fit, else new ones.

    An optimizer has no state before its first step, so the shapes come from the checkpoint.
    """
    shards, entries, numbers = {}, _optimizer_entries(step), _numbers(stored)
    for key, (shape, dtype) in stored.items():
        group, kind, name = _split_key(key)
        if group != "optimizer" or name not in entries:
            continue
        parameter, span = model.parameters[name], entries[name].get("span")
        is_value = kind.startswith(_VALUE)
        per_element = shape == shard_of(parameter).shape and kind not in numbers and not is_value
        local_shape: tuple[int, ...] = shape
        if per_element:
            # The parameter's shape includes its padding.
            local_shape = tuple(parameter.shape) if span is None else (span[1] - span[0],)
        span = span if per_element else None
        current = entries[name].get(kind)
        if per_element and _fits(current, local_shape, dtype, parameter.device):
            shards[key] = shard = _tensor_shard(model, mesh, name, current, span)
            # Padding is not stored, and starts at zero.
            if sum(part.numel() for part in shard.incoming.values()) == current.numel():
                continue
        local = torch.zeros(local_shape, dtype=dtype, device=parameter.device)
        if is_value:
            shards[key] = TensorShard(local, Shard(shape))
            continue
        shards[key] = _tensor_shard(model, mesh, name, local, span)
    return shards


def _numbers(stored: TensorIndex) -> set[str]:
    """Return the kinds of state that are one number for a whole parameter, such as "step"."""
    kinds = {"step"}
    for key, (shape, _) in stored.items():
        group, kind, _ = _split_key(key)
        # For a parameter without dims, all state looks so.
        if group == "optimizer" and shape == () and stored.get(parameter_key(key), ((), None))[0]:
            kinds.add(kind)
    return kinds


def _fits(
    current: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> TypeGuard[Tensor]:
    """Return whether stored state can be read into the optimizer's current one."""
    return (
        type(current) is Tensor
        and current.shape == shape
        and current.dtype == dtype
        and current.device == device
    )


@torch.no_grad()
def restore(
    shards: Mapping[str, TensorShard],
    state: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    model: LocalModel,
    step: OptimizerStep | None,
    options: LoadOptions,
) -> None:
    """Copy what was read into the buffers and the optimizer step that do not share its memory.

    Args:
        shards: the tensors that were read.
        state: from `step_state`.
        buffers: from `rank_buffers`.
    """
    for name, buffer in model.persistent_buffers.items():
        if name in buffers:
            buffer.copy_(buffers[name])
    if step is None:
        return
    current = step.state_dict()
    entries = {name: dict(entry) for name, entry in current["parameters"].items()}
    for name, entry in entries.items():
        if options.loads_optimizer and f"parameters/{name}" in shards:
            # State that is not in the checkpoint starts anew.
            for kind in entry.keys() - {"master", "span"}:
                del entry[kind]
    for key, shard in shards.items():
        group, kind, name = _split_key(key)
        if group == "optimizer" and kind.startswith(_VALUE):
            entries[name][kind.removeprefix(_VALUE)] = _decoded(shard.local)
        elif group == "optimizer":
            entries[name][kind] = shard.local
    # The master weights were read in place.
    step.load_state_dict(
        {**current, **_step_state_to_load(state, current, options), "parameters": entries},
        copy=False,
    )


def _step_state_to_load(
    state: Mapping[str, Any], current: Mapping[str, Any], options: LoadOptions
) -> dict[str, Any]:
    """Return the entries of `state` to load; without a stored loss scale the current one stays."""
    if options.module_only:
        return {}
    loaded = {key: value for key, value in state.items() if key in current}
    if not options.loads_schedule:
        loaded.pop("schedule", None)
    if not options.loads_optimizer:
        loaded.pop("shared", None)
    loaded["loss_scale"] = loaded.get("loss_scale") or current["loss_scale"]
    return loaded


def step_state(step: OptimizerStep | None) -> dict[str, Any]:
    """Return the state of the optimizer step without tensors, and the kind of its optimizer."""
    if step is None:
        return {}
    state = step.state_dict()
    del state["parameters"]
    return {"optimizer": _optimizer_kind(step), **state}


def rank_buffers(model: LocalModel, mesh: Mesh) -> dict[str, Tensor]:
    """Return the buffers of a rank that does not write `buffers/...`; {} on the others.

    Data ranks see different samples, so their running statistics differ.
    """
    return {} if _writes_buffers(mesh) else model.persistent_buffers


def check_optimizer(state: Mapping[str, Any], step: OptimizerStep) -> None:
    """Refuse the state of an optimizer of another kind.

    Raises:
        CheckpointError: with both names.
    """
    stored, current = state.get("optimizer"), _optimizer_kind(step)
    if stored is not None and stored != current:
        raise CheckpointError(
            f"the checkpoint contains the state of the optimizer {stored}, and this run uses "
            f"{current}, whose state is different: restore optimizer.type, or the optimizer that "
            f"initialize() got, or load without the optimizer state "
            f"(checkpoint.load_optimizer_states false)"
        )


def parameter_key(key: str) -> str:
    """Return the key of the parameter that an optimizer key belongs to; other keys unchanged."""
    group, _, name = _split_key(key)
    return f"parameters/{name}" if group == "optimizer" else key


def _split_key(key: str) -> tuple[str, str, str]:
    """Return the group, the kind (of optimizer state, else empty) and the logical name."""
    group, _, rest = key.partition("/")
    if group != "optimizer":
        return group, "", rest
    kind, _, name = rest.partition("/")
    return group, kind, name


def _optimizer_entries(step: OptimizerStep | None) -> Mapping[str, Mapping[str, Any]]:
    """Return logical name -> the optimizer's state of it, for trainable parameters."""
    return step.state_dict()["parameters"] if step is not None else {}


def _value_shard(
    model: LocalModel, mesh: Mesh, name: str, entry: Mapping[str, Any], kind: str
) -> TensorShard:
    """Return state that is no tensor as bytes [n], which one rank writes."""
    value = entry[kind]
    try:
        data = encode(value)
    except ValueError as error:
        raise CheckpointError(
            f"the optimizer keeps a {type(value).__name__} as {kind!r} of '{name}', and a "
            f"checkpoint can contain only tensors, numbers, text, and lists and dicts of them: "
            f"{error}"
        ) from error
    local = torch.tensor(list(data), dtype=torch.uint8, device=mesh.device)
    start, stop = entry.get("span", (mesh.data.rank, mesh.data.rank + 1))
    has_first_element = start == 0 and stop > 0
    writes = has_first_element and _is_owner(model, name) and mesh.tensor.rank == 0
    return TensorShard(local, Shard((len(data),)), (0, len(data) if writes else 0))


def _decoded(data: Tensor) -> Any:
    """Return the value of `_encoded`; its tensors are on the device of `data`."""
    value = decode(bytes(data.tolist()))
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(data.device), value)


def _check_shape(
    kind: str, name: str, state: TensorShard, entry: Mapping[str, Any], parameter: Shard
) -> None:
    """Refuse state of a part of a parameter that is neither per element nor one number.

    Each rank would have other values of it, and a checkpoint has one.

    Raises:
        CheckpointError: with the shape and the alternative.
    """
    sliced = "span" in entry and state.span is None
    sharded = parameter.dim is not None and state.shard is not parameter
    if state.local.dim() > 0 and kind != "step" and (sliced or sharded):
        raise CheckpointError(
            f"the optimizer keeps a tensor of shape {tuple(state.local.shape)} as {kind!r} of "
            f"'{name}', of which this rank has only a part: only one number, or state of the "
            "shape of the part, can be saved. Set zero_optimization.stage to 0 and mesh.tensor to "
            "1, or use an optimizer that keeps state per element"
        )


def _span_of(entry: Mapping[str, Any], kind: str, value: Tensor) -> Range | None:
    """Return the flat range of the local tensor that `value` holds, if ZeRO has sharded it."""
    if "span" not in entry or kind == "step" or value.dim() != 1:
        return None
    start, stop = entry["span"]
    return (start, stop) if value.numel() == stop - start else None


def _tensor_shard(
    model: LocalModel, mesh: Mesh, name: str, local: Tensor, span: Range | None = None
) -> TensorShard:
    """Return the shard for `local`: the parameter `name`, or optimizer state of it."""
    parameter = model.parameters[name]
    shard, shape = shard_of(parameter), tuple(parameter.shape)
    if span is None and local.shape != parameter.shape:
        # State of the whole parameter, equal on every rank.
        shard, shape = Shard(tuple(local.shape)), tuple(local.shape)
    result = TensorShard(local, shard, shape=shape, span=span)
    if _is_owner(model, name) and (shard.dim is not None or mesh.tensor.rank == 0):
        result.write_range = span if span is not None else (0, result.numel)
    return result


def _is_owner(model: LocalModel, name: str) -> bool:
    """Return whether this rank is the first of the pipeline ranks that hold a parameter."""
    return name not in model.tied or model.tied[name].rank == 0


def _writes_buffers(mesh: Mesh) -> bool:
    """Return whether this rank's buffers are the ones that are stored as `buffers/...`."""
    return mesh.data.rank == 0 and mesh.tensor.rank == 0


def _optimizer_kind(step: OptimizerStep) -> str:
    """Return the name of the optimizer's class; one name for all classes with the same state."""
    name = type(step.optimizer).__name__
    return _SAME_STATE.get(name, name)

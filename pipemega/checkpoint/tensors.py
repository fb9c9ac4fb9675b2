"""Which tensors a checkpoint holds, and by what names.

parameters/<logical name>             the master weight where there is one, else the parameter
buffers/<logical name>                running statistics and the like, of the first data rank
optimizer/<kind>/<logical name>       exp_avg, exp_avg_sq, step, momentum_buffer, ...
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.options import LoadOptions
from pipemega.checkpoint.pieces import Piece, Range, share_out
from pipemega.checkpoint.storage import TensorIndex
from pipemega.errors import CheckpointError
from pipemega.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.parameters import Shard, shard_of
from pipemega.pipeline.build import LocalModel

# Optimizers that keep the same state, and may take over from each other.
_SAME_STATE = {"AdamW": "Adam", "FusedAdam": "Adam"}


def logical_tensors(model: LocalModel, step: OptimizerStep | None, mesh: Mesh) -> dict[str, Piece]:
    """What this rank holds of the run's tensors, as they are, not copies."""
    pieces = model_tensors(model, step, mesh)
    # What every data rank holds: none of them shall write all of it.
    shared = {k: p for k, p in pieces.items() if k.startswith("parameters/") and p.span is None}
    for name, entry in _entries(step).items():
        for kind in entry.keys() - {"master", "span"}:
            local = _as_tensor(kind, name, entry[kind])
            piece = _piece(model, mesh, name, local, _span_of(entry, kind, local))
            key = f"optimizer/{kind}/{name}"
            pieces[key] = piece
            if "span" not in entry:
                shared[key] = piece
            elif piece.span is None and (entry["span"][0] != 0 or entry["span"][1] == 0):
                # A number that goes with a cut parameter: of the data rank of its beginning.
                piece.stored = (0, 0)
    # In an order that all of them know.
    share_out((p for _, p in sorted(shared.items()) if p.stored != (0, 0)), mesh.data)
    return pieces


def model_tensors(model: LocalModel, step: OptimizerStep | None, mesh: Mesh) -> dict[str, Piece]:
    """Parameters and buffers alone: what any run of this model has."""
    entries = _entries(step)
    pieces: dict[str, Piece] = {}
    for name, parameter in model.parameters.items():
        entry = entries.get(name, {})
        kept = entry.get("master", parameter.detach())
        span = _span_of(entry, "master", kept) if "master" in entry else None
        pieces[f"parameters/{name}"] = _piece(model, mesh, name, kept, span)
    for name, buffer in _buffers(model):
        piece = Piece(buffer, Shard(tuple(buffer.shape)))
        piece.stored = (0, piece.numel if _is_first(mesh) else 0)
        pieces[f"buffers/{name}"] = piece
    return pieces


def optimizer_room(
    stored: TensorIndex, model: LocalModel, step: OptimizerStep, mesh: Mesh
) -> dict[str, Piece]:
    """New tensors to read the state of the optimizer into.

    An optimizer that has not stepped yet has no state; what it will have is in the checkpoint.
    """
    pieces, entries = {}, _entries(step)
    for key, (shape, dtype) in stored.items():
        room, kind, name = _parts(key)
        if room != "optimizer" or name not in entries:
            continue
        parameter, span = model.parameters[name], entries[name].get("span")
        per_element = shape == shard_of(parameter).shape and kind != "step"
        local_shape: tuple[int, ...] = shape
        if per_element:
            # With padding, where the parameter has some.
            local_shape = tuple(parameter.shape) if span is None else (span[1] - span[0],)
        local = torch.zeros(local_shape, dtype=dtype, device=parameter.device)
        pieces[key] = _piece(model, mesh, name, local, span if per_element else None)
    return pieces


@torch.no_grad()
def restore(
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    model: LocalModel,
    step: OptimizerStep | None,
    options: LoadOptions,
) -> None:
    """Hands what was read to those who do not share memory with it.

    Args:
        pieces: what was read.
        state: from `step_state`.
        buffers: from `own_buffers`.
    """
    for name, buffer in _buffers(model):
        if name in buffers:
            buffer.copy_(buffers[name])
    if step is None:
        return
    now = step.state_dict()
    entries = {name: dict(entry) for name, entry in now["parameters"].items()}
    for name, entry in entries.items():
        if options.loads_optimizer and f"parameters/{name}" in pieces:
            # What is not in the checkpoint, the optimizer begins anew.
            for kind in entry.keys() - {"master", "span"}:
                del entry[kind]
    for key, piece in pieces.items():
        room, kind, name = _parts(key)
        if room == "optimizer":
            entries[name][kind] = piece.local
    # The masters were read in place.
    step.load_state_dict({**now, **_step_state(state, now, options), "parameters": entries})


def _step_state(
    state: Mapping[str, Any], now: Mapping[str, Any], options: LoadOptions
) -> dict[str, Any]:
    """What of `state` is loaded; saved without an optimizer or a loss scale, that goes on as is."""
    if options.module_only:
        return {}
    taken = {key: value for key, value in state.items() if key in now}
    if not options.loads_schedule:
        taken.pop("schedule", None)
    taken["loss_scale"] = taken.get("loss_scale") or now["loss_scale"]
    return taken


def step_state(step: OptimizerStep | None) -> dict[str, Any]:
    """What the optimizer step keeps besides tensors, and what kind of optimizer it has."""
    if step is None:
        return {}
    state = step.state_dict()
    del state["parameters"]
    return {"optimizer": _kind(step), **state}


def own_buffers(model: LocalModel, mesh: Mesh) -> dict[str, Tensor]:
    """Buffers of the ranks whose buffers are not the logical ones.

    Data ranks see different samples, so their running statistics differ.
    """
    return {} if _is_first(mesh) else dict(_buffers(model))


def check_optimizer(state: Mapping[str, Any], step: OptimizerStep) -> None:
    """Refuses the state of an optimizer that keeps another.

    Raises:
        CheckpointError: with both names.
    """
    then, now = state.get("optimizer"), _kind(step)
    if then is not None and then != now:
        raise CheckpointError(
            f"the checkpoint holds the state of the optimizer {then}, and this run has {now}, "
            f"which keeps another: set optimizer.type as it was, or load without it "
            f"(checkpoint.load_optimizer_states false)"
        )


def parameter_of(key: str) -> str:
    """The key under which the tensor is stored that `key` belongs to: itself, or its parameter."""
    room, _, name = _parts(key)
    return f"parameters/{name}" if room == "optimizer" else key


def _parts(key: str) -> tuple[str, str, str]:
    """The room, the kind (of optimizer state, else empty) and the logical name."""
    room, _, rest = key.partition("/")
    if room != "optimizer":
        return room, "", rest
    kind, _, name = rest.partition("/")
    return room, kind, name


def _entries(step: OptimizerStep | None) -> Mapping[str, Mapping[str, Any]]:
    """logical name -> what the optimizer keeps for it; of trainable parameters."""
    return step.state_dict()["parameters"] if step is not None else {}


def _as_tensor(kind: str, name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float):
        # Python's floats are doubles, whatever torch's default is.
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise CheckpointError(
        f"the optimizer keeps a {type(value).__name__} as {kind!r} of '{name}', and a checkpoint "
        f"holds tensors and numbers: use another optimizer.type"
    )


def _span_of(entry: Mapping[str, Any], kind: str, value: Tensor) -> Range | None:
    """The part of the local tensor that `value` is, where ZeRO has cut it."""
    if "span" not in entry or kind == "step" or value.dim() != 1:
        return None
    start, stop = entry["span"]
    return (start, stop) if value.numel() == stop - start else None


def _piece(
    model: LocalModel, mesh: Mesh, name: str, local: Tensor, span: Range | None = None
) -> Piece:
    """`local` belongs to the parameter `name`: itself, or state that the optimizer keeps for it."""
    parameter = model.parameters[name]
    shard, shape = shard_of(parameter), tuple(parameter.shape)
    if span is None and local.shape != parameter.shape:
        # A number for the whole parameter, the same on every rank.
        shard, shape = Shard(tuple(local.shape)), tuple(local.shape)
    piece = Piece(local, shard, shape=shape, span=span)
    owned = name not in model.tied or model.tied[name].rank == 0
    first = shard.dim is not None or mesh.tensor.rank == 0
    if owned and first:
        piece.stored = span if span is not None else (0, piece.numel)
    return piece


def _is_first(mesh: Mesh) -> bool:
    """Whether this rank answers for what all data and tensor ranks hold alike."""
    return mesh.data.rank == 0 and mesh.tensor.rank == 0


def _buffers(model: LocalModel) -> Iterator[tuple[str, Tensor]]:
    """Logical name -> each buffer that belongs into a checkpoint."""
    for stage in model.stages.values():
        kept = stage.state_dict(keep_vars=True)
        for name, buffer in stage.named_buffers():
            if name in kept:
                yield name, buffer


def _kind(step: OptimizerStep) -> str:
    """The optimizer, by the name of the first that keeps the same state."""
    name = type(step.optimizer).__name__
    return _SAME_STATE.get(name, name)

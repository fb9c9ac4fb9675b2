"""Which tensors a checkpoint holds, and by what names.

parameters/<logical name>             the master weight where there is one, else the parameter
buffers/<logical name>                running statistics and the like, of the first data rank
optimizer/<kind>/<logical name>       exp_avg, exp_avg_sq, step, momentum_buffer, ...
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.pieces import Piece
from pipemega.checkpoint.store import Stored
from pipemega.errors import CheckpointError
from pipemega.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.parameters import Shard, shard_of
from pipemega.pipeline.build import LocalModel

# Optimizers that keep the same state, and may take over from each other.
_SAME_STATE = {"AdamW": "Adam", "FusedAdam": "Adam"}


def logical_tensors(model: LocalModel, step: OptimizerStep | None, mesh: Mesh) -> dict[str, Piece]:
    """What this rank holds of the run's tensors, as they are, not copies."""
    pieces = _model_tensors(model, step, mesh)
    for name, entry in _entries(step).items():
        for kind, value in entry.items():
            if kind != "master":
                key = f"optimizer/{kind}/{name}"
                pieces[key] = _piece(model, mesh, name, _as_tensor(kind, name, value))
    return pieces


def room_for(
    stored: Stored, model: LocalModel, step: OptimizerStep | None, mesh: Mesh
) -> dict[str, Piece]:
    """Tensors to read a checkpoint into: this rank's own, and new ones for the optimizer.

    An optimizer that has not stepped yet has no state; what it will have is in the checkpoint.

    Raises:
        CheckpointError: what is there is the state of another optimizer.
    """
    pieces = _model_tensors(model, step, mesh)
    if step is None:
        return pieces
    _check_optimizer(stored, step)
    trained = _entries(step)
    for key, (shape, dtype) in stored.tensors.items():
        room, _, rest = key.partition("/")
        _, _, name = rest.partition("/")
        if room == "optimizer" and name in trained:
            parameter = model.parameters[name]
            # With padding, where the parameter has some.
            local_shape = parameter.shape if shape == shard_of(parameter).shape else shape
            local = torch.zeros(local_shape, dtype=dtype, device=parameter.device)
            pieces[key] = _piece(model, mesh, name, local)
    return pieces


@torch.no_grad()
def restore(
    pieces: Mapping[str, Piece],
    state: dict[str, Any],
    buffers: Mapping[str, Tensor],
    model: LocalModel,
    step: OptimizerStep | None,
) -> None:
    """Hands what was read to those who do not share memory with it.

    Args:
        pieces: from `room_for`, read.
        state: from `step_state`.
        buffers: from `own_buffers`.
    """
    for name, buffer in _buffers(model):
        if name in buffers:
            buffer.copy_(buffers[name])
    if step is None:
        return
    entries: dict[str, dict[str, Any]] = {name: {} for name in _entries(step)}
    for key, piece in pieces.items():
        room, _, rest = key.partition("/")
        if room == "parameters" and rest in entries:
            entries[rest]["master"] = piece.local
        if room == "optimizer":
            kind, _, name = rest.partition("/")
            entries[name][kind] = piece.local
    now = step.state_dict()
    # Saved without an optimizer, or without a loss scale: what there is goes on from here.
    state = now | state
    state["loss_scale"] = state["loss_scale"] or now["loss_scale"]
    step.load_state_dict({**state, "parameters": entries})


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


def _model_tensors(model: LocalModel, step: OptimizerStep | None, mesh: Mesh) -> dict[str, Piece]:
    entries = _entries(step)
    pieces: dict[str, Piece] = {}
    for name, parameter in model.parameters.items():
        kept = entries.get(name, {}).get("master", parameter.detach())
        pieces[f"parameters/{name}"] = _piece(model, mesh, name, kept)
    for name, buffer in _buffers(model):
        shard = Shard(tuple(buffer.shape))
        pieces[f"buffers/{name}"] = Piece(buffer, shard, writes=_is_first(mesh))
    return pieces


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


def _piece(model: LocalModel, mesh: Mesh, name: str, local: Tensor) -> Piece:
    """`local` belongs to the parameter `name`: itself, or state that the optimizer keeps for it."""
    parameter = model.parameters[name]
    shard = shard_of(parameter)
    if local.shape != parameter.shape:
        shard = Shard(tuple(local.shape))
    owned = name not in model.tied or model.tied[name].rank == 0
    first = shard.dim is not None or mesh.tensor.rank == 0
    return Piece(local, shard, writes=mesh.data.rank == 0 and owned and first)


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


def _check_optimizer(stored: Stored, step: OptimizerStep) -> None:
    then, now = stored.shared["optimizer_step"].get("optimizer"), _kind(step)
    if then is not None and then != now:
        raise CheckpointError(
            f"the checkpoint holds the state of the optimizer {then}, and this run has {now}, "
            f"which keeps another: set optimizer.type as it was"
        )


def _kind(step: OptimizerStep) -> str:
    """The optimizer, by the name of the first that keeps the same state."""
    name = type(step.optimizer).__name__
    return _SAME_STATE.get(name, name)

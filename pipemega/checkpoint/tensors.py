"""Which tensors a checkpoint holds, and by what names.

parameters/<logical name>             the master weight where there is one, else the parameter
buffers/<logical name>                running statistics and the like
optimizer/<kind>/<logical name>       exp_avg, exp_avg_sq, step, momentum_buffer, ...
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.checkpoint.pieces import Piece
from pipemega.checkpoint.store import Stored
from pipemega.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.parameters import Shard, shard_of
from pipemega.pipeline.build import LocalModel


def logical_tensors(model: LocalModel, step: OptimizerStep | None, mesh: Mesh) -> dict[str, Piece]:
    """What this rank holds of the run's tensors, as they are, not copies."""
    entries: Mapping[str, Mapping[str, Any]] = step.state_dict()["parameters"] if step else {}
    pieces: dict[str, Piece] = {}
    for name, parameter in model.parameters.items():
        entry = entries.get(name, {})
        kept = entry.get("master", parameter.detach())
        pieces[f"parameters/{name}"] = _piece(model, mesh, name, parameter, kept)
        for kind, value in entry.items():
            if kind != "master":
                local = torch.as_tensor(value)
                pieces[f"optimizer/{kind}/{name}"] = _piece(model, mesh, name, parameter, local)
    for name, buffer in _buffers(model):
        first = mesh.data.rank == 0 and mesh.tensor.rank == 0
        pieces[f"buffers/{name}"] = Piece(buffer, Shard(tuple(buffer.shape)), first)
    return pieces


def room_for(
    stored: Stored, model: LocalModel, step: OptimizerStep | None, mesh: Mesh
) -> dict[str, Piece]:
    """Tensors to read a checkpoint into: this rank's own where they exist, else new ones.

    An optimizer that has not stepped yet has no state; what it will have is in the checkpoint.
    """
    pieces = logical_tensors(model, step, mesh)
    if step is None:
        return pieces
    for key, (shape, dtype) in stored.tensors.items():
        room, _, rest = key.partition("/")
        _, _, name = rest.partition("/")
        if room != "optimizer" or key in pieces or name not in model.parameters:
            continue
        parameter = model.parameters[name]
        whole = shape == shard_of(parameter).shape
        local = torch.zeros(
            parameter.shape if whole else shape, dtype=dtype, device=parameter.device
        )
        pieces[key] = _piece(model, mesh, name, parameter, local)
    return pieces


@torch.no_grad()
def restore(
    pieces: Mapping[str, Piece],
    state: dict[str, Any],
    model: LocalModel,
    step: OptimizerStep | None,
) -> None:
    """Hands what was read to those who do not share memory with it: the optimizer.

    Args:
        state: the rest of the optimizer step's `state_dict`.
    """
    if step is None:
        return
    entries: dict[str, dict[str, Any]] = {name: {} for name in step.state_dict()["parameters"]}
    for key, piece in pieces.items():
        room, _, rest = key.partition("/")
        if room == "parameters" and rest in entries:
            entries[rest]["master"] = piece.local
        if room == "optimizer":
            kind, _, name = rest.partition("/")
            entries[name][kind] = piece.local
    step.load_state_dict({**state, "parameters": entries})


def _piece(
    model: LocalModel, mesh: Mesh, name: str, parameter: nn.Parameter, local: Tensor
) -> Piece:
    """`local` belongs to `parameter`: the parameter itself, or state that the optimizer keeps."""
    shard = shard_of(parameter)
    if local.shape != parameter.shape:
        shard = Shard(tuple(local.shape))
    owned = name not in model.tied or model.tied[name].rank == 0
    first = shard.dim is not None or mesh.tensor.rank == 0
    return Piece(local, shard, writes=mesh.data.rank == 0 and owned and first)


def _buffers(model: LocalModel) -> Iterator[tuple[str, Tensor]]:
    """Logical name -> each buffer that belongs into a checkpoint."""
    for stage in model.stages.values():
        kept = stage.state_dict(keep_vars=True)
        for name, buffer in stage.named_buffers():
            if name in kept:
                yield name, buffer

"""From the description to this rank's part of the model: stages, parameters, ties."""

import bisect
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipemega.mesh import Axis, Mesh
from pipemega.parameters import shard_of
from pipemega.pipeline.module import Building, Loss, PipelineModule, Stage, build_stages
from pipemega.ties import copy_from_first


@dataclass(frozen=True, eq=False)
class LocalModel:
    """What one rank holds of the model.

    Args:
        stages: the local stages, by number, in the order of the model.
        bounds: stage s of the whole model is layers bounds[s] to bounds[s + 1] - 1.
        parameters: logical name -> local parameter.
        copies: logical name -> the same parameter in later stages of this rank: other objects
            with the same numbers.
        tied: logical name -> the pipeline ranks that hold a copy, the owner first; only of
            parameters that several ranks hold, this one among them.
        loss_fn: None where the model has none.
    """

    stages: dict[int, Stage]
    bounds: tuple[int, ...]
    parameters: dict[str, nn.Parameter]
    copies: dict[str, list[nn.Parameter]]
    tied: dict[str, Axis]
    loss_fn: Loss | None

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank, and no earlier stage, answers for."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if name not in self.tied or self.tied[name].rank == 0
        }


def build_local_model(
    net: PipelineModule,
    mesh: Mesh,
    bounds: Sequence[int],
    rank_of_stage: Sequence[int],
    building: Building,
) -> LocalModel:
    """Builds this rank's stages and brings all copies of a parameter to one value; collective."""
    local = local_model(net, mesh, bounds, rank_of_stage, building)
    _agree_on_built_modules(net, mesh, local.stages)
    with torch.no_grad():
        for name in sorted(local.tied):
            copy_from_first(local.parameters[name].data, local.tied[name])
    return local


def local_model(
    net: PipelineModule,
    mesh: Mesh,
    bounds: Sequence[int],
    rank_of_stage: Sequence[int],
    building: Building,
) -> LocalModel:
    """This rank's stages, with whatever values their constructors gave; talks to nobody."""
    net.check_ties()
    here = [s for s, rank in enumerate(rank_of_stage) if rank == mesh.pipeline.rank]
    stages = dict(build_stages(net, bounds, here, building))
    parameters: dict[str, nn.Parameter] = {}
    copies: dict[str, list[nn.Parameter]] = {}
    for stage in stages.values():
        for name, parameter in stage.logical_names().items():
            if parameters.setdefault(name, parameter) is not parameter:
                copies.setdefault(name, []).append(parameter)
    return LocalModel(
        stages=stages,
        bounds=tuple(bounds),
        parameters=parameters,
        copies=copies,
        tied=_tied_axes(net, mesh, bounds, rank_of_stage),
        loss_fn=net.build_loss(mesh.tensor),
    )


def _tied_axes(
    net: PipelineModule, mesh: Mesh, bounds: Sequence[int], rank_of_stage: Sequence[int]
) -> dict[str, Axis]:
    """Logical name -> the ranks that hold a copy, for the ties between ranks that hold one here."""
    axes: dict[str, Axis] = {}
    for key, positions in sorted(net.tied().items()):
        stages = [bisect.bisect_right(bounds, position) - 1 for position in positions]
        # The owner is the first holder along the model.
        holders = list(dict.fromkeys(rank_of_stage[s] for s in stages))
        if len(holders) == 1 or mesh.pipeline.rank not in holders:
            continue
        ranks = tuple(mesh.pipeline.ranks[r] for r in holders)
        axis = Axis(f"tied {key}", ranks, holders.index(mesh.pipeline.rank), mesh.pipeline.group)
        spec = net.specs[positions[0]]
        axes |= {f"layers.{positions[0]}.{n}": axis for n in spec.tied_weight_attr}  # type: ignore[attr-defined]
    return axes


def _agree_on_built_modules(net: PipelineModule, mesh: Mesh, stages: dict[int, Stage]) -> None:
    """Modules that the user built may differ between ranks: all take what the first has."""
    for stage in stages.values():
        for position, layer in enumerate(stage.layers.values(), stage.start):
            if not net.specs[position].already_built:
                continue
            for tensor in [*layer.parameters(), *layer.buffers()]:
                for axis in (mesh.data, mesh.tensor):
                    whole = axis is mesh.data or shard_of(tensor).dim is None
                    if axis.size > 1 and whole:
                        dist.broadcast(tensor.data, src=axis.ranks[0], group=axis.group)


def log_stages(
    log: logging.Logger, net: PipelineModule, bounds: Sequence[int], rank_of_stage: Sequence[int]
) -> None:
    """One line a stage: where, which layers, how many parameters; and the whole, once."""
    counts = net.count_parameters()
    tied_again = sum(
        counts[position] for positions in net.tied().values() for position in positions[1:]
    )
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        names = ", ".join(runs_of(net.layer_names[start:stop]))
        log.info(
            f"stage {stage} on pipeline rank {rank_of_stage[stage]}: layers {start} to {stop - 1} "
            f"of {len(net)} ({names}), {sum(counts[start:stop]):,} parameters"
        )
    log.info(f"model: {len(net)} layers, {sum(counts) - tied_again:,} parameters")


def runs_of(names: Sequence[str]) -> list[str]:
    """Names with neighbouring equal ones folded: Block, Block, Block -> 3 x Block."""
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return [name if count == 1 else f"{count} x {name}" for name, count in runs]

"""Builds this rank's part of the model: stages, parameters, tied parameters."""

import bisect
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.device_collectives import broadcast
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.tied_comm import broadcast_tied
from pipemega.parameters import shard_of
from pipemega.pipeline.deferred_batch_norm import join_data_ranks
from pipemega.pipeline.microbatch_loss import Loss
from pipemega.pipeline.module import BuildOptions, PipelineModule, Stage, build_stages
from pipemega.pipeline.tied_layers import TiedParameter, check_tied_layers
from pipemega.pipeline.vocabulary_shard import VocabularyShard, vocabulary_split


@dataclass(frozen=True, eq=False)
class LocalModel:
    """The part of the model on one rank.

    Args:
        stages: the local stages, by stage number, in the order of the model.
        bounds: stage s of the whole model is layers bounds[s] to bounds[s + 1] - 1.
        parameters: logical name -> local parameter.
        copies: logical name -> the tied copies in later stages of this rank, which share the
            storage of the parameter.
        tied: logical name -> axis of the pipeline ranks that hold a copy, the owner first; only
            for parameters that this rank and other ranks hold.
        ties: all tied parameters of the whole model.
        loss_fn: None if the model has no loss.
        metadata: `PipelineModule.checkpoint_metadata`.
        vocabulary: the local rows of embedding and head, with vocabulary parallelism.
    """

    stages: dict[int, Stage]
    bounds: tuple[int, ...]
    parameters: dict[str, nn.Parameter]
    copies: dict[str, list[nn.Parameter]]
    tied: dict[str, Axis]
    loss_fn: Loss | None
    ties: tuple[TiedParameter, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: VocabularyShard | None = None

    @property
    def modules(self) -> list[Stage | VocabularyShard]:
        """The local stages, and the local rows of the vocabulary."""
        shard = [] if self.vocabulary is None else [self.vocabulary]
        return [*self.stages.values(), *shard]

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """The local parameters without the tied copies whose owner is another rank."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if name not in self.tied or self.tied[name].rank == 0
        }

    @property
    def other_names(self) -> set[str]:
        """Further logical names of the parameters that modules of this rank share."""
        names: set[str] = set()
        for stage in self.stages.values():
            first = {name for name, _ in stage.named_parameters()}
            names |= {n for n, _ in stage.named_parameters(remove_duplicate=False)} - first
        return names

    @property
    def persistent_buffers(self) -> dict[str, Tensor]:
        """Logical name -> each buffer that a state_dict contains."""
        buffers: dict[str, Tensor] = {}
        for stage in self.stages.values():
            persistent = stage.state_dict(keep_vars=True)
            buffers |= {n: b for n, b in stage.named_buffers() if n in persistent}
        return buffers


def build_local_model(
    net: PipelineModule,
    mesh: Mesh,
    bounds: Sequence[int],
    rank_of_stage: Sequence[int],
    options: BuildOptions,
    vocabulary: bool = False,
) -> LocalModel:
    """Build this rank's stages without communication; see `make_replicas_equal`.

    Args:
        vocabulary: cut embedding and head over the pipeline ranks.
    """
    check_tied_layers(net.specs, net.meta_layers)
    whole = net
    if vocabulary:
        net = vocabulary_split(net).without_vocabulary(net)
    local_stages = [s for s, rank in enumerate(rank_of_stage) if rank == mesh.pipeline.rank]
    stages = dict(build_stages(net, bounds, local_stages, options))
    join_data_ranks(stages.values(), mesh.data)
    parameters: dict[str, nn.Parameter] = {}
    copies: dict[str, list[nn.Parameter]] = {}
    for stage in stages.values():
        for name, parameter in stage.logical_names().items():
            if parameters.setdefault(name, parameter) is not parameter:
                copies.setdefault(name, []).append(parameter)
    shard = VocabularyShard(whole, mesh, options) if vocabulary else None
    for name, parameter in shard.logical_names() if shard is not None else ():
        if parameters.setdefault(name, parameter) is not parameter:
            copies.setdefault(name, []).append(parameter)
    return LocalModel(
        stages=stages,
        bounds=tuple(bounds),
        parameters=parameters,
        copies=copies,
        tied=_tied_axes(net, mesh, bounds, rank_of_stage),
        loss_fn=net.build_loss(mesh.tensor),
        ties=whole.tied_parameters,
        metadata=whole.checkpoint_metadata(),
        vocabulary=shard,
    )


def _tied_axes(
    net: PipelineModule, mesh: Mesh, bounds: Sequence[int], rank_of_stage: Sequence[int]
) -> dict[str, Axis]:
    """Return logical name -> axis of the ranks with a copy, if this rank and others have one."""
    axes: dict[str, Axis] = {}
    for tied in net.tied_parameters:
        stages = [bisect.bisect_right(bounds, position) - 1 for position, _ in tied.places]
        # The owner is the rank of the first of the tied layers.
        holders = list(dict.fromkeys(rank_of_stage[s] for s in stages))
        if len(holders) == 1 or mesh.pipeline.rank not in holders:
            continue
        ranks = tuple(mesh.pipeline.ranks[r] for r in holders)
        place = holders.index(mesh.pipeline.rank)
        devices = tuple(mesh.pipeline.devices[r] for r in holders) if mesh.pipeline.devices else ()
        axes[tied.logical_name] = Axis(
            f"tied {tied.key}",
            ranks,
            place,
            mesh.pipeline.group,
            devices if len(set(devices)) > 1 else (),
        )
    return axes


def make_replicas_equal(net: PipelineModule, mesh: Mesh, local: LocalModel) -> None:
    """Broadcast modules that the user built and tied parameters from their first rank; collective.

    Without this, they may differ between ranks.
    """
    for stage in local.stages.values():
        for position, layer in enumerate(stage.layers.values(), stage.start):
            if not net.has_built_tensors(position):
                continue
            for tensor in [*layer.parameters(), *layer.buffers()]:
                for axis in (mesh.data, mesh.tensor):
                    replicated = axis is mesh.data or shard_of(tensor).dim is None
                    if axis.size > 1 and replicated:
                        broadcast(tensor.data, axis.ranks[0], axis)
    with torch.no_grad():
        for name in sorted(local.tied):
            broadcast_tied(local.parameters[name].data, local.tied[name])


def log_stages(
    log: logging.Logger,
    net: PipelineModule,
    bounds: Sequence[int],
    rank_of_stage: Sequence[int],
    whole: PipelineModule | None = None,
) -> None:
    """Log rank, layers and parameter count of each stage, and the totals of the model.

    Args:
        net: the layers of the stages.
        whole: the model, if its embedding and head are not in stages.
    """
    counts = net.count_parameters()
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        names = ", ".join(fold_equal_names(net.layer_names[start:stop]))
        log.info(
            f"stage {stage} on pipeline rank {rank_of_stage[stage]}: layers {start} to {stop - 1} "
            f"of {len(net)} ({names}), {sum(counts[start:stop]):,} parameters"
        )
    if whole is not None:
        log.info(
            "pipeline.vocabulary 'parallel': each pipeline rank also has an equal part of the rows "
            "of the embedding and the head"
        )
        net = whole
    total, trainable = net.num_parameters(), net.num_parameters(trainable=True)
    share = "" if trainable == total else f", {trainable:,} of them trainable"
    log.info(f"model: {len(net)} layers, {total:,} parameters{share}")


def fold_equal_names(names: Sequence[str]) -> list[str]:
    """Fold runs of equal names: Block, Block, Block -> 3 x Block."""
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return [name if count == 1 else f"{count} x {name}" for name, count in runs]

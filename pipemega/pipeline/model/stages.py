"""Builds this rank's part of the model: stages, parameters, tied parameters.

Partitions the layers of the model into stages, by `pipeline.partition`.

Puts stages on the devices that the `LayerSpec`s of a model ask for.

    LayerSpec(nn.Embedding, ..., device="cpu")     stage 0      "mesh": {"device": ["cpu",
    LayerSpec(Block, ...)                          stage 1                          "cuda",
    LayerSpec(Head, ...)                           stage 2                          "cuda"]}

Both forms say the same. If the config has no `mesh.device`, the list follows from the layers;
otherwise the layers have to agree with it.

Gathers full tensors from the shards on all ranks.
"""

import bisect
import itertools
import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.config import Config
from pipemega.config.sections.pipeline_sections import PipelineSection, errors_of_mixed_devices
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import all_reduce, broadcast, broadcast_tied
from pipemega.distributed.mesh import Axis, Mesh, from_first, gather_objects
from pipemega.errors import ConfigError
from pipemega.parameters import replicas_of, shard_of
from pipemega.pipeline.executor import run_backward
from pipemega.pipeline.messages import collect_gradients
from pipemega.pipeline.microbatch_loss import Loss, weighted_loss
from pipemega.pipeline.model.batch_norm import join_data_ranks
from pipemega.pipeline.model.module import (
    BuildOptions,
    PipelineModule,
    Stage,
    TiedParameter,
    build_stages,
    check_tied_layers,
)
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard, vocabulary_split
from pipemega.pipeline.plan import partition
from pipemega.pipeline.plan.partition import (
    changes_of_device,
    check_stage_devices,
    explicit,
    partition_at,
    partition_on_devices,
)
from pipemega.pipeline.plan_selection import first_plan
from pipemega.tensor_parallel.deferred_logits import defer_logits


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
        loss_fn: the loss function; None if the model has no loss.
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
                axes = [replicas_of(tensor, mesh)]
                if shard_of(tensor).dim is None:
                    axes.append(mesh.tensor)
                for axis in axes:
                    if axis.size > 1:
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


Method = str | Sequence[int]
Sample = Callable[[], tuple[Any, Any]]
"""Returns the (inputs, labels) of one micro-batch."""


def stage_bounds(
    net: PipelineModule,
    method: Method,
    num_stages: int,
    mesh: Mesh,
    options: BuildOptions,
    sample: Sample,
) -> tuple[int, ...]:
    """Return the bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.

    Collective for "profile".

    Args:
        method: "parameters" (or "best"), "uniform", "type:REGEX", "profile" or the bounds; all but
            the last start stages at the `SPLIT`s of the model.
        sample: returns a micro-batch, for "profile"; raises ConfigError if it has none.

    Raises:
        ConfigError: names pipeline.partition: more stages than layers, no layer matches, ...
    """
    if not isinstance(method, str):
        return tuple(partition.explicit(method, len(net), num_stages))
    splits = () if net.origin is None else net.origin.splits
    if method in ("parameters", "best"):
        return tuple(partition.partition_at(net.count_used_parameters(), splits, num_stages))
    if method == "uniform":
        if splits:
            return tuple(partition.partition_at([1] * len(net), splits, num_stages))
        return tuple(partition.uniform(len(net), num_stages))
    if method.startswith("type:"):
        regex = method.removeprefix("type:")
        return tuple(partition.by_type(regex, net.layer_names, num_stages, splits))
    if method == "profile":
        seconds = layer_seconds(net, mesh, options, sample)
        return tuple(partition.partition_at(seconds, splits, num_stages))
    raise ConfigError(
        f"pipeline.partition is {method!r}; it may be 'auto', 'parameters', 'uniform', "
        f"'type:REGEX', 'profile' or a list of bounds"
    )


def layer_seconds(
    net: PipelineModule, mesh: Mesh, options: BuildOptions, sample: Sample, rounds: int = 3
) -> list[float]:
    """Return the median seconds of forward and backward of each layer; equal on all ranks.

    One layer at a time is built, measured and freed. All ranks measure, because parallel layers
    communicate; the times of rank 0 are returned.
    """
    x, labels = sample()
    seconds = []
    loss_fn = net.build_loss(mesh.tensor)
    for position in range(len(net)):
        (stage,) = build_stages(net, [position, position + 1], [0], options).values()
        final_loss = loss_fn if position == len(net) - 1 else None
        runs = [_seconds(stage, x, labels, final_loss) for _ in range(rounds + 1)]
        seconds.append(statistics.median(run for run, _ in runs[1:]))
        x = pytree.tree_map_only(Tensor, Tensor.detach, runs[-1][1])
    return from_first(mesh.world, lambda: seconds)


def _seconds(layer: Stage, x: Any, labels: Any, loss_fn: Any) -> tuple[float, Any]:
    x = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
    x, _ = collect_gradients(x)
    started = time.perf_counter()
    with defer_logits(loss_fn, layer.last_layer):
        output = layer(x)
    result = output
    if loss_fn is not None:
        result = weighted_loss(loss_fn(output, labels)).sum
    roots = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    run_backward(roots, [torch.ones_like(t) for t in roots])
    if roots and roots[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, output


def with_stage_devices(
    config: Config,
    net: PipelineModule,
    num_microbatches: int,
    auto_device: str,
    rank_of_stage: Sequence[int] | None = None,
) -> Config:
    """Return `config` with the devices and bounds that the layers of `net` need.

    If no layer has a device, it is returned unchanged.

    Args:
        num_microbatches: micro-batches of a step.
        auto_device: what mesh.device "auto" means here.
        rank_of_stage: the rank of each stage in a plan that replaces pipeline.schedule.

    Raises:
        ConfigError: a stage would have two devices, a layer is on another device than its rank,
            or a key needs equal devices; on every rank.
    """
    layers = [spec.device for spec in net.specs]
    if not any(layers):
        return config
    section, mesh = config.pipeline, config.mesh
    if rank_of_stage is None:
        if section.schedule == "auto" and {*layers} - {None} == {auto_device}:
            return config
        rank_of_stage = _rank_of_stage(config, num_microbatches, len(net))
    cut = _Cut(net, section, layers, rank_of_stage)
    if isinstance(mesh.device, tuple):
        devices: Sequence[str] = mesh.device
    elif mesh.device == "auto":
        devices = cut.devices(mesh.pipeline, auto_device)
    else:
        devices = [mesh.device] * mesh.pipeline
    bounds = cut.bounds([devices[rank] for rank in rank_of_stage])
    if len(set(devices)) == 1:
        return config
    update = {
        "mesh": mesh.model_copy(update={"device": tuple(devices)}),
        "pipeline": section.model_copy(update={"partition": tuple(bounds)}),
    }
    # With the device list, but still with the user's partition.
    for error in errors_of_mixed_devices(config.model_copy(update={"mesh": update["mesh"]})):
        raise ConfigError(error, on_every_rank=True)
    return config.model_copy(update=update)


class _Cut:
    """The stages of a model some of whose layers have devices."""

    def __init__(
        self,
        net: PipelineModule,
        section: PipelineSection,
        layers: Sequence[str | None],
        rank_of_stage: Sequence[int],
    ) -> None:
        self._net, self._section, self._layers = net, section, layers
        self._ranks = rank_of_stage

    def devices(self, num_ranks: int, auto_device: str) -> list[str]:
        """Return the device of each rank, where a layer without one is on `auto_device`."""
        layers = [device or auto_device for device in self._layers]
        if len(set(layers)) == 1:
            return layers[:1] * num_ranks
        if len(self._ranks) != num_ranks:
            raise ConfigError(
                f"layers are on {' and '.join(map(repr, sorted(set(layers))))}, and pipeline "
                f"schedule {self._section.schedule!r} has {len(self._ranks)} stages on {num_ranks} "
                f'ranks: give the device of each pipeline rank, as in "mesh": {{"device": ["cpu", '
                f'"cuda"]}}, or use a schedule with one stage per rank',
                on_every_rank=True,
            )
        if isinstance(self._section.partition, tuple):
            bounds = explicit(self._section.partition, len(layers), num_ranks)
        else:
            changes = changes_of_device(layers)
            bounds = partition_at(self._costs(), changes, num_ranks)
        stages = [layers[start] for start in bounds[:-1]]
        check_stage_devices(bounds, layers, stages, self._net.layer_names)
        return [stages[self._ranks.index(rank)] for rank in range(num_ranks)]

    def bounds(self, stages: Sequence[str]) -> list[int]:
        """Return the bounds of stages on these devices."""
        names, partition = self._net.layer_names, self._section.partition
        if isinstance(partition, tuple):
            bounds = explicit(partition, len(names), len(stages))
        elif len(set(stages)) > 1:
            return partition_on_devices(self._costs(), self._layers, stages, names)
        else:
            bounds, stages = [0, len(names)], stages[:1]
        check_stage_devices(bounds, self._layers, stages, names)
        return bounds

    def _costs(self) -> Sequence[float]:
        """Return the cost of each layer by pipeline.partition; "auto" takes the parameters.

        The times that "auto" uses hold for one kind of device only.
        """
        method, net = self._section.partition, self._net
        if method == "uniform":
            return [1] * len(net)
        if isinstance(method, str) and method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            return [int(pattern.search(name) is not None) for name in net.layer_names]
        return net.count_used_parameters()


def _rank_of_stage(config: Config, num_microbatches: int, num_layers: int) -> Sequence[int]:
    plan = first_plan(config.pipeline, config.mesh.pipeline, num_microbatches, num_layers)
    return plan.rank_of_stage


# A larger all-reduce is not faster, and needs more memory.
_BUCKET_ELEMENTS = 1 << 24

_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def gather_full_tensors(
    values: Mapping[str, Tensor], model: LocalModel, mesh: Mesh
) -> dict[str, Tensor]:
    """Return logical name -> full tensor, on the CPU of every rank; collective.

    Args:
        values: logical name -> local tensor, with the shape of the local parameter; may be a part
            of the parameters, the same on all ranks that hold them.
    """
    owned = {name: parameter for name, parameter in model.owned.items() if name in values}
    shapes = {name: (shard_of(owned[name]).shape, values[name].dtype) for name in owned}
    for part in gather_objects(shapes, mesh.world):
        shapes |= part
    full_tensors = {}
    for names in _in_buckets(shapes):
        sizes = [math.prod(shapes[name][0]) for name in names]
        bucket = torch.zeros(sum(sizes), dtype=shapes[names[0]][1], device=mesh.device)
        for name, full in zip(names, bucket.split_with_sizes(sizes), strict=True):
            if name in owned and replicas_of(owned[name], mesh).rank == 0:
                shard = shard_of(owned[name])
                if shard.dim is not None or mesh.tensor.rank == 0:
                    shard.copy_to_full(values[name], full.view(shard.shape))
        if mesh.world.size > 1:
            # The other ranks add zeros, so the result is exact.
            all_reduce(bucket, mesh.world)
        synchronize()
        for name, full in zip(names, bucket.cpu().split_with_sizes(sizes), strict=True):
            # A copy: a view would keep the whole bucket in memory.
            full_tensors[name] = full.view(shapes[name][0]).clone()
    return full_tensors


def _in_buckets(shapes: _Shapes) -> Iterator[list[str]]:
    """Yield the names in the order of the layers, in buckets of one dtype."""
    bucket, elements = list[str](), 0
    for name in sorted(shapes, key=_by_position):
        shape, dtype = shapes[name]
        size = math.prod(shape)
        if bucket and (elements + size > _BUCKET_ELEMENTS or dtype != shapes[bucket[0]][1]):
            yield bucket
            bucket, elements = [], 0
        bucket.append(name)
        elements += size
    if bucket:
        yield bucket


def _by_position(name: str) -> tuple[int, str]:
    _, position, rest = name.split(".", 2)
    return int(position), rest

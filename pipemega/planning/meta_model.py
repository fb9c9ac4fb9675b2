"""A model on a mesh, on the meta device: the stages of each rank and their costs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.config import Config
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import AxisName, Topology
from pipemega.errors import ConfigError
from pipemega.optimizer.build_step import precision_of
from pipemega.pipeline.local_model import build_local_model
from pipemega.pipeline.messages import Header
from pipemega.pipeline.microbatch_loss import reduced_loss
from pipemega.pipeline.module import BuildOptions, PipelineModule
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.layer_moves import Bounds
from pipemega.pipeline.plan.simulate import simulate
from pipemega.pipeline.plan.stage_cut import Cut, LayerCosts, best_cut, even_ranks, limit_error
from pipemega.pipeline.plan.weight_queue import limit_weight_queue
from pipemega.pipeline.recompute import checkpoint_interval
from pipemega.pipeline.schedules import AUTO
from pipemega.pipeline.schedules.vocabulary_passes import with_vocabulary
from pipemega.pipeline.stage_partition import stage_bounds
from pipemega.pipeline.vocabulary_shard import VocabularyShard, vocabulary_split
from pipemega.planning.footprint import Footprint, count_footprint
from pipemega.planning.model_source import Sample
from pipemega.planning.queue_memory import fit_weight_queue, may_limit
from pipemega.planning.shard_costs import ShardCosts, count_shards
from pipemega.planning.stage_counts import ModelTotals, StageCounts, stage_times
from pipemega.profiling.kernel_rates import rates_for
from pipemega.profiling.meta_costs import Probe, StageCosts
from pipemega.profiling.meta_kernels import DeviceType
from pipemega.profiling.tensor_meter import unmetered
from pipemega.random import preserve_rng

# Cuts whose times differ by less than this fraction are compared by the times of whole stages.
_SAME_TIME = 0.02
# Searches for a cut within a limit: sums over layers are not quite the bytes of whole stages.
_MAX_LIMITS = 3


@dataclass(frozen=True)
class StageLayout:
    """Stages, ranks and costs of a model under one plan.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        rank_of_stage: for each stage, its pipeline rank.
        footprints: for each pipeline rank.
        costs: for each stage, of one micro-batch.
        input_bytes, label_bytes: of one micro-batch.
        totals: of the layers of all stages.
        vocabulary: for each pipeline rank, of the vocabulary passes; empty: there are none.
    """

    bounds: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    footprints: tuple[Footprint, ...]
    costs: tuple[StageCosts, ...]
    input_bytes: int
    label_bytes: int
    totals: ModelTotals
    vocabulary: tuple[ShardCosts, ...] = ()

    def batch_bytes(self, rank: int, num_microbatches: int) -> int:
        """Return the bytes of the inputs and labels of a whole step that `rank` needs."""
        first, last = self.rank_of_stage[0], self.rank_of_stage[-1]
        reads_all = bool(self.vocabulary)
        microbatch = self.input_bytes * (reads_all or first == rank)
        microbatch += self.label_bytes * (reads_all or last == rank)
        return microbatch * num_microbatches


class MetaModel:
    """One model on one mesh; measures its stages under any plan and caches the costs.

    Args:
        config: of the run.
        net: the model; modules that are already built are on the meta device.
        sample: one micro-batch.
        topology: of the mesh.
        device: the device whose kernels and sends are assumed.

    Attributes:
        whole: the model.
        net: the layers of the stages; with vocabulary parallelism without embedding and head.
        cuts_vocabulary: it has vocabulary parallelism.
        devices: of each pipeline rank.

    Raises:
        ConfigError: the model has no loss, or its vocabulary cannot be cut.
    """

    def __init__(
        self,
        config: Config,
        net: PipelineModule,
        sample: Sample,
        topology: Topology,
        device: DeviceType,
    ) -> None:
        self.whole, self.device = net, device
        self.devices = config.mesh.mixed_devices or (device,) * topology.pipeline
        self.cuts_vocabulary = config.pipeline.vocabulary == "parallel" and topology.pipeline > 1
        precision, rates = precision_of(config), rates_for(config.compute_dtype)
        if self.cuts_vocabulary:
            net = vocabulary_split(net).without_vocabulary(net, precision.compute_dtype)
        self.net = net
        self._config, self._sample, self._topology = config, sample, topology
        loss = reduced_loss(config, net.build_loss(self._mesh(0).tensor))
        if loss is None:
            raise ConfigError(
                "the model has no loss_fn, and training needs one: give it to PipelineModule"
            )
        self._precision, self._rates = precision, rates
        probe = Probe(device, loss, sample.labels, precision.cast_inputs, rates)
        options, entering = self._options(self._mesh(0)), Header.of(sample.inputs)
        self._counts = StageCounts(net, probe, options, precision, entering)
        self._layouts: dict[tuple[Any, ...], StageLayout] = {}
        self._cuts: dict[tuple[Any, ...], Cut] = {}

    def with_config(self, config: Config) -> "MetaModel":
        """Return the same model on the same mesh with another config."""
        return MetaModel(config, self.whole, self._sample, self._topology, self.device)

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return self._topology.pipeline

    def has_labels(self, rank_of_stage: Sequence[int]) -> bool:
        """Return whether the data of the last stage's rank have labels."""
        ranks = self._sample.label_ranks
        return ranks is None or rank_of_stage[-1] in ranks

    @property
    def layer_counts(self) -> tuple[int, int]:
        """The number of layers, and of the layers of the most frequent class."""
        names = self.net.layer_names
        return len(names), max(Counter(names).values())

    def allows_stages(self, number: int) -> bool:
        """Return whether pipeline.partition and the layers allow `number` stages."""
        method = self._config.pipeline.partition
        fits = not isinstance(method, tuple) or len(method) == number + 1
        return fits and number <= len(self.net)

    @cached_property
    def shard_costs(self) -> tuple[ShardCosts, ...]:
        """For each pipeline rank, the costs of the passes of vocabulary parallelism.

        Empty if it is off.
        """
        meshes = map(self._mesh, range(self.num_ranks if self.cuts_vocabulary else 0))
        with preserve_rng(), unmetered():
            shards = [VocabularyShard(self.whole, mesh, self._options(mesh)) for mesh in meshes]
            return count_shards(shards, self._sample, self._precision, self._rates, self.device)

    def _mesh(self, pipeline_rank: int) -> Mesh:
        """Return the mesh of the first data and tensor rank of `pipeline_rank`, without groups."""
        topology = self._topology
        rank = topology.rank(pipeline_rank, 0, 0)

        def axis(name: AxisName) -> Axis:
            ranks = topology.along(name, rank)
            return Axis(name, ranks, ranks.index(rank))

        world = Axis("world", tuple(range(topology.world_size)), rank)
        device = torch.device("meta")
        return Mesh(topology, axis("pipeline"), axis("data"), axis("tensor"), world, device)

    @property
    def cuts_by_time(self) -> bool:
        """Whether pipeline.partition is "auto": the bounds depend on the plan."""
        return self._config.pipeline.partition == "auto"

    def bounds_of(self, plan: Plan) -> Bounds:
        """Return the bounds of the stages of `plan`, by pipeline.partition.

        Raises:
            ConfigError: no cut keeps pipeline.memory_limit, ...
        """
        if self.cuts_by_time and plan.num_stages > 1:
            return self.cut(plan).bounds
        return self.even_bounds(plan.num_stages)

    def even_bounds(self, num_stages: int) -> Bounds:
        """Return bounds that do not depend on a plan; "parameters" in place of "auto"."""
        method = self._config.pipeline.partition
        # "profile" needs measured times; given bounds may be for another number of stages.
        if method in ("profile", "auto") or (
            isinstance(method, tuple) and len(method) != num_stages + 1
        ):
            method = "parameters"
        mesh = self._mesh(0)
        with unmetered():
            return stage_bounds(self.net, method, num_stages, mesh, self._options(mesh), _no_sample)

    def cut(self, plan: Plan) -> Cut:
        """Return the fastest cut of `plan` by the fixed table of rates.

        It keeps pipeline.memory_limit if the schedule is not "auto", and is not slower than stages
        with even numbers of parameters.

        Raises:
            ConfigError: no cut keeps pipeline.memory_limit.
        """
        plan = plan.compute_only()
        key = (plan.rank_of_stage, plan.programs)
        if key not in self._cuts:
            self._cuts[key] = self._best_cut(plan)
        return self._cuts[key]

    def cut_within(
        self,
        plan: Plan,
        layers: LayerCosts,
        limit: float | None,
        starts: Sequence[Bounds] = (),
        effort: float = 1.0,
    ) -> Cut:
        """Return the fastest cut of `plan` that was found, from `starts` and others.

        Args:
            layers, limit, effort: see `best_cut`.
        """
        even = self.even_bounds(plan.num_stages)
        return best_cut(
            plan, layers, starts=(*starts, even), splits=self._splits, limit=limit, effort=effort
        )

    def even_time(self, rank_of_stage: tuple[int, ...], layers: LayerCosts) -> Bounds:
        """Return the bounds with the most even times of stages, then of ranks."""
        return even_ranks(rank_of_stage, layers, self._splits)

    @property
    def _splits(self) -> Bounds:
        """The layers at which the model starts a stage."""
        return () if self.net.origin is None else tuple(self.net.origin.splits)

    def _best_cut(self, plan: Plan) -> Cut:
        section, layers = self._config.pipeline, self.layer_costs
        limit = None if section.schedule == AUTO else section.memory_limit
        if limit is None or isinstance(limit, str):
            cut = self.cut_within(plan, layers, None)
            even = Cut.of(self.even_bounds(plan.num_stages), plan, layers)
            return cut if cut.bounds == even.bounds else self._not_slower(cut, even)
        tried = limit
        for _ in range(_MAX_LIMITS):
            cut = self.cut_within(plan, layers, tried)
            stages = self._counts.of_stages(cut.bounds, plan.splits_backward)
            counted = replace(cut, timeline=simulate(plan, stage_times(stages)))
            if counted.peak <= limit:
                return cut
            tried *= limit / counted.peak
        raise limit_error(counted, limit)

    def _not_slower(self, cut: Cut, other: Cut) -> Cut:
        """Return the faster cut by the times of whole stages, which are not quite sums of layers.

        Only if the two are nearly equal by the times of layers.
        """
        if cut.timeline.makespan < (1 - _SAME_TIME) * other.timeline.makespan:
            return cut
        plan, splits = cut.timeline.plan, cut.timeline.plan.splits_backward
        here, there = (
            simulate(plan, stage_times(self._counts.of_stages(c.bounds, splits))).makespan
            for c in (cut, other)
        )
        return cut if here <= there else other

    @property
    def layer_costs(self) -> LayerCosts:
        """The costs of each layer by the fixed table of rates; each distinct layer runs once."""
        return self._counts.of_layers

    def with_passes(self, plan: Plan, bounds: Bounds | None = None) -> Plan:
        """Return the compute steps of `plan` with the passes of vocabulary parallelism.

        Their order is the best for the times of the fixed table. Without vocabulary parallelism, or
        if `plan` has the passes, it is returned unchanged.

        Args:
            bounds: of the stages; None: `bounds_of(plan)`.
        """
        if not self.shard_costs or plan.has_vocabulary:
            return plan
        plan = plan.compute_only()
        stages = self._counts.of_stages(bounds or self.bounds_of(plan), plan.splits_backward)
        costs = replace(stage_times(stages), vocabulary=self.shard_costs[0].times(1.0))
        return with_vocabulary(plan, costs)

    @property
    def instruction_seconds(self) -> float:
        """What an instruction takes beyond its kernels, by the fixed table of rates."""
        return self._rates.instruction + self._counts.message_bytes / self._rates.messages

    def limit_weight_queue(self, plan: Plan, bounds: Bounds | None = None) -> Plan:
        """Return `plan` with queues of W within pipeline.weight_queue_limit, by counted bytes.

        Args:
            bounds: of the stages; None: `bounds_of(plan)`.
        """
        limit = self._config.pipeline.weight_queue_limit
        if limit is None or not may_limit(plan, limit):
            return plan
        bounds = bounds or self.bounds_of(plan.without_vocabulary())
        if limit != "auto":
            costs = self._counts.of_stages(bounds, splits_backward=True)
            return limit_weight_queue(plan, [stage.kept for stage in costs], limit)
        layout = self._with_whole_backwards(self.layout(plan, bounds))
        static = [
            footprint.total + layout.batch_bytes(rank, plan.num_microbatches)
            for rank, footprint in enumerate(layout.footprints)
        ]
        return fit_weight_queue(plan, layout.costs, static, self.device)

    def layout(self, plan: Plan, bounds: Bounds | None = None) -> StageLayout:
        """Return the stages of `plan` with their measured costs.

        Args:
            bounds: of the stages; None: `bounds_of(plan)`.

        Raises:
            ConfigError: the model cannot be split or built this way.
            PipelineError: a layer failed, for example because it reads a tensor value.
        """
        bounds = bounds or self.bounds_of(plan.without_vocabulary())
        layout = self.layout_of(bounds, plan.rank_of_stage, plan.splits_backward)
        kinds = {step.kind for step in plan.steps()}
        if {Kind.BACKWARD, Kind.BACKWARD_INPUT} <= kinds:
            return self._with_whole_backwards(layout)
        return layout

    def _with_whole_backwards(self, layout: StageLayout) -> StageLayout:
        """Return `layout`, of stages that split backward, with the costs of their B."""
        devices = self._devices_of(layout.rank_of_stage)
        whole = self._counts.of_stages(layout.bounds, False, devices)
        pairs = zip(layout.costs, whole, strict=True)
        costs = tuple(replace(one, whole_working=other.working[1]) for one, other in pairs)
        return replace(layout, costs=costs)

    def layout_of(
        self, bounds: Bounds, rank_of_stage: tuple[int, ...], splits_backward: bool
    ) -> StageLayout:
        """Return the same for any plan with these stages; `splits_backward`: it has I and W."""
        key = (bounds, rank_of_stage, splits_backward)
        if key not in self._layouts:
            # Building a layer seeds the generators; restore those of the caller.
            with preserve_rng(), unmetered():
                self._layouts[key] = self._measure(*key)
        return self._layouts[key]

    def _devices_of(self, rank_of_stage: Sequence[int]) -> list[DeviceType]:
        return [self.devices[rank] for rank in rank_of_stage]

    def _options(self, mesh: Mesh) -> BuildOptions:
        return BuildOptions(
            tensor=mesh.tensor,
            device=mesh.device,
            seed=self._config.seed,
            checkpoint_interval=checkpoint_interval(self._config, len(self.net)),
        )

    def _measure(
        self, bounds: Bounds, rank_of_stage: tuple[int, ...], splits_backward: bool
    ) -> StageLayout:
        footprints = []
        for number in range(self._topology.pipeline):
            mesh = self._mesh(number)
            local = build_local_model(
                self.whole, mesh, bounds, rank_of_stage, self._options(mesh), self.cuts_vocabulary
            )
            footprints.append(count_footprint(self._config, mesh, local, self.devices[number]))
        return StageLayout(
            bounds,
            rank_of_stage,
            tuple(footprints),
            self._counts.of_stages(bounds, splits_backward, self._devices_of(rank_of_stage)),
            _bytes(self._sample.inputs),
            _bytes(self._sample.labels),
            self._counts.totals,
            self.shard_costs,
        )


def _bytes(tree: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


def _no_sample() -> tuple[Any, Any]:
    raise AssertionError("a plan never partitions by 'profile'")

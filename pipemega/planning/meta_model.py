"""A model on a mesh, on the meta device: the stages of each rank and their costs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from pipemega.pipeline.plan.weight_queue import limit_weight_queue
from pipemega.pipeline.recompute import checkpoint_interval
from pipemega.pipeline.spec import LayerSpec
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward
from pipemega.pipeline.stage_partition import stage_bounds
from pipemega.planning.footprint import Footprint, MetaRank, build_meta_rank
from pipemega.planning.model_source import Sample
from pipemega.profiling.meta_costs import Probe, StageCosts
from pipemega.profiling.meta_kernels import DeviceType
from pipemega.random import preserve_rng


@dataclass(frozen=True)
class StageLayout:
    """Stages, ranks and costs of a model under one plan.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        rank_of_stage: for each stage, its pipeline rank.
        footprints: for each pipeline rank.
        costs: for each stage, of one micro-batch.
        input_bytes, label_bytes: of one micro-batch.
    """

    bounds: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    footprints: tuple[Footprint, ...]
    costs: tuple[StageCosts, ...]
    input_bytes: int
    label_bytes: int


@dataclass(frozen=True)
class _CostKey:
    """Everything that determines the costs of a stage."""

    specs: Sequence[LayerSpec] = field(compare=False)
    entering: Header
    splits_backward: bool
    is_first: bool
    is_last: bool

    def same_as(self, other: "_CostKey") -> bool:
        return (
            self == other
            and len(self.specs) == len(other.specs)
            and all(map(_builds_same_layer, self.specs, other.specs))
        )


class MetaModel:
    """One model on one mesh; measures its stages under any plan and caches the costs.

    Args:
        config: of the run.
        net: the model; modules that are already built are on the meta device.
        sample: one micro-batch.
        topology: of the mesh.
        device: the device whose kernels and sends are assumed.

    Raises:
        ConfigError: the model has no loss.
    """

    def __init__(
        self,
        config: Config,
        net: PipelineModule,
        sample: Sample,
        topology: Topology,
        device: DeviceType,
    ) -> None:
        self.net, self.device = net, device
        self._config, self._sample, self._topology = config, sample, topology
        loss = reduced_loss(config, net.build_loss(self._mesh(0).tensor))
        if loss is None:
            raise ConfigError(
                "the model has no loss_fn, and training needs one: give it to PipelineModule"
            )
        self._probe = Probe(device, loss, sample.labels, precision_of(config).cast_inputs)
        self._costs: list[tuple[_CostKey, tuple[StageCosts, Header]]] = []
        self._layouts: dict[tuple[Any, ...], StageLayout] = {}

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return self._topology.pipeline

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

    def _bounds(self, num_stages: int) -> tuple[int, ...]:
        """Return the bounds of the stages, by the method of the config if it applies."""
        method = self._config.pipeline.partition
        # "profile" needs measured times; given bounds may be for another number of stages.
        if method == "profile" or (isinstance(method, tuple) and len(method) != num_stages + 1):
            method = "parameters"
        mesh = self._mesh(0)
        return stage_bounds(self.net, method, num_stages, mesh, self._options(mesh), _no_sample)

    def limit_weight_queue(self, plan: Plan) -> Plan:
        """Return `plan` with queues of W within pipeline.weight_queue_limit, by counted bytes."""
        limit = self._config.pipeline.weight_queue_limit
        if limit is None or not _splits_backward(plan):
            return plan
        kept = [costs.kept for costs in self.layout(plan).costs]
        return limit_weight_queue(plan, kept, limit)

    def layout(self, plan: Plan) -> StageLayout:
        """Return the stages of `plan` with their measured costs.

        Raises:
            ConfigError: the model cannot be split or built this way.
            PipelineError: a layer failed, for example because it reads a tensor value.
        """
        return self.layout_of(plan.rank_of_stage, _splits_backward(plan))

    def layout_of(self, rank_of_stage: tuple[int, ...], splits_backward: bool) -> StageLayout:
        """Return the same for any plan with these stages; `splits_backward`: it has I and W."""
        key = (self._bounds(len(rank_of_stage)), rank_of_stage, splits_backward)
        if key not in self._layouts:
            # Building a layer seeds the generators; restore those of the caller.
            with preserve_rng():
                self._layouts[key] = self._measure(*key)
        return self._layouts[key]

    def _options(self, mesh: Mesh) -> BuildOptions:
        return BuildOptions(
            tensor=mesh.tensor,
            device=mesh.device,
            seed=self._config.seed,
            checkpoint_interval=checkpoint_interval(self._config, len(self.net)),
        )

    def _measure(
        self, bounds: tuple[int, ...], rank_of_stage: tuple[int, ...], splits_backward: bool
    ) -> StageLayout:
        ranks = []
        for number in range(self._topology.pipeline):
            mesh = self._mesh(number)
            local = build_local_model(self.net, mesh, bounds, rank_of_stage, self._options(mesh))
            ranks.append(build_meta_rank(self._config, mesh, local, self.device))
        costs: list[StageCosts] = []
        entering = Header.of(self._sample.inputs)
        last = len(rank_of_stage) - 1
        for number, rank in enumerate(rank_of_stage):
            specs = self.net.specs[bounds[number] : bounds[number + 1]]
            key = _CostKey(specs, entering, splits_backward, number == 0, number == last)
            stage_costs, entering = self._stage_costs(key, number, ranks[rank])
            costs.append(stage_costs)
        return StageLayout(
            bounds,
            rank_of_stage,
            tuple(rank.footprint for rank in ranks),
            tuple(costs),
            _bytes(self._sample.inputs),
            _bytes(self._sample.labels),
        )

    def _stage_costs(self, key: _CostKey, number: int, rank: MetaRank) -> tuple[StageCosts, Header]:
        """Return the costs of stage `number` and the header of its output; cached by key."""
        for known, result in self._costs:
            if known.same_as(key):
                return result
        stage, weights = rank.local.stages[number], None
        if key.splits_backward:
            weights = WeightGradQueue(rank.gradients)
            enable_split_backward([stage], weights)
        result = self._probe.measure(stage, key.entering, rank.gradients, weights, key.is_last)
        self._costs.append((key, result))
        return result


def _splits_backward(plan: Plan) -> bool:
    return any(step.kind is Kind.BACKWARD_INPUT for step in plan.steps())


def _builds_same_layer(one: LayerSpec, other: LayerSpec) -> bool:
    """Return True only if both specs are certain to build equal layers."""
    if one is other:
        return True
    if type(one) is not type(other) or one.already_built:
        return False
    if one.equality_key is not None:
        return one.equality_key == other.equality_key
    if getattr(one, "forward_fn", None) is not getattr(other, "forward_fn", None):
        return False
    if one.typename is not other.typename:
        return False
    if len(one.args) != len(other.args) or one.kwargs.keys() != other.kwargs.keys():
        return False
    pairs = [
        *zip(one.args, other.args, strict=True),
        *((value, other.kwargs[key]) for key, value in one.kwargs.items()),
    ]
    # "is True": == on tensors returns a tensor.
    return all(a is b or (a == b) is True for a, b in pairs)


def _bytes(tree: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


def _no_sample() -> tuple[Any, Any]:
    raise AssertionError("a plan never partitions by 'profile'")

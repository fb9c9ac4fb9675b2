"""A model on a mesh on paper: which rank holds which stage, and what each of them costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.assemble import checkpoint_interval, loss_of
from pipemega.assemble_step import precision_of
from pipemega.config import Config
from pipemega.errors import ConfigError
from pipemega.mesh import Axis, Mesh
from pipemega.pipeline.build import local_model
from pipemega.pipeline.cut import stage_bounds
from pipemega.pipeline.instructions import Kind, Plan
from pipemega.pipeline.messages import Header
from pipemega.pipeline.module import Building, PipelineModule
from pipemega.pipeline.spec import LayerSpec
from pipemega.pipeline.split_backward import WeightGradients, split
from pipemega.planning.footprint import Footprint, rank_on_paper
from pipemega.planning.kernels import DeviceType
from pipemega.planning.measure import Probe, StageCosts
from pipemega.random import preserve_rng
from pipemega.topology import AxisName, Topology


@dataclass(frozen=True)
class Layout:
    """The stages of a model on their ranks.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        rank_of_stage: pipeline rank by stage.
        footprints: by pipeline rank.
        costs: by stage, for one micro-batch.
        input_bytes, label_bytes: of one micro-batch.
    """

    bounds: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    footprints: tuple[Footprint, ...]
    costs: tuple[StageCosts, ...]
    input_bytes: int
    label_bytes: int


@dataclass(frozen=True, eq=False)
class Sample:
    """One micro-batch as it is fed: tensors on the meta device."""

    inputs: Any
    labels: Any


class Drawing:
    """Lays one model out on one mesh, under any schedule; remembers what it has measured.

    Args:
        config: of the run.
        net: the model; its built modules are on the meta device.
        sample: a micro-batch.
        topology: of the mesh.
        device: whose kernels and sends are assumed.

    Raises:
        ConfigError: there is no loss.
    """

    def __init__(
        self,
        config: Config,
        net: PipelineModule,
        sample: Sample,
        topology: Topology,
        device: DeviceType,
    ) -> None:
        self.config, self.net, self.topology, self.device = config, net, topology, device
        self._sample = sample
        loss = loss_of(config, net.build_loss(self.mesh(0).tensor))
        if loss is None:
            raise ConfigError(
                "the model has no loss_fn, and training needs one: give it to PipelineModule"
            )
        self._probe = Probe(device, loss, sample.labels, precision_of(config).cast_inputs)
        self._measured: list[tuple[_Key, tuple[StageCosts, Header]]] = []
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def mesh(self, pipeline_rank: int) -> Mesh:
        """The mesh as the first data and tensor rank of `pipeline_rank` sees it; no groups."""
        topology = self.topology
        rank = topology.rank(pipeline_rank, 0, 0)

        def axis(name: AxisName) -> Axis:
            ranks = topology.along(name, rank)
            return Axis(name, ranks, ranks.index(rank))

        world = Axis("world", tuple(range(topology.world_size)), rank)
        device = torch.device("meta")
        return Mesh(topology, axis("pipeline"), axis("data"), axis("tensor"), world, device)

    def bounds(self, num_stages: int) -> tuple[int, ...]:
        """Where the model is cut, as the config asks; by parameters where it cannot say."""
        method = self.config.pipeline.partition
        if method == "profile" or (isinstance(method, tuple) and len(method) != num_stages + 1):
            method = "parameters"
        mesh = self.mesh(0)
        return stage_bounds(self.net, method, num_stages, mesh, self._building(mesh), _no_sample)

    def layout(self, plan: Plan) -> Layout:
        """The stages of `plan`, measured.

        Raises:
            ConfigError: the model cannot be cut or built like that.
            PipelineError: a layer failed, or asks for numbers, which there are none of on paper.
        """
        bounds = self.bounds(plan.num_stages)
        halves = any(step.kind is Kind.BACKWARD_INPUT for step in plan.steps())
        key = (bounds, plan.rank_of_stage, halves)
        if key not in self._layouts:
            # Layers are seeded as in a run; the caller's random numbers are not to notice.
            with preserve_rng():
                self._layouts[key] = self._lay_out(bounds, plan.rank_of_stage, halves)
        return self._layouts[key]

    def _building(self, mesh: Mesh) -> Building:
        return Building(
            tensor=mesh.tensor,
            device=mesh.device,
            seed=self.config.seed,
            checkpoint_interval=checkpoint_interval(self.config, len(self.net)),
        )

    def _lay_out(
        self, bounds: tuple[int, ...], rank_of_stage: tuple[int, ...], halves: bool
    ) -> Layout:
        ranks = []
        for number in range(self.topology.pipeline):
            mesh = self.mesh(number)
            local = local_model(self.net, mesh, bounds, rank_of_stage, self._building(mesh))
            ranks.append(rank_on_paper(self.config, mesh, local, self.device))
        costs: list[StageCosts] = []
        entering = Header.of(self._sample.inputs)
        for number, home in enumerate(rank_of_stage):
            rank = ranks[home]
            key = _Key(
                self.net.specs[bounds[number] : bounds[number + 1]],
                entering,
                halves,
                number == 0,
                number == len(rank_of_stage) - 1,
            )
            found = next((result for known, result in self._measured if known.same_as(key)), None)
            if found is None:
                weights = None
                if halves:
                    weights = WeightGradients(rank.gradients)
                    split([rank.local.stages[number]], weights)
                found = self._probe.measure(
                    rank.local.stages[number], entering, rank.gradients, weights, key.is_last
                )
                self._measured.append((key, found))
            costs.append(found[0])
            entering = found[1]
        return Layout(
            bounds,
            rank_of_stage,
            tuple(rank.footprint for rank in ranks),
            tuple(costs),
            _bytes(self._sample.inputs),
            _bytes(self._sample.labels),
        )


@dataclass(frozen=True, eq=False)
class _Key:
    """What the costs of a stage depend on."""

    specs: Sequence[LayerSpec]
    entering: Header
    halves: bool
    is_first: bool
    is_last: bool

    def same_as(self, other: "_Key") -> bool:
        if (self.halves, self.is_first, self.is_last) != (
            other.halves,
            other.is_first,
            other.is_last,
        ):
            return False
        return (
            len(self.specs) == len(other.specs)
            and self.entering == other.entering
            and all(map(_alike, self.specs, other.specs))
        )


def _alike(one: LayerSpec, other: LayerSpec) -> bool:
    """Whether two descriptions surely build the same layer."""
    if one is other:
        return True
    if type(one) is not type(other) or one.already_built or one.typename is not other.typename:
        return False
    if getattr(one, "forward_fn", None) is not getattr(other, "forward_fn", None):
        return False
    # By identity where there is no plain answer: tensors do not compare as one.
    pairs = [
        *zip(one.args, other.args, strict=False),
        *((one.kwargs[k], other.kwargs.get(k)) for k in one.kwargs),
    ]
    same_size = len(one.args) == len(other.args) and one.kwargs.keys() == other.kwargs.keys()
    return same_size and all(a is b or (a == b) is True for a, b in pairs)


def _bytes(tree: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


def _no_sample() -> tuple[Any, Any]:
    raise AssertionError("partition 'profile' is planned by parameters")

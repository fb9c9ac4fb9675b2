"""A model on a mesh, on the meta device: the stages of each rank and their costs.

`pipeline.weight_queue_limit: "auto"`: bounds what queued W add to the memory of a rank.

A schedule with split backward is compared with the same schedule with full backwards, as 1F1B is
to zb-h1, and with 1F1B on the same stages: a schedule that needs less than that may use the rest
for W. From I to W a linear keeps its input and the gradient of its output; a B frees both at
once. In a transformer this is as much as F keeps, in a chain of linears twice as much, and with
recomputation, where F keeps almost nothing, many times as much.

A rank runs queued W before the instruction that would exceed its limit; if one I alone exceeds it,
a B replaces I and W.
"""

import importlib
import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.config import Config
from pipemega.data.tokens.data_files import Vocabulary, known_vocabulary
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError, code_of_user
from pipemega.layer_costs.counted_model import CountedModel
from pipemega.layer_costs.stage_costs import ModelTotals, Sample, StageCosts, stage_times
from pipemega.layer_costs.tensor_meter import DeviceType, unmetered
from pipemega.models.build_model import ModelContext, build_from, model_section, sample_from
from pipemega.optimizer.build_step import precision_of
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import build_local_model
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard, vocabulary_split
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.lowering import limit_weight_queue, lower
from pipemega.pipeline.plan.partition import Bounds, LayerCosts, even_ranks
from pipemega.pipeline.plan_selection import measurement_plan
from pipemega.pipeline.schedules import SCHEDULES
from pipemega.pipeline.schedules.vocabulary_passes import with_vocabulary
from pipemega.planning.memory import Footprint, ShardCosts, count_footprint, count_shards
from pipemega.planning.memory_timeline import MemoryTimeline, peak_memory
from pipemega.random import preserve_rng

# Most memory of a rank, relative to the fullest rank of those two: without weights, gradients and
# optimizer state,
_ACTIVATIONS = 1.4
# and with them, if layers are recomputed: activations are then a small part of the memory.
_WHOLE_IF_RECOMPUTED = 1.2
# A chain of linears keeps twice as many bytes for W as for B; more is due to recomputation.
RECOMPUTED_RATIO = 2.25


def may_limit(plan: Plan, limit: float | str | None) -> bool:
    """Return whether the `pipeline.weight_queue_limit` of a config may change `plan`.

    "auto" changes only named schedules: a user's plan stays as it is, and the choice of schedule
    `auto` keeps `pipeline.memory_limit`. With `pipeline.vocabulary` "parallel" nothing changes: the
    passes of the vocabulary have their own places between I and W.
    """
    if limit is None:
        return False
    if limit == "auto" and (plan.name not in SCHEDULES or plan.has_vocabulary):
        return False
    return plan.splits_backward


def recomputes(costs: Sequence[StageCosts]) -> bool:
    """Return whether I recomputes much of what W needs."""
    return sum(c.kept for c in costs) > RECOMPUTED_RATIO * sum(c.held for c in costs)


def fit_weight_queue(
    plan: Plan, costs: Sequence[StageCosts], static: Sequence[int], device: DeviceType
) -> Plan:
    """Return the compute steps of `plan` with W so early that each rank stays within its limit.

    Args:
        costs: the costs of every stage, with split backward.
        static: for each rank, bytes that do not depend on the plan.
    """
    whole_plans = _with_full_backwards(plan)
    peaks = [
        max(peak_memory(whole, rank, costs, device).total for whole in whole_plans)
        for rank in range(plan.num_ranks)
    ]
    most = [_ACTIVATIONS * max(peaks)] * plan.num_ranks
    if recomputes(costs):
        total = _WHOLE_IF_RECOMPUTED * max(map(sum, zip(peaks, static, strict=True)))
        most = [max(limit, total - known) for limit, known in zip(most, static, strict=True)]
    lowered = lower(plan)
    programs = tuple(
        _Fitting(lowered, rank, costs, device, limit).program() for rank, limit in enumerate(most)
    )
    return replace(plan.compute_only(), programs=programs)


def _with_full_backwards(plan: Plan) -> list[Plan]:
    """Return `plan`, and 1F1B if it has the same stages, lowered and without I and W."""
    sizes = plan.num_ranks, plan.num_microbatches, plan.num_stages // plan.num_ranks
    plain = measurement_plan(*sizes)
    plans = [plan, *([plain] if plain.rank_of_stage == plan.rank_of_stage else [])]
    return [lower(limit_weight_queue(each, [1.0] * plan.num_stages, 0.0)) for each in plans]


class _Fitting:
    """Brings W forward in the program of one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        costs: Sequence[StageCosts],
        device: DeviceType,
        most: float,
    ) -> None:
        self._steps, self._most = plan.programs[rank], most
        self._memory = MemoryTimeline(plan.rank_of_stage, rank, costs, device)
        self._queue: deque[Instruction] = deque()
        self._program: list[Instruction] = []

    def program(self) -> Program:
        """Return the compute steps."""
        for step in self._steps:
            if step.kind is Kind.BACKWARD_WEIGHT:
                if step in self._queue:
                    self._queue.remove(step)
                    self._run(step)
                continue
            while self._queue and self._memory.peak_of(step) > self._most:
                self._run(self._queue.popleft())
            if step.kind is Kind.BACKWARD_INPUT:
                if self._memory.peak_of(step) > self._most:
                    step = step._replace(kind=Kind.BACKWARD)
                else:
                    self._queue.append(step._replace(kind=Kind.BACKWARD_WEIGHT))
            self._run(step)
        return tuple(self._program)

    def _run(self, step: Instruction) -> None:
        self._memory.run(step)
        if not step.kind.is_message:
            self._program.append(step)


@dataclass(frozen=True)
class StageLayout:
    """Stages, ranks and costs of a model under one plan.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        rank_of_stage: for each stage, its pipeline rank.
        footprints: for each pipeline rank, the memory that does not depend on the schedule.
        costs: for each stage, its costs for one micro-batch.
        input_bytes, label_bytes: bytes of the inputs and of the labels of one micro-batch.
        totals: sums of the costs of the layers of all stages.
        vocabulary: for each pipeline rank, the costs of the vocabulary passes; empty: there are
            none.
        fills_waits: parts of W run within exchanges.
    """

    bounds: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    footprints: tuple[Footprint, ...]
    costs: tuple[StageCosts, ...]
    input_bytes: int
    label_bytes: int
    totals: ModelTotals
    vocabulary: tuple[ShardCosts, ...] = ()
    fills_waits: bool = False

    def batch_bytes(self, rank: int, num_microbatches: int) -> int:
        """Return the bytes of the inputs and labels of a whole step that `rank` needs."""
        first, last = self.rank_of_stage[0], self.rank_of_stage[-1]
        reads_all = bool(self.vocabulary)
        microbatch = self.input_bytes * (reads_all or first == rank)
        microbatch += self.label_bytes * (reads_all or last == rank)
        return microbatch * num_microbatches


class MetaModel(CountedModel):
    """One model on one mesh; measures its stages under any plan and caches the costs.

    Args:
        config: the config of the run.
        net: the model; modules that are already built are on the meta device.
        sample: one micro-batch.
        topology: the sizes of the mesh.
        device: the device whose kernels and sends are assumed.

    Attributes:
        whole: the model.
        net: the layers of the stages; with vocabulary parallelism without embedding and head.
        cuts_vocabulary: it has vocabulary parallelism.
        devices: the device of each pipeline rank.
        has_graphs: layers run as CUDA graphs.

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
        self.whole = net
        self.cuts_vocabulary = config.pipeline.vocabulary == "parallel" and topology.pipeline > 1
        if self.cuts_vocabulary:
            dtype = precision_of(config).compute_dtype
            net = vocabulary_split(net).without_vocabulary(net, dtype)
        super().__init__(config, net, sample, topology, device)
        self.devices = config.mesh.mixed_devices or (device,) * topology.pipeline
        self.has_graphs = config.compile.cuda_graphs
        self._layouts: dict[tuple[Any, ...], StageLayout] = {}

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

    def bounds_of(self, plan: Plan) -> Bounds:
        """Return the bounds of the stages of `plan`, by pipeline.partition.

        Raises:
            ConfigError: no cut keeps pipeline.memory_limit, ...
        """
        if self.cuts_by_time and plan.num_stages > 1:
            return self.cut(plan).bounds
        return self.even_bounds(plan.num_stages)

    def even_time(self, rank_of_stage: tuple[int, ...], layers: LayerCosts) -> Bounds:
        """Return the bounds with the most even times of stages, then of ranks."""
        return even_ranks(rank_of_stage, layers, self._splits)

    def with_passes(self, plan: Plan, bounds: Bounds | None = None) -> Plan:
        """Return the compute steps of `plan` with the passes of vocabulary parallelism.

        Their order is the best for the times of the fixed table. Without vocabulary parallelism, or
        if `plan` has the passes, it is returned unchanged.

        Args:
            bounds: the bounds of the stages; None: `bounds_of(plan)`.
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
            bounds: the bounds of the stages; None: `bounds_of(plan)`.
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
            bounds: the bounds of the stages; None: `bounds_of(plan)`.

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
            # Building a layer seeds the generators; restore the caller's generators.
            with preserve_rng(), unmetered():
                self._layouts[key] = self._measure(*key)
        return self._layouts[key]

    def _devices_of(self, rank_of_stage: Sequence[int]) -> list[DeviceType]:
        return [self.devices[rank] for rank in rank_of_stage]

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
            self._config.pipeline.fill_waits,
        )


def _bytes(tree: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


# The vocabulary of GPT-2.
_ASSUMED_VOCABULARY = 50257

_USAGE = (
    "write --model MODULE:FUNCTION, where FUNCTION(micro_batch_size) returns "
    "(PipelineModule, inputs, labels)"
)


def model_and_sample(config: Config, topology: Topology) -> tuple[PipelineModule, Sample]:
    """Return the model of the section `model`, and one micro-batch for it.

    Raises:
        ConfigError: the section is missing, or its type cannot build the model.
        DataError: a tokenizer is damaged.
    """
    if config.model is None:
        raise ConfigError(
            f"the config has no section 'model', which describes the model; for a model in Python "
            f"{_USAGE}"
        )
    context = meta_context(config, topology)
    return build_from(context).on_meta(), Sample(*sample_from(context))


def meta_context(config: Config, topology: Topology) -> ModelContext:
    """Return the context in which a model is planned; its vocabulary may be assumed."""
    return ModelContext.of(config, topology, vocab_size=vocabulary_of(config).size)


def count_layers(config: Config, topology: Topology) -> int:
    """Return the number of pipeline layers of the section `model`; builds no layer."""
    return len(build_from(meta_context(config, topology)))


def vocabulary_of(config: Config) -> Vocabulary:
    """Return the vocabulary size of the model: from the config, the tokenizer, or assumed.

    Raises:
        DataError: a tokenizer is damaged.
    """
    own = model_section(config).vocabulary()
    if isinstance(own, int):
        return Vocabulary(own, "model.vocab_size")
    found = known_vocabulary(config.data)
    if found is not None:
        return found
    path = config.data.tokenizer
    where = f"{path} does not exist here" if path else "is unknown"
    origin = f"GPT-2's, because model.vocab_size is 'auto' and the tokenizer {where}"
    # A model without a vocabulary gets the number and has no use for it.
    return Vocabulary(_ASSUMED_VOCABULARY, origin, is_certain=own is None)


def user_model_and_sample(path: str, micro_batch_size: int) -> tuple[PipelineModule, Sample]:
    """Call FUNCTION of `MODULE:FUNCTION` under the meta device and return its model.

    Raises:
        ConfigError: the function cannot be found, fails, or returns something else.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--model {path!r} names no function: {_USAGE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with code_of_user(f"--model {path!r} failed"), torch.device("meta"):
        returned = getattr(importlib.import_module(module_name), name)(micro_batch_size)
    if not (
        isinstance(returned, tuple)
        and len(returned) == 3
        and isinstance(returned[0], PipelineModule)
    ):
        raise ConfigError(f"--model {path!r} returned {type(returned).__name__}: {_USAGE}")
    net, inputs, labels = returned
    return net, Sample.like(inputs, labels)

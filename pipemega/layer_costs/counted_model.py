"""A model on the meta device, on a mesh: the costs of its layers, and the cut by them.

FLOPs of a model, counted by running it unsharded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pipemega.config import Config
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import AxisName, Topology
from pipemega.errors import ConfigError, PipemegaError
from pipemega.layer_costs.stage_costs import Probe, Sample, StageCounts, stage_times
from pipemega.layer_costs.tensor_meter import (
    DeviceKernels,
    DeviceType,
    Fp8Counter,
    TensorMeter,
    rates_for,
    unmetered,
)
from pipemega.models.build_model import ModelContext, build_from, model_section, sample_from
from pipemega.optimizer.build_step import precision_of
from pipemega.pipeline.messages import Header
from pipemega.pipeline.microbatch_loss import reduced_loss
from pipemega.pipeline.model.module import BuildOptions, PipelineModule
from pipemega.pipeline.model.recompute import checkpoint_interval
from pipemega.pipeline.model.stages import stage_bounds
from pipemega.pipeline.plan.fill_waits import Waits
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds, Cut, LayerCosts, best_cut, limit_error
from pipemega.pipeline.plan.simulate import simulate
from pipemega.pipeline.schedules import AUTO
from pipemega.printing import percent

# Cuts whose times differ by less than this fraction are compared by the times of whole stages.
_SAME_TIME = 0.02
# Searches for a cut within a limit: sums over layers are not quite the bytes of whole stages.
_MAX_LIMITS = 3


class CountedModel:
    """The layers of one model on one mesh; counts them, cuts them by time and caches the results.

    Args:
        config: the config of the run.
        net: the layers of the stages; modules that are already built are on the meta device.
        sample: one micro-batch.
        topology: the sizes of the mesh.
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
        precision, rates = precision_of(config), rates_for(config.compute_dtype, topology)
        loss = reduced_loss(config, net.build_loss(self._mesh(0).tensor))
        if loss is None:
            raise ConfigError(
                "the model has no loss_fn, and training needs one: give it to PipelineModule"
            )
        self._precision, self._rates = precision, rates
        offloads = config.activation_checkpointing.cpu_checkpointing
        probe = Probe(device, loss, sample.labels, precision.cast_inputs, rates, offloads)
        options, entering = self._options(self._mesh(0)), Header.of(sample.inputs)
        fp8 = Fp8Counter(config.fp8.recipe) if config.fp8.enabled else None
        self._counts = StageCounts(net, probe, options, precision, entering, fp8)
        self._cuts: dict[tuple[Any, ...], Cut] = {}

    def _mesh(self, pipeline_rank: int) -> Mesh:
        """Return the mesh of the first data and tensor rank of `pipeline_rank`, without groups."""
        topology = self._topology
        rank = topology.rank(pipeline_rank, 0, 0)

        def axis(name: AxisName) -> Axis:
            ranks = topology.along(name, rank)
            return Axis(name, ranks, ranks.index(rank))

        world = Axis("world", tuple(range(topology.world_size)), rank)
        device = torch.device("meta")
        return Mesh(
            topology,
            axis("pipeline"),
            axis("data"),
            axis("tensor"),
            world,
            device,
            expert=axis("expert"),
            expert_replicas=axis("replica"),
        )

    @property
    def cuts_by_time(self) -> bool:
        """Whether pipeline.partition is "auto": the bounds depend on the plan."""
        return self._config.pipeline.partition == "auto"

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

    @property
    def waits(self) -> tuple[Waits, ...]:
        """The exchanges of tokens of each layer."""
        return self._counts.waits

    def _options(self, mesh: Mesh) -> BuildOptions:
        return BuildOptions(
            tensor=mesh.tensor,
            device=mesh.device,
            seed=self._config.seed,
            checkpoint_interval=checkpoint_interval(self._config, len(self.net)),
            expert=mesh.expert,
        )


def _no_sample() -> tuple[Any, Any]:
    raise AssertionError("a plan never partitions by 'profile'")


# The old default, and how to keep it.
KEEP_OLD = "pipeline.partition 'parameters' divides the parameters evenly, the default before"

# Stages whose share of the work the log shows.
_MOST_SHARES = 8


def explain(cut: Cut, even: Cut) -> str:
    """Return why the model has the cut `cut` and not `even`, for the log of a run."""
    plan, times = cut.timeline.plan, cut.costs
    stages = zip(times.forward, times.whole_backward, strict=True)
    work = [forward + backward for forward, backward in stages]
    shares = ", ".join(percent(w / sum(work), 0) for w in work[:_MOST_SHARES]) if sum(work) else ""
    more = ", ..." if len(work) > _MOST_SHARES else ""
    text = (
        f"partition auto: stages {list(cut.bounds)} (bounds of layers) for the shortest simulated "
        f"step of {plan.name}; share of the work by stage: {shares}{more}"
    )
    if cut.bounds == even.bounds:
        return f"{text}; even numbers of parameters give the same stages"
    longer = even.timeline.makespan / cut.timeline.makespan - 1
    return (
        f"{text}; with even numbers of parameters ({list(even.bounds)}) it is {percent(longer)} "
        f"longer ({KEEP_OLD})"
    )


# Backward computes the gradients of both factors of each matrix product.
_BACKWARD = 2


def flops_per_token(context: ModelContext) -> float:
    """Return the FLOPs of forward and backward per token, without recomputation; 0: unknown.

    Args:
        context: a model context on the meta device.
    """
    section = model_section(context.config)
    known, tokens = section.flops_per_token(context), section.sample_tokens()
    if known is not None or tokens is None:
        return known or 0.0
    return _counted_per_sample(context) / tokens


def flops_per_sample(context: ModelContext) -> float:
    """Return the FLOPs of forward and backward per sample, such as an image; 0: unknown."""
    tokens = model_section(context.config).sample_tokens()
    return _counted_per_sample(context) if tokens is None else tokens * flops_per_token(context)


def _counted_per_sample(context: ModelContext) -> float:
    try:
        inputs, _ = sample_from(context)
        forward = forward_flops(build_from(context).on_meta(), inputs)
    except (PipemegaError, RuntimeError, TypeError):
        return 0.0  # a layer reads values, which the meta device does not have
    return (1 + _BACKWARD) * forward / context.micro_batch_size


def forward_flops(net: PipelineModule, inputs: Any) -> float:
    """Return the FLOPs of one forward of `net` for `inputs`; both are on the meta device."""
    x, total = inputs, 0.0
    measured: dict[object, tuple[float, Any]] = {}  # by the key of equal layers
    # The fused kernel of the CPU takes all sizes and dtypes of heads, without dropout.
    with torch.no_grad(), DeviceKernels("cpu"):
        for spec, layer in zip(net.specs, net.meta_layers, strict=True):
            key = spec.equality_key
            if key is None or key not in measured:
                layer.eval()
                with TensorMeter() as meter:
                    x = layer(x) if spec.forward_fn is None else spec.forward_fn(layer, x)
                measured[key] = meter.flops, x
            flops, x = measured[key]
            total += flops
    return total

"""Predicts one schedule: time, memory of each rank, messages."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.kinds import TRANSFER_OF_SEND
from pipemega.pipeline.plan.layer_moves import Bounds
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import Timeline, simulate
from pipemega.pipeline.plan.vocabulary_channels import vocabulary_channels
from pipemega.pipeline.schedules import SCHEDULES, RankCosts, Sizes
from pipemega.planning.footprint import Footprint
from pipemega.planning.memory_timeline import PeakMemory, peak_memory
from pipemega.planning.meta_model import MetaModel, StageLayout
from pipemega.planning.rates import Rates
from pipemega.profiling.meta_kernels import DeviceType


@dataclass(frozen=True)
class RankMemory:
    """Peak memory in bytes of one pipeline rank; its data and tensor peers need the same.

    Args:
        footprint: memory that does not depend on the schedule.
        schedule_peak: peak of the memory that depends on the schedule.
        batch: inputs and labels of a whole step.
        device: of the rank.
    """

    footprint: Footprint
    schedule_peak: PeakMemory
    batch: int
    device: DeviceType

    @property
    def _peak_is_in_optimizer_step(self) -> bool:
        return self.footprint.step > self.schedule_peak.total + self.batch

    @property
    def activations(self) -> int:
        return 0 if self._peak_is_in_optimizer_step else self.schedule_peak.activations

    @property
    def buffers(self) -> int:
        """Messages, the batch, and temporary memory of the instruction or of the reduction."""
        if self._peak_is_in_optimizer_step:
            return self.footprint.step
        return self.schedule_peak.messages + self.schedule_peak.working + self.batch

    @property
    def total(self) -> int:
        return self.footprint.total + self.activations + self.buffers


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted step of one schedule.

    Args:
        plan: lowered.
        layout: the stages and their costs.
        costs: of the stages; memory in bytes, time in seconds or in mean forwards of a rank.
        timeline: the simulated step.
        bubble_formula: bubble by the formula of the schedule for equal stages; None without
            formula.
        memory: by pipeline rank.
        messages, message_bytes: sent per step within one pipeline.
        note: how schedule `auto` chose the plan; None for other schedules.
    """

    plan: Plan
    layout: StageLayout
    costs: CostModel
    timeline: Timeline
    bubble_formula: float | None
    memory: tuple[RankMemory, ...]
    messages: int
    message_bytes: int
    note: str | None = None

    @property
    def chunks(self) -> int:
        return self.plan.num_stages // self.plan.num_ranks

    @property
    def peak(self) -> int:
        """Memory in bytes of the rank that needs most; of those on GPUs, if there are some."""
        on_gpus = [rank.total for rank in self.memory if rank.device == "cuda"]
        return max(on_gpus or [rank.total for rank in self.memory])

    def fits(self, limit: int | None) -> bool | None:
        """Return whether each rank needs at most `limit` bytes; None without a limit."""
        return None if limit is None else self.peak <= limit


def predict(
    model: MetaModel,
    plan: Plan,
    rates: Rates,
    bounds: Bounds | None = None,
    *,
    weight_queue_limit: bool = True,
) -> Prediction:
    """Simulate `plan` (with or without messages) with the costs of its stages.

    Args:
        bounds: of the stages; None: those of pipeline.partition.
        weight_queue_limit: keep pipeline.weight_queue_limit.
    """
    compute = plan.compute_only()
    bounds = bounds or model.bounds_of(compute.without_vocabulary())
    compute = model.with_passes(compute, bounds)
    if weight_queue_limit:
        compute = model.limit_weight_queue(compute, bounds)
    layout = model.layout(compute, bounds)
    lowered = lower(compute)
    costs = rates.cost_model(layout, plan.num_ranks)
    timeline = simulate(compute, costs)
    sent = list(_sent_bytes(lowered, layout))
    return Prediction(
        plan=lowered,
        layout=layout,
        costs=costs,
        timeline=timeline,
        bubble_formula=_bubble_by_formula(compute, costs.message, timeline),
        memory=tuple(
            RankMemory(
                layout.footprints[rank],
                peak_memory(lowered, rank, layout.costs, model.devices[rank], layout.vocabulary),
                layout.batch_bytes(rank, lowered.num_microbatches),
                model.devices[rank],
            )
            for rank in range(plan.num_ranks)
        ),
        messages=len(sent),
        message_bytes=sum(sent),
    )


def _sent_bytes(lowered: Plan, layout: StageLayout) -> Iterator[int]:
    """Yield the bytes of each message of a step."""
    for step in lowered.steps():
        if step.kind is Kind.SEND_ACTIVATION:
            yield layout.costs[step.stage].message
        elif step.kind is Kind.SEND_GRADIENT:
            yield layout.costs[step.stage].gradient_out
        elif step.kind in TRANSFER_OF_SEND and layout.vocabulary:
            transfer = TRANSFER_OF_SEND[step.kind]
            for _ in vocabulary_channels(lowered, transfer, step):
                yield layout.vocabulary[0].message_bytes[transfer.name]


def _bubble_by_formula(plan: Plan, message: float, timeline: Timeline) -> float | None:
    """Return the bubble by the formula of the schedule, from the mean times of a rank."""
    family = SCHEDULES.get(plan.name)
    if family is None or plan.has_vocabulary:
        return None
    work = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), 0.0)
    for rank in range(plan.num_ranks):
        for step, start, end in timeline.steps(rank):
            kind = Kind.BACKWARD_INPUT if step.kind is Kind.BACKWARD else step.kind
            work[kind] += end - start
    forward, inputs, weights = (w / plan.num_ranks / plan.num_microbatches for w in work.values())
    sizes = Sizes(plan.num_ranks, plan.num_microbatches, plan.num_stages // plan.num_ranks)
    return family.bubble(sizes, RankCosts(forward, inputs, weights, message))

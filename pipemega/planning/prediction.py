"""Predicts one schedule: time, memory of each rank, messages.

Speed of devices and links: converts FLOPs and bytes to time.

Measured times of layers, from the measured times of stages.

FLOPs of a model, counted by running it unsharded on the meta device.

What a cut of the model costs, for logs and reports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from pipemega.layer_costs.stage_costs import stage_times
from pipemega.layer_costs.tensor_meter import DeviceType
from pipemega.monitor import peak_tflops
from pipemega.pipeline.plan.channels import channels_of
from pipemega.pipeline.plan.instructions import TRANSFER_OF_SEND, Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.partition import Bounds, LayerCosts
from pipemega.pipeline.plan.simulate import CostModel, Timeline, simulate
from pipemega.pipeline.schedules import SCHEDULES, RankCosts, Sizes
from pipemega.planning.memory import Footprint
from pipemega.planning.memory_timeline import PeakMemory, peak_memory
from pipemega.planning.meta_model import MetaModel, StageLayout
from pipemega.printing import percent

# Seconds from one kernel to the next if the kernels are short: torch's dispatcher launches them one
# by one. It is why small micro-batches are slow.
LAUNCH_SECONDS: Final = 5e-6
# Share of the peak FLOP/s that is assumed if only the device is known.
ASSUMED_SHARE: Final = 0.4


@dataclass(frozen=True)
class Rates:
    """Known speeds.

    Args:
        costs: seconds of F, I and W of one rank and of a message; the stages of a rank share them
            equally. None: use `tflops`.
        tflops: TFLOP/s that a device achieves, the mean over forward and backward of the model;
            None: times are relative to a mean forward.
        link: GB/s between neighbouring pipeline ranks; None: messages take no time.
        assumed: what `tflops` is assumed from; empty if the caller knows it.
        launch: seconds to launch a kernel; forward and backward take at least this for each kernel.
        layers: measured costs of the layers; their times replace the others.
    """

    costs: RankCosts | None = None
    tflops: float | None = None
    link: float | None = None
    assumed: str = ""
    launch: float = 0.0
    layers: LayerCosts | None = None

    @classmethod
    def of(
        cls,
        costs: RankCosts | None,
        tflops: float | None,
        link: float | None,
        device: str | None = None,
    ) -> "Rates":
        """Return the given rates; without any, those assumed for a known device ("H100-80GB")."""
        assumed, peak = "", peak_tflops(device.replace("-", " ")) if device else None
        if costs is None and tflops is None and peak is not None:
            tflops = ASSUMED_SHARE * peak
            share = percent(ASSUMED_SHARE, 0)
            assumed = f"{share} of the bf16 peak of {device}; --tflops sets another rate"
        return cls(costs, tflops, link, assumed, LAUNCH_SECONDS)

    @property
    def known(self) -> bool:
        """Whether times are in seconds."""
        return self.layers is not None or self.costs is not None or self.tflops is not None

    def cost_model(self, layout: StageLayout, ranks: int) -> CostModel:
        """Return times and bytes of each stage of `layout` on `ranks` pipeline ranks."""
        unit = self._unit(layout, ranks)
        counted = stage_times(layout.costs, unit, fills_waits=layout.fills_waits)
        if layout.vocabulary:
            counted = replace(counted, vocabulary=layout.vocabulary[0].times(unit))
        if self.layers is not None:
            times = self.layers.cost_model(layout.bounds)
            return _with_memory(times, counted)
        if self.costs is not None:
            times = CostModel.from_rank_costs(layout.rank_of_stage, *self.costs)
            return _with_memory(times, counted)
        message = max(stage.message for stage in layout.costs)
        seconds = message / (self.link * 1e9) if self.link and self.tflops else 0.0
        return replace(counted, message=seconds)

    def _unit(self, layout: StageLayout, ranks: int) -> float:
        """Return the seconds of the fixed table that are one unit of time.

        All times have the same ratio to the times of the table, by which models are cut: the
        fastest cut is the same at every rate.
        """
        totals = layout.totals
        if not self.tflops:
            # The mean forward of a rank.
            return totals.forward / ranks or 1.0
        seconds = max(totals.flops / (self.tflops * 1e12), totals.kernels * self.launch)
        return totals.seconds / seconds if totals.seconds and seconds else 1.0


def _with_memory(times: CostModel, counted: CostModel) -> CostModel:
    """Return given times with the memory of `counted`, and its passes in the same unit."""
    given, known = (
        sum(map(sum, (c.forward, c.backward_input, c.backward_weight))) for c in (times, counted)
    )
    passes = counted.vocabulary.scaled(given / known if known else 1.0)
    return replace(times, activation=counted.activation, kept=counted.kept, vocabulary=passes)


@dataclass(frozen=True)
class RankMemory:
    """Peak memory in bytes of one pipeline rank; its data and tensor peers need the same.

    Args:
        footprint: memory that does not depend on the schedule.
        schedule_peak: peak of the memory that depends on the schedule.
        batch: inputs and labels of a whole step.
        device: the device of the rank.
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
    def parts(self) -> dict[str, int]:
        """Bytes by name, at the peak."""
        step = {"activations": self.activations, "buffers": self.buffers}
        return {**self.footprint.parts, **step}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted step of one schedule.

    Args:
        plan: the lowered plan.
        layout: the stages and their costs.
        costs: the costs of the stages; memory in bytes, time in seconds or in mean forwards of a
            rank.
        timeline: the simulated step.
        bubble_formula: bubble by the formula of the schedule for equal stages; None without
            formula.
        memory: the memory of each pipeline rank.
        messages, message_bytes: number of messages and their bytes, per step within one pipeline.
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

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank with that memory."""
        return [rank.total for rank in self.memory].index(self.peak)

    @property
    def exchanged(self) -> tuple[int, ...]:
        """For each pipeline rank, the bytes of tokens that it sends to other ranks of experts."""
        sent = [0] * self.plan.num_ranks
        for stage, rank in zip(self.layout.costs, self.layout.rank_of_stage, strict=True):
            sent[rank] += stage.exchanged * self.plan.num_microbatches
        return tuple(sent)

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
        bounds: the bounds of the stages; None: the bounds by pipeline.partition.
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
                peak_memory(
                    lowered,
                    rank,
                    layout.costs,
                    model.devices[rank],
                    layout.vocabulary,
                    has_graphs=model.has_graphs,
                ),
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
            for _ in channels_of(lowered, transfer, step):
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


# Standard deviations: of the measured time of a stage, as a part of the mean of the stages; and of
# the ratio of measured to counted time of a kind of layer, as a part of the ratio of the model.
_NOISE, _SPREAD = 0.02, 0.2
_LEAST_RATIO = 0.1


def measured_layers(
    counted: LayerCosts, bounds: Sequence[int], costs: CostModel, *, split: bool
) -> LayerCosts:
    """Return the costs of layers with the times of measured stages.

    The time of each stage is divided among its layers in proportion to their likely times: layers
    with equal counted times take about as long in all stages, so stages of blocks alone show how
    much of the last stage is the head.

    Args:
        counted: the costs of the layers by the fixed table of rates; `instruction`, but at most a
            tenth of the mean F, is taken off the measured times.
        bounds: the bounds of the measured stages.
        costs: the costs of the measured stages.
        split: I and W were measured; otherwise the counted times divide the time of B.
    """
    counts = zip(counted.forward, counted.backward_input, counted.backward_weight, strict=True)
    numbers: dict[tuple[float, ...], int] = {}
    kinds = [numbers.setdefault(count, len(numbers)) for count in counts]

    def by_layer(times: Sequence[float], counted: Sequence[float]) -> tuple[float, ...]:
        times = [max(0.0, time - instruction) for time in times]
        likely = _likely_times(times, counted, kinds, bounds)
        return tuple(
            time * share
            for time, (start, stop) in zip(times, pairwise(bounds), strict=True)
            for share in _shares(likely[start:stop])
        )

    inputs, weights = list(costs.backward_input), list(costs.backward_weight)
    if not split:
        for number, (start, stop) in enumerate(pairwise(bounds)):
            i, w = sum(counted.backward_input[start:stop]), sum(counted.backward_weight[start:stop])
            share = i / (i + w) if i + w else 0.5
            inputs[number] = share * costs.whole_backward[number]
            weights[number] = (1 - share) * costs.whole_backward[number]
    mean = sum(costs.forward) / len(costs.forward)
    instruction = min(counted.instruction, 0.1 * mean)
    return replace(
        counted,
        forward=by_layer(costs.forward, counted.forward),
        backward_input=by_layer(inputs, counted.backward_input),
        backward_weight=by_layer(weights, counted.backward_weight),
        backward=by_layer(costs.whole_backward, counted.backward),
        message=costs.message,
        instruction=instruction,
    )


def _likely_times(
    times: Sequence[float], counted: Sequence[float], kinds: Sequence[int], bounds: Sequence[int]
) -> Sequence[float]:
    """Return the most likely times of the layers, if equal kinds have equal times."""
    if not sum(times) or not sum(counted):
        return counted
    ratio, mean = sum(times) / sum(counted), sum(times) / len(times)
    work = np.zeros((len(times), max(kinds) + 1))  # of each kind in each stage
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        np.add.at(work[stage], kinds[start:stop], counted[start:stop])
    # By their work, so that kinds which only occur together keep the ratio of their counted times.
    weights = np.sqrt(work.sum(0) / work.sum() * work.shape[1]) / _SPREAD
    equations = [work * ratio / mean / _NOISE, np.diag(weights)]
    values = [np.array(times) / mean / _NOISE, weights]
    ratios, *_ = np.linalg.lstsq(np.concatenate(equations), np.concatenate(values))
    ratios = ratios.clip(_LEAST_RATIO)
    return [count * float(ratios[kind]) for count, kind in zip(counted, kinds, strict=True)]


def _shares(times: Sequence[float]) -> list[float]:
    total = sum(times)
    return [time / total if total else 1 / len(times) for time in times]


@dataclass(frozen=True)
class CutReport:
    """What the cut of a plan costs.

    Args:
        bounds: the bounds of the stages.
        work: share of the time of all instructions, for each pipeline rank.
        slower: by which fraction the step takes longer than with `best`; 0: no better cut was
            found.
        best: the bounds of the fastest cut that was found for this plan.
        best_peak: memory in bytes of the fullest rank with it.
    """

    bounds: Bounds
    work: tuple[float, ...]
    slower: float
    best: Bounds
    best_peak: int

    @property
    def imbalance(self) -> float:
        """The work of the slowest rank over the mean, less 1."""
        return max(self.work) * len(self.work) - 1


def report_cut(model: MetaModel, prediction: Prediction, rates: Rates) -> CutReport | None:
    """Return what the cut of `prediction` costs; None with one stage, or if its times are given."""
    plan, layout = prediction.plan.compute_only(), prediction.layout
    if plan.num_stages == 1 or rates.costs is not None:
        return None
    layers = rates.layers or model.layer_costs
    found = model.cut_within(plan, layers, None, [layout.bounds])
    best = prediction
    if found.bounds != layout.bounds:
        other = predict(model, plan, rates, found.bounds)
        best = min(prediction, other, key=lambda p: p.timeline.makespan)
    timeline = prediction.timeline
    busy = [timeline.busy(rank) for rank in range(plan.num_ranks)]
    return CutReport(
        layout.bounds,
        tuple(time / (sum(busy) or 1.0) for time in busy),
        timeline.makespan / best.timeline.makespan - 1 if best.timeline.makespan else 0.0,
        best.layout.bounds,
        best.peak,
    )

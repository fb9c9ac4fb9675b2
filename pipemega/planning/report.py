"""From a config to everything that can be said of it before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipemega.assemble_step import precision_of
from pipemega.config import Batch, Config
from pipemega.config.pipeline import PipelineSection
from pipemega.errors import ConfigError, PipelineError, ScheduleError
from pipemega.pipeline.build import runs_of
from pipemega.pipeline.choice import best_plan, first_plan, plan_is_open, training_plan
from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.schedules import SCHEDULES, build_plan, find_schedule
from pipemega.pipeline.synthesis import Layout
from pipemega.planning.kernels import DeviceType
from pipemega.planning.layout import Drawing
from pipemega.planning.outcome import Outcome, outcome_of
from pipemega.planning.rates import Rates
from pipemega.planning.subject import gpt_and_sample, model_and_sample
from pipemega.topology import Topology

_AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """What is asked.

    Args:
        config: of the run.
        world: number of ranks; None: the fewest that the config can run on.
        model: MODULE:FUNCTION of a user's model; None: the GPT of the config.
        limit: bytes of a device; None: any number fits.
        rates: what is known of speed.
        compare: names of schedules to set beside the config's; "all" for every one.
    """

    config: Config
    world: int | None = None
    model: str | None = None
    limit: int | None = None
    rates: Rates = field(default_factory=Rates)
    compare: tuple[str, ...] = ()

    @property
    def device(self) -> DeviceType:
        """Whose kernels are assumed: CUDA's, unless the config asks for a CPU."""
        return "cpu" if self.config.mesh.device == "cpu" else "cuda"

    @property
    def topology(self) -> Topology:
        mesh = self.config.mesh
        if self.world is None:
            return Topology(mesh.pipeline, self.config.smallest_data_size, mesh.tensor)
        return Topology.fit(self.world, mesh.pipeline, mesh.tensor, mesh.data)


@dataclass(frozen=True)
class StageLine:
    """One stage, as people look at it.

    Args:
        layers: names, equal neighbours folded.
        parameters: elements of the unsplit layers; of tied ones in each place.
        flops: of forward and backward of one micro-batch, on each of its ranks.
        held: bytes from F to B.
        kept: bytes from I to W; None where backward is whole.
    """

    number: int
    rank: int
    first_layer: int
    last_layer: int
    layers: str
    parameters: int
    flops: float
    held: int
    kept: int | None


@dataclass(frozen=True, eq=False)
class Report:
    """What a config will do.

    Args:
        precision: in words.
        parameters: of the unsplit model, each once.
        stages: of the config's own schedule.
        outcome: of the config's own schedule.
        others: schedules asked for beside it that can take the sizes, the quickest first, its own
            among them; empty without a comparison.
        refused: name of a schedule -> why it cannot.
        notes: what was assumed.
    """

    request: Request
    topology: Topology
    batch: Batch
    precision: str
    parameters: int
    num_layers: int
    stages: tuple[StageLine, ...]
    outcome: Outcome
    others: tuple[Outcome, ...]
    refused: dict[str, str]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        return self.outcome.fits(self.request.limit)

    @property
    def tokens(self) -> int | None:
        """In a step, over all data ranks; None where the model is not the GPT of the config."""
        model = self.request.config.model
        if self.request.model is not None or model is None:
            return None
        return self.batch.train_batch_size * model.seq_length


def draw_up(request: Request) -> Report:
    """The report.

    Raises:
        ConfigError, MeshError, ScheduleError: the config cannot be run, or the model not on paper.
    """
    config, topology = request.config, request.topology
    batch = config.batch(topology.data)
    config.check_zero(topology.data)
    drawing = _drawing(request, topology, batch)
    section, size, count = config.pipeline, topology.pipeline, batch.num_microbatches
    try:
        if plan_is_open(section, size):
            outcome = _auto(request, drawing, section, count)
        else:
            own = training_plan(section, size, count, len(drawing.net))
            outcome = outcome_of(drawing, own, request.rates)
    except PipelineError as error:
        raise ConfigError(
            f"{error}; a plan runs each layer on torch's meta device, where tensors have shapes "
            f"and no numbers: a layer that reads a number there cannot be planned"
        ) from error
    others, refused = _compare(request, drawing, outcome, count)
    counts = drawing.net.count_parameters()
    again = sum(counts[p] for places in drawing.net.tied().values() for p in places[1:])
    return Report(
        request=request,
        topology=topology,
        batch=batch,
        precision=_precision(config),
        parameters=sum(counts) - again,
        num_layers=len(counts),
        stages=tuple(_stages(drawing, outcome, counts)),
        outcome=outcome,
        others=others,
        refused=refused,
        notes=tuple(_notes(request, outcome)),
    )


def _drawing(request: Request, topology: Topology, batch: Batch) -> Drawing:
    micro = batch.micro_batch_size
    if request.model is None:
        net, sample = gpt_and_sample(request.config, micro)
    else:
        net, sample = model_and_sample(request.model, micro)
    try:
        return Drawing(request.config, net, sample, topology, request.device)
    except NotImplementedError as error:
        raise ConfigError(f"the model cannot be built on the meta device: {error}") from error


def _compare(
    request: Request, drawing: Drawing, own: Outcome, num_microbatches: int
) -> tuple[tuple[Outcome, ...], dict[str, str]]:
    """The other schedules asked for, and why some cannot be."""
    if not request.compare:
        return (), {}
    names = [*SCHEDULES, _AUTO] if "all" in request.compare else map(_name, request.compare)
    outcomes, refused = [own], {}
    for name in dict.fromkeys(names):
        if name == own.plan.name:
            continue
        try:
            outcomes.append(_under(request, drawing, name, own, num_microbatches))
        except (ConfigError, ScheduleError, PipelineError) as error:
            refused[name] = str(error)
    return tuple(sorted(outcomes, key=lambda o: (o.timeline.makespan, o.peak))), refused


def _under(
    request: Request, drawing: Drawing, name: str, own: Outcome, num_microbatches: int
) -> Outcome:
    """What schedule `name` would do in place of the config's own."""
    if name == _AUTO:
        return _auto(request, drawing, PipelineSection(schedule="auto"), num_microbatches)
    chunks = own.chunks if find_schedule(name).chunks is None and own.chunks > 1 else None
    plan = build_plan(name, own.plan.num_ranks, num_microbatches, chunks)
    return outcome_of(drawing, plan, request.rates)


def _auto(
    request: Request, drawing: Drawing, section: PipelineSection, num_microbatches: int
) -> Outcome:
    """What schedule "auto" comes to, if stages cost on the ranks what they cost on paper."""
    size = request.topology.pipeline
    plain = first_plan(section, size, num_microbatches, len(drawing.net))
    known = outcome_of(drawing, plain, request.rates)
    if not plan_is_open(section, size):
        return known
    layout = Layout(plain.rank_of_stage, known.costs)
    best = best_plan([layout], num_microbatches, section.memory_limit)
    return outcome_of(drawing, best.plan, request.rates)


def _name(name: str) -> str:
    return name if name == _AUTO else find_schedule(name).name


def _stages(drawing: Drawing, outcome: Outcome, counts: Sequence[int]) -> list[StageLine]:
    layout, names = outcome.layout, drawing.net.layer_names
    halves = any(step.kind is Kind.BACKWARD_INPUT for step in outcome.plan.steps())
    lines = []
    for number, costs in enumerate(layout.costs):
        start, stop = layout.bounds[number : number + 2]
        lines.append(
            StageLine(
                number=number,
                rank=layout.rank_of_stage[number],
                first_layer=start,
                last_layer=stop - 1,
                layers=", ".join(runs_of(names[start:stop])),
                parameters=sum(counts[start:stop]),
                flops=sum(costs.flops),
                held=costs.held,
                kept=costs.kept if halves else None,
            )
        )
    return lines


def _precision(config: Config) -> str:
    precision = precision_of(config)
    if not precision.master:
        return "fp32"
    name = "bf16" if config.bf16.enabled else "fp16"
    return f"{name}, fp32 masters"


def _notes(request: Request, outcome: Outcome) -> list[str]:
    notes = list(request.config.zero_notes(request.topology.data))
    partition = request.config.pipeline.partition
    if partition == "profile":
        notes.append(
            "pipeline.partition 'profile' measures the layers when the run starts; cut by "
            "parameters here"
        )
    if isinstance(partition, tuple) and request.compare:
        notes.append(
            "schedules of another number of stages than pipeline.partition has bounds for are cut "
            "by parameters"
        )
    if request.config.optimizer is None:
        notes.append("the config has no section 'optimizer': no optimizer state is counted")
    elif not all(rank.footprint.exact for rank in outcome.memory):
        notes.append(
            f"the state of {request.config.optimizer.type} is estimated: its step asks for numbers"
        )
    if request.rates.link and not request.rates.tflops and request.rates.costs is None:
        notes.append("--link counts only where times are seconds: give --tflops as well")
    return notes


def as_json(report: Report, warnings: Sequence[str], advice: Sequence[str]) -> dict[str, Any]:
    """The report as JSON values: sizes in bytes, times in seconds where they are known."""
    topology, request = report.topology, report.request
    return {
        "mesh": {
            "world": topology.world_size,
            "pipeline": topology.pipeline,
            "data": topology.data,
            "tensor": topology.tensor,
            "ranks": [
                [topology.rank(p, 0, 0), topology.rank(p, topology.data - 1, topology.tensor - 1)]
                for p in range(topology.pipeline)
            ],
        },
        "batch": {
            "train_batch_size": report.batch.train_batch_size,
            "micro_batch_size": report.batch.micro_batch_size,
            "num_microbatches": report.batch.num_microbatches,
            "tokens": report.tokens,
        },
        "model": {
            "parameters": report.parameters,
            "layers": report.num_layers,
            "precision": report.precision,
        },
        "stages": [vars(stage) for stage in report.stages],
        "device": {"type": request.device, "memory": request.limit},
        "time_unit": "seconds" if request.rates.known else "mean forward of a rank",
        "outcome": _outcome(report.outcome, report),
        "compare": [_outcome(other, report) for other in report.others],
        "refused": report.refused,
        "fits": report.fits,
        "warnings": list(warnings),
        "advice": list(advice),
        "notes": list(report.notes),
    }


def _outcome(outcome: Outcome, report: Report) -> dict[str, Any]:
    makespan = outcome.timeline.makespan
    tokens = report.tokens if report.request.rates.known else None
    return {
        "schedule": outcome.plan.name,
        "chunks": outcome.chunks,
        "makespan": makespan,
        "span": outcome.timeline.span,
        "bubble": outcome.timeline.bubble,
        "bubble_by_formula": outcome.bubble_formula,
        "tokens_per_second": tokens / makespan if tokens and makespan else None,
        "messages": outcome.messages,
        "message_bytes": outcome.message_bytes,
        "fits": outcome.fits(report.request.limit),
        "peak_bytes": outcome.peak,
        "memory": [
            {
                "rank": rank,
                "parameters": memory.footprint.parameters,
                "weights": memory.footprint.weights,
                "gradients": memory.footprint.gradients,
                "masters": memory.footprint.masters,
                "optimizer": memory.footprint.optimizer,
                "host": memory.footprint.host,
                "activations": memory.activations,
                "buffers": memory.buffers,
                "total": memory.total,
                "in_flight": memory.held.in_flight,
            }
            for rank, memory in enumerate(outcome.memory)
        ],
    }

"""Estimates a run from its config: builds the model on the meta device and predicts its step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipemega.config import Batch, Config
from pipemega.config.batch import BatchSizes
from pipemega.config.sections.pipeline_sections import PipelineSection
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError, PipelineError, ScheduleError
from pipemega.layer_costs.tensor_meter import DeviceType
from pipemega.lora.adapters import add_lora
from pipemega.lora.peft_files import section_of
from pipemega.optimizer.build_step import precision_of
from pipemega.pipeline import plan_selection
from pipemega.pipeline.connections import nccl_communicators
from pipemega.pipeline.model.stages import fold_equal_names, with_stage_devices
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.schedules import AUTO, SCHEDULES, build_plan, find_schedule
from pipemega.planning.meta_model import (
    MetaModel,
    model_and_sample,
    user_model_and_sample,
    vocabulary_of,
)
from pipemega.planning.prediction import CutReport, Prediction, Rates, predict, report_cut
from pipemega.planning.run_checks import planned_order, topology_of
from pipemega.planning.schedule_choice import ScheduleChooser, cut_wins, with_cut_vocabulary


@dataclass(frozen=True)
class Request:
    """What to estimate.

    Args:
        config: the config of the run.
        world: number of ranks; None: the smallest number that the config can run on.
        model: MODULE:FUNCTION of a user's model; None: the model of the config.
        limit: memory of a device in bytes; None: unknown.
        rates: speed of devices and links, if known.
        compare: names of schedules to compare with the configured one; "all": every schedule.
        quick: schedule `auto` chooses among named schedules only, without a search.
        device_name: contains the name of the GPU for which the MFU is estimated.
    """

    config: Config
    world: int | None = None
    model: str | None = None
    limit: int | None = None
    rates: Rates = field(default_factory=Rates)
    compare: tuple[str, ...] = ()
    quick: bool = False
    device_name: str = "H100"

    @property
    def device(self) -> DeviceType:
        """The device whose kernels are assumed: CUDA, unless all ranks are on CPUs."""
        mesh = self.config.mesh
        on_gpus = any(mesh.device_of(rank) == "cuda" for rank in range(mesh.pipeline))
        return "cuda" if on_gpus else "cpu"

    @property
    def topology(self) -> Topology:
        return topology_of(self.config, self.world)

    @property
    def num_microbatches(self) -> int:
        return self.config.batch(self.topology.data).num_microbatches


@dataclass(frozen=True)
class StageSummary:
    """One stage, for tables.

    Args:
        layers: names of its layers; equal neighbours are folded.
        parameters: elements of the unsharded layers; tied parameters count in each stage.
        flops: FLOPs of forward and backward of one micro-batch, on each rank of the stage.
        time: time of forward and backward of one micro-batch, as a share of the sum over stages.
        held: bytes from F to B.
        kept: bytes from I to W; None if the schedule has full backwards.
    """

    number: int
    rank: int
    first_layer: int
    last_layer: int
    layers: str
    parameters: int
    flops: float
    time: float
    held: int
    kept: int | None


@dataclass(frozen=True, eq=False)
class Report:
    """The estimate for a config.

    Args:
        precision: as text.
        parameters: number of parameters of the unsharded model; tied parameters count once.
        stages: the stages of the schedule of the config.
        prediction: the prediction for the schedule of the config.
        compared: predictions for this and the requested other schedules, fastest first; empty if no
            comparison was requested.
        refused: name of a requested schedule -> why it cannot run.
        notes: assumptions of the estimate.
        cut: what the cut costs; None with one stage, or if the times of ranks are given.
    """

    request: Request
    topology: Topology
    batch: Batch
    precision: str
    parameters: int
    num_layers: int
    stages: tuple[StageSummary, ...]
    prediction: Prediction
    compared: tuple[Prediction, ...]
    refused: dict[str, str]
    notes: tuple[str, ...]
    cut: CutReport | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the run fits into the memory of the device; None if that is unknown."""
        return self.prediction.fits(self.request.limit)

    @property
    def communicators(self) -> int | None:
        """NCCL communicators of the rank with the most; None without pipeline messages over it."""
        if self.request.device == "cpu" or self.topology.pipeline == 1:
            return None
        return nccl_communicators(self.topology, self.prediction.plan.rank_of_stage)

    @property
    def tokens(self) -> int | None:
        """Tokens per step over all data ranks; None if the model of the config takes none."""
        model = self.request.config.model
        length = model.sample_tokens() if model and self.request.model is None else None
        return None if length is None else self.batch.train_batch_size * length

    @property
    def run_seconds(self) -> float | None:
        """Predicted seconds of all steps; None if their number or the rates are unknown.

        The steps of a ramp-up count by their samples.
        """
        if self.run_steps is None or not self.request.rates.known:
            return None
        full_steps = self._sizes.samples_of(self.run_steps) / self.batch.train_batch_size
        return full_steps * self.prediction.timeline.makespan

    @property
    def run_steps(self) -> int | None:
        """Steps of the whole run; None if the config does not determine them."""
        return self._sizes.run_length(self.request.config.training).steps

    @property
    def run_tokens(self) -> int | None:
        """Tokens of these steps; None if the model takes none."""
        if self.run_steps is None or self.tokens is None:
            return None
        per_sample = self.tokens // self.batch.train_batch_size
        return self._sizes.samples_of(self.run_steps) * per_sample

    @property
    def _sizes(self) -> BatchSizes:
        return self.request.config.batch_sizes(self.topology.data)


def estimate(request: Request) -> Report:
    """Estimate the run.

    Raises:
        ConfigError, MeshError, ScheduleError: the config cannot run, or the model cannot run on the
            meta device.
    """
    topology = request.topology
    batch = request.config.batch(topology.data)
    if request.model is None:
        net, sample = model_and_sample(request.config, topology)
    else:
        net, sample = user_model_and_sample(request.model, batch.micro_batch_size)
    config = with_stage_devices(request.config, net, batch.num_microbatches, request.device)
    request = replace(request, config=config)
    try:
        if config.lora is not None:
            net = add_lora(net, section_of(config.lora))
        model = MetaModel(config, net, sample, topology, request.device)
    except NotImplementedError as error:
        raise ConfigError(f"the model cannot be built on the meta device: {error}") from error
    try:
        model = _with_chosen_vocabulary(request, model)
        prediction = _predict_section(request, model, config.pipeline)
    except PipelineError as error:
        raise ConfigError(
            f"{error}; a plan runs each layer on torch's meta device, where tensors have shapes "
            f"but no values: a layer that reads a value cannot be planned"
        ) from error
    compared, refused = _compare(request, model, prediction)
    counts = model.net.count_parameters()
    return Report(
        request=request,
        topology=topology,
        batch=batch,
        precision=_precision(config),
        parameters=model.whole.num_parameters(),
        num_layers=len(counts),
        stages=tuple(_stages(model, prediction, counts)),
        prediction=prediction,
        compared=compared,
        refused=refused,
        notes=tuple(_notes(request, prediction, compared)),
        # Other cuts might put a layer on another device.
        cut=None
        if request.quick or config.mesh.mixed_devices
        else report_cut(model, prediction, request.rates),
    )


def _with_chosen_vocabulary(request: Request, model: MetaModel) -> MetaModel:
    """Return the model with a cut vocabulary where schedule `auto` chooses it."""
    config = request.config
    cut = with_cut_vocabulary(config, model.whole)
    if cut is None or not plan_selection.plan_is_provisional(config.pipeline, model.num_ranks):
        return model
    wins, _ = cut_wins(model, cut, request.num_microbatches)
    return model.with_config(cut) if wins else model


def _predict_section(request: Request, model: MetaModel, section: PipelineSection) -> Prediction:
    """Predict the schedule of a config section; "auto" uses costs from the meta device."""
    if not plan_selection.plan_is_provisional(section, request.topology.pipeline):
        return predict(model, _named_plan(request, model, section), request.rates)
    chooser = ScheduleChooser(
        model, section, request.num_microbatches, request.rates, quick=request.quick
    )
    return chooser.choose().prediction


def _named_plan(request: Request, model: MetaModel, section: PipelineSection) -> Plan:
    """Return the plan of a section whose schedule needs no measurement."""
    return plan_selection.training_plan(
        section,
        request.topology.pipeline,
        request.num_microbatches,
        len(model.net),
        planned_order(request.config),
        add_passes=model.with_passes,
    )


def _predict_schedule(request: Request, model: MetaModel, name: str, own: Prediction) -> Prediction:
    """Predict schedule `name` in place of the schedule of the config."""
    if name == AUTO:
        limit = request.config.pipeline.weight_queue_limit
        section = PipelineSection(schedule="auto", weight_queue_limit=limit)
        return _predict_section(request, model, section)
    chunks = own.chunks if find_schedule(name).chunks is None and own.chunks > 1 else None
    plan = build_plan(name, own.plan.num_ranks, request.num_microbatches, chunks)
    return predict(model, plan, request.rates)


def _without_weight_limit(
    request: Request, model: MetaModel, own: Prediction
) -> Iterator[Prediction]:
    """Yield the prediction without pipeline.weight_queue_limit, if it changes the plan."""
    section = request.config.pipeline
    if section.weight_queue_limit is None or section.schedule == AUTO:
        return
    plan = _named_plan(request, model, section)
    free = predict(model, plan, request.rates, weight_queue_limit=False)
    if free.plan != own.plan:
        yield replace(free, plan=replace(free.plan, name=f"{plan.name}, any queue"))


def _compare(
    request: Request, model: MetaModel, own: Prediction
) -> tuple[tuple[Prediction, ...], dict[str, str]]:
    """Return predictions for all requested schedules, and the reasons why some cannot run."""
    if not request.compare:
        return (), {}
    requested = [*SCHEDULES, AUTO] if "all" in request.compare else request.compare
    names = [name if name == AUTO else find_schedule(name).name for name in requested]
    predictions, refused = [own, *_without_weight_limit(request, model, own)], {}
    for name in dict.fromkeys(names):
        if name == own.plan.name:
            continue
        try:
            predictions.append(_predict_schedule(request, model, name, own))
        except (ConfigError, ScheduleError, PipelineError) as error:
            refused[name] = str(error)
    return tuple(sorted(predictions, key=lambda p: (p.timeline.makespan, p.peak))), refused


def _stages(model: MetaModel, prediction: Prediction, counts: Sequence[int]) -> list[StageSummary]:
    layout, names = prediction.layout, model.net.layer_names
    per_kind = zip(prediction.costs.forward, prediction.costs.whole_backward, strict=True)
    times, stages = [*map(sum, per_kind)], []
    for number, costs in enumerate(layout.costs):
        start, stop = layout.bounds[number : number + 2]
        stages.append(
            StageSummary(
                number=number,
                rank=layout.rank_of_stage[number],
                first_layer=start,
                last_layer=stop - 1,
                layers=", ".join(fold_equal_names(names[start:stop])),
                parameters=sum(counts[start:stop]),
                flops=sum(costs.flops),
                time=times[number] / (sum(times) or 1.0),
                held=costs.held,
                kept=costs.kept if prediction.plan.splits_backward else None,
            )
        )
    return stages


def _precision(config: Config) -> str:
    if not precision_of(config).master:
        return "fp32"
    name = "bf16" if config.bf16.enabled else "fp16"
    if config.fp8.enabled:
        name += f" with fp8 linears ({config.fp8.recipe})"
    return f"{name}, fp32 masters"


def _notes(request: Request, prediction: Prediction, compared: Sequence[Prediction]) -> list[str]:
    notes = list(request.config.zero_notes(request.topology.data))
    if prediction.plan.has_vocabulary and request.config.pipeline.vocabulary == "auto":
        notes.append(
            "pipeline.vocabulary 'auto' cuts the embedding and the head over the pipeline ranks; "
            "outputs (logits) need 'stage'"
        )
    notes += dict.fromkeys(p.note for p in (prediction, *compared) if p.note is not None)
    partition = request.config.pipeline.partition
    if partition == "profile":
        notes.append(
            "pipeline.partition 'profile' measures the layers when the run starts; this plan "
            "splits the model by parameters"
        )
    if isinstance(partition, tuple) and request.compare:
        notes.append(
            "schedules whose number of stages does not match pipeline.partition split the model by "
            "parameters"
        )
    if request.config.optimizer is None:
        notes.append(
            "the config has no section 'optimizer': no optimizer state is counted (an optimizer "
            "that initialize() gets is not known here)"
        )
    elif not all(rank.footprint.exact for rank in prediction.memory):
        notes.append(
            f"the optimizer state of {request.config.optimizer.type} is an estimate: its step "
            f"reads tensor values, which the meta device does not have"
        )
    if request.model is None:
        vocabulary = vocabulary_of(request.config)
        if not vocabulary.is_certain:
            notes.append(
                f"a vocabulary of {vocabulary.size:,} tokens is assumed: {vocabulary.origin}; "
                "--set model.vocab_size sets another"
            )
    if request.config.fp8.enabled:
        notes.append(
            "a product in fp8 is taken for twice as fast as one in bf16, and --tflops for the "
            "speed in bf16; fp8 was not measured on a GPU"
        )
    if request.rates.assumed:
        notes.append(f"times assume {request.rates.tflops:.4g} TFLOP/s, {request.rates.assumed}")
    if request.rates.link and not request.rates.known:
        notes.append("--link has no effect without --tflops: times are not in seconds")
    return notes

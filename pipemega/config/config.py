"""The whole config: its sections, and the rules between them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import SerializeAsAny
from pydantic_core import to_jsonable_python

from pipemega.config.activation_checkpointing import (
    ActivationCheckpointingSection,
    errors_of_recompute,
    errors_of_stored_activations,
)
from pipemega.config.batch_equation import Batch, BatchKeys, solve
from pipemega.config.batch_sizes import BatchSizes, rampup_errors, samples_error
from pipemega.config.checkpoint import CheckpointSection, errors_of_folder
from pipemega.config.comms_logger import CommsLoggerSection
from pipemega.config.compile import CompileSection
from pipemega.config.config_warnings import notes_of, warnings_of
from pipemega.config.data import DataSection, errors_of_padding
from pipemega.config.gradients import GradientKeys, with_communication_dtype
from pipemega.config.key_kinds import (
    Rule,
    Section,
    SectionClass,
    honoured,
    key_info,
    own,
    section,
)
from pipemega.config.lora import LoraSection
from pipemega.config.mesh import MeshSection
from pipemega.config.mixed_devices import errors_of_mixed_devices
from pipemega.config.model import GPTSection
from pipemega.config.model_hf import HFSection, errors_of_positions
from pipemega.config.model_registry import ModelSection, section_of_type
from pipemega.config.model_resnet import ResNetSection
from pipemega.config.model_transformer import TransformerSection
from pipemega.config.model_vit import ViTSection
from pipemega.config.monitors import (
    CsvSection,
    LoggingSection,
    MonitorSection,
    TensorboardSection,
    TimersSection,
    WandbSection,
)
from pipemega.config.optimizer import OptimizerSection
from pipemega.config.pipeline import PipelineSection, bounds_errors
from pipemega.config.precision import Bf16Section, DataTypesSection, Fp16Section
from pipemega.config.profilers import FlopsProfilerSection
from pipemega.config.scheduler import SchedulerSection, count_samples, errors_of_length
from pipemega.config.source import KeyPath, all_problems
from pipemega.config.training import TrainingSection
from pipemega.config.unsupported import UnsupportedKeys
from pipemega.config.user_values import UserValues
from pipemega.config.value_types import Count, Name, Whole
from pipemega.config.zero import ParameterBytes, ZeroOnMesh, ZeroSection

# The types of `model` that pipemega has itself.
MODEL_TYPES = (GPTSection, HFSection, ResNetSection, ViTSection)


class RunKeys(Section):
    """Seed and logging of the run."""

    seed: Whole = own(1234, "Seed of initial weights, dropout and the order of the data.")
    steps_per_print: Count | None = honoured(10, "Steps between log lines; null: no lines.")
    wall_clock_breakdown: bool = honoured(False, "Log how long the parts of a step take.")
    memory_breakdown: bool = honoured(False, "Log the memory use of the device.")
    dump_state: bool = honoured(False, "Log the resolved config at the start.")


class Config(BatchKeys, RunKeys, GradientKeys, UnsupportedKeys):
    """The config of a run, frozen; values derived from the keys are properties and methods."""

    old_names: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    mesh: MeshSection = section(MeshSection, "Sizes of the mesh axes.", own=True)
    imports: tuple[Name, ...] = own(
        (),
        "Python modules to import before the other keys are read, such as those that register "
        "model types; they may also be in the current folder, or in the folder of the config.",
    )
    user: UserValues = own(
        UserValues(),
        'Keys of your own, of any form: `config.user.lr` or `config.user["lr"]`; checkpoints keep '
        "them.",
    )
    model: SerializeAsAny[ModelSection | None] = own(
        None, "The model, by its `type`; null: you pass your own model."
    )
    lora: LoraSection | None = own(None, "LoRA adapters; null: all parameters are trained.")
    data: DataSection = section(DataSection, "Training data.", own=True)
    pipeline: PipelineSection = section(PipelineSection, "Stages and schedule.")
    training: TrainingSection = section(TrainingSection, "Training loop.", own=True)
    optimizer: OptimizerSection | None = honoured(None, "Optimizer.")
    scheduler: SchedulerSection | None = honoured(None, "Learning-rate schedule; null: constant.")
    fp16: Fp16Section = section(Fp16Section, "fp16 training.")
    bf16: Bf16Section = section(Bf16Section, "bf16 training; old name: `bfloat16`.")
    data_types: DataTypesSection = section(DataTypesSection, "Other dtypes.")
    zero_optimization: ZeroSection = section(ZeroSection, "ZeRO stage 1 and optimizer offload.")
    zero_allow_untested_optimizer: bool = honoured(
        False,
        "true: do not test whether the optimizer of `initialize(optimizer=...)` works on the mesh. "
        "With ZeRO or mesh.tensor, the update of an element must not depend on other elements; "
        "with mesh.pipeline, the update of a parameter must not depend on other parameters.",
    )
    activation_checkpointing: ActivationCheckpointingSection = section(
        ActivationCheckpointingSection, "Recomputation of activations."
    )
    compile: CompileSection = section(CompileSection, "torch.compile for each layer.")
    checkpoint: CheckpointSection = section(CheckpointSection, "Saving and loading of checkpoints.")
    monitor: MonitorSection = section(MonitorSection, "Metrics that every run records.", own=True)
    logging: LoggingSection = section(LoggingSection, "Messages of the logger.", own=True)
    tensorboard: TensorboardSection = section(TensorboardSection, "TensorBoard.")
    wandb: WandbSection = section(WandbSection, "Weights & Biases.")
    csv_monitor: CsvSection = section(CsvSection, "CSV files.")
    flops_profiler: FlopsProfilerSection = section(
        FlopsProfilerSection, "Table of the costs of modules."
    )
    timers: TimersSection = section(TimersSection, "DeepSpeed's timers.")
    comms_logger: CommsLoggerSection = section(
        CommsLoggerSection, "A table of the collectives and messages of one step."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return count_samples(_mesh_from_stages(with_communication_dtype(raw)))

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        return section_of_type(raw["model"]) if key == "model" else super().section_at(key, raw)

    def batch(self, data_size: int) -> Batch:
        """Solve the batch equation for `data_size` data ranks.

        Raises:
            ConfigError: it has no solution; the message lists the nearest sizes that have one.
        """
        tensor, pipeline = self.mesh.tensor, self.mesh.pipeline
        solution = solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_size,
            tensor * pipeline,
        )
        has_1f1b_bubble = self.pipeline.schedule in ("gpipe", "1f1b")
        return Batch(*solution, data_size, tensor, pipeline, has_1f1b_bubble)

    def batch_sizes(self, data_size: int) -> BatchSizes:
        """Return the size of each step on `data_size` data ranks.

        Raises:
            ConfigError: as `batch`, training.rampup_batch_size does not fit, or
                training.train_samples is less than a step.
        """
        batch, rampup = self.batch(data_size), self.training.rampup_batch_size
        if problems := list(rampup_errors(rampup, batch)):
            raise all_problems(problems)
        sizes = BatchSizes.of(rampup, batch.train_batch_size)
        if problems := list(samples_error(self.training.train_samples, sizes)):
            raise all_problems(problems)
        return sizes

    def zero_refusal(self, data_size: int | None) -> str | None:
        """Return why the ZeRO stage is refused, with the alternative; None if it is supported.

        Args:
            data_size: number of data ranks; None: not known.
        """
        return self._zero_on(data_size).refusal

    def zero_notes(self, data_size: int) -> tuple[str, ...]:
        """Return what ZeRO saves on `data_size` data ranks, as lines for the log."""
        return tuple(self._zero_on(data_size).notes)

    def _zero_on(self, data_size: int | None) -> ZeroOnMesh:
        narrow = self.compute_dtype is not None
        gradient = {"fp32": 4, None: 4}.get(self.data_types.grad_accum_dtype, 2)
        each = ParameterBytes(2 if narrow else 4, gradient, self.optimizer_state_bytes + 4 * narrow)
        mesh = self.mesh
        stage = self.zero_optimization.stage
        return ZeroOnMesh(stage, each, data_size, mesh.pipeline, mesh.tensor)

    @property
    def compute_dtype(self) -> Literal["bfloat16", "float16"] | None:
        """Name of torch's dtype of parameters in forward and backward; None: as they are built."""
        if self.bf16.enabled:
            return "bfloat16"
        return "float16" if self.fp16.enabled else None

    @property
    def optimizer_state_bytes(self) -> int:
        """Bytes of optimizer state per parameter; Adam's without a section `optimizer`."""
        return 8 if self.optimizer is None else self.optimizer.state_bytes

    @property
    def smallest_data_size(self) -> int:
        """The number of data ranks if the config determines it, else the smallest possible."""
        if self.mesh.data != "auto":
            return self.mesh.data
        micro, steps = self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        if self.train_batch_size and micro and steps:
            return max(1, self.train_batch_size // (micro * steps))
        return 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Keys that are ignored or probably a mistake, as lines for the log."""
        return tuple(warnings_of(self))

    @property
    def notes(self) -> tuple[str, ...]:
        """Defaults that differ between training systems, as lines for the log."""
        return tuple(notes_of(self))

    @cached_property
    def auto_keys(self) -> tuple[KeyPath, ...]:
        """The keys that are "auto" in the file, and have their default therefore."""
        return ()

    @cached_property
    def adopted_keys(self) -> tuple[str, ...]:
        """The keys of `user` that are at the top level of the file."""
        return ()

    @cached_property
    def name(self) -> str:
        """Name of the file that the config was loaded from, without its ending; else "run"."""
        return "run"

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config as JSON values: all supported keys, and all that were set."""
        return _resolved(self)

    def given(self) -> dict[str, Any]:
        """Return the keys that were set and have an effect, as JSON values."""
        return _given(self)

    def to_json(self) -> str:
        """Return the resolved config as JSON text; `config.load` makes an equal config from it."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @classmethod
    def rules(cls) -> Iterable[Rule]:
        return _RULES


def _mesh_from_stages(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set `mesh.pipeline` from `pipeline.stages` if only the latter is given."""
    pipeline, mesh = raw.get("pipeline"), raw.get("mesh", {})
    if not isinstance(pipeline, Mapping) or not isinstance(mesh, Mapping) or "pipeline" in mesh:
        return raw
    stages = pipeline.get("stages", "auto")
    # Any other value is an error of `pipeline.stages`.
    is_count = isinstance(stages, int) and not isinstance(stages, bool) and stages > 0
    return {**raw, "mesh": {**mesh, "pipeline": stages}} if is_count else raw


def _one_precision(config: Config) -> Iterator[str]:
    if config.fp16.enabled and config.bf16.enabled:
        yield "fp16.enabled and bf16.enabled are both true: keep one, bf16 if in doubt"


def _model_on_mesh(config: Config) -> Iterator[str]:
    if isinstance(config.model, TransformerSection):
        yield from config.model.mesh_errors(config.mesh)


def _a_layer_for_each_stage(config: Config) -> Iterator[str]:
    model, mesh = config.model, config.mesh
    if not isinstance(model, TransformerSection):
        return
    layers = model.layer_count()
    chunks = config.pipeline.stages_per_rank or 1
    if mesh.pipeline * chunks > layers:
        *others, last = model.other_layers
        stages = f"mesh.pipeline ({mesh.pipeline})"
        if chunks > 1:
            stages += f" * pipeline.chunks ({chunks}) = {mesh.pipeline * chunks}"
        yield (
            f"{stages} is more than the number of layers: "
            f"model.num_layers + {', '.join(others)} and {last} = {model.num_layers} + "
            f"{layers - model.num_layers} = {layers}, and each stage needs at least one"
        )


def _vocabulary(config: Config) -> Iterator[str]:
    if config.pipeline.vocabulary != "parallel":
        return
    stage = "or set pipeline.vocabulary to 'stage'"
    if config.lora is not None:
        yield (
            "section 'lora' adapts layers of stages, and pipeline.vocabulary 'parallel' takes the "
            f"embedding and the head out of them: remove one of the two, {stage}"
        )
    optimizer = "" if config.optimizer is None else config.optimizer.type
    if optimizer.lower().endswith("lamb") and config.mesh.pipeline != 1:
        yield (
            f"optimizer.type {optimizer!r} needs the norm of whole parameters, and "
            "pipeline.vocabulary 'parallel' cuts two of them over the pipeline ranks: use another "
            f"optimizer, {stage}"
        )


def _stages(config: Config) -> Iterator[str]:
    stages, ranks = config.pipeline.stages, config.mesh.pipeline
    if stages not in ("auto", ranks):
        yield (
            f"pipeline.stages ({stages}) must equal mesh.pipeline ({ranks}): make them equal, or "
            'set pipeline.stages to "auto"'
        )
    elif config.pipeline.stages_per_rank is not None:
        yield from bounds_errors(config.pipeline.partition, ranks * config.pipeline.stages_per_rank)


_SHARDED_KEYS = (
    "model.num_attention_heads", "model.num_query_groups", "model.ffn_hidden_size",
    "model.hidden_size", "model.swiglu", "model.seq_length", "model.pad_vocab_size_to",
)  # fmt: skip
_RULES = (
    Rule(("fp16.enabled", "bf16.enabled"), _one_precision),
    Rule(("mesh.tensor", "mesh.sequence_parallel", *_SHARDED_KEYS), _model_on_mesh),
    Rule(
        ("mesh.pipeline", "pipeline.stages", "pipeline.chunks", "pipeline.schedule",
         "model.num_layers"),
        _a_layer_for_each_stage,
    ),
    Rule(
        ("pipeline.partition", "pipeline.stages", "mesh.pipeline", "pipeline.chunks",
         "pipeline.schedule"),
        _stages,
    ),
    Rule(
        ("pipeline.activation_checkpoint_interval", "activation_checkpointing.number_checkpoints",
         "model.recompute_method"),
        errors_of_recompute,
    ),
    Rule(
        ("activation_checkpointing", "mesh.tensor", "pipeline.activation_checkpoint_interval",
         "model.recompute"),
        errors_of_stored_activations,
    ),
    Rule(("pipeline.vocabulary", "lora", "optimizer.type", "mesh.pipeline"), _vocabulary),
    Rule(("scheduler", "training"), errors_of_length),
    Rule(("checkpoint.save", "training.resume", "training.on_nonfinite"), errors_of_folder),
    Rule(
        ("data.reset_position_ids", "data.reset_attention_mask", "model.type"), errors_of_positions
    ),
    Rule(("data.pad_to_multiple_of", "pipeline.shapes", "mesh"), errors_of_padding),
    Rule(
        ("mesh.device", "pipeline.schedule", "pipeline.partition", "pipeline.vocabulary"),
        errors_of_mixed_devices,
    ),
)  # fmt: skip


def _resolved(part: Section) -> dict[str, Any]:
    found = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        supported = key_info(field)["status"] == "honoured"
        if not supported and name not in part.model_fields_set:
            continue
        if isinstance(value, Section):
            value = _resolved(value)
            if not value and not field.is_required():
                continue
        found[name] = to_jsonable_python(value)
    return found


def _given(part: Section) -> dict[str, Any]:
    found = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if name not in part.model_fields_set or key_info(field)["status"] != "honoured":
            continue
        if isinstance(value, Section):
            value = _given(value)
            if not value:
                continue
        found[name] = to_jsonable_python(value)
    return found

"""The whole config: its sections, the rules between them, warnings and notes.  Imports no torch."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler, SerializeAsAny
from pydantic_core import CoreSchema, core_schema, to_jsonable_python

from pipemega.config.batch import (
    MICRO,
    RAMPUP,
    STEPS,
    TRAIN,
    Batch,
    BatchKeys,
    BatchSizes,
    rampup_errors,
    samples_error,
    solve,
)
from pipemega.config.declarations import (
    Count,
    Name,
    Rule,
    Section,
    SectionClass,
    UnsupportedKeys,
    Whole,
    honoured,
    key_info,
    own,
    section,
    sections,
)
from pipemega.config.launch_variables import launch_variables
from pipemega.config.model_registry import ModelSection, section_of_type
from pipemega.config.name_suggestions import did_you_mean
from pipemega.config.sections.data_section import (
    DataSection,
    errors_of_padding,
    warnings_of_evaluation,
)
from pipemega.config.sections.expert_keys import (
    ExpertParallelSection,
    errors_of_experts,
    errors_of_filled_waits,
    with_expert_axis,
)
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.config.sections.hf_section import HFSection, errors_of_positions
from pipemega.config.sections.image_model_sections import ResNetSection, ViTSection
from pipemega.config.sections.monitor_sections import (
    CommsLoggerSection,
    FlopsProfilerSection,
    MonitorKeys,
    TimersSection,
    warnings_of_profiling,
)
from pipemega.config.sections.optimizer_section import OptimizerSection
from pipemega.config.sections.pipeline_sections import (
    CompileSection,
    MeshSection,
    PipelineSection,
    bounds_errors,
    errors_of_mixed_devices,
)
from pipemega.config.sections.precision_sections import (
    ActivationCheckpointingSection,
    Bf16Section,
    DataTypesSection,
    Fp8Section,
    Fp16Section,
    GradientKeys,
    ParameterBytes,
    ZeroOnMesh,
    ZeroSection,
    errors_of_graphs,
    errors_of_recompute,
    errors_of_stored_activations,
    warnings_of_recompute,
    with_communication_dtype,
)
from pipemega.config.sections.run_sections import (
    CheckpointSection,
    LoraSection,
    TrainingSection,
    errors_of_folder,
)
from pipemega.config.sections.scheduler_section import (
    SchedulerSection,
    count_samples,
    errors_of_length,
)
from pipemega.config.sections.transformer_sections import TransformerSection
from pipemega.config.source import KeyPath, all_problems, dotted, show
from pipemega.errors import ConfigError

# Sections and keys that the Trainer of transformers fills if they are "auto".
_FILLED = ("optimizer", "scheduler", "fp16.enabled", "bf16.enabled", "gradient_clipping")


def warnings_of(config: Any) -> Iterator[str]:
    """Yield the keys that are ignored or probably a mistake, as lines for the log."""
    yield from _auto_warnings(config)
    for name in config.adopted_keys:
        yield f"the key {name!r} is not one of pipemega or DeepSpeed: it is in config.user"
    for path, part in sections(config):
        written = [name for name in type(part).model_fields if name in part.model_fields_set]
        for name in written:
            found = key_info(type(part).model_fields[name])
            value = getattr(part, name)
            if found["status"] == "ignored" and value not in found["accepts"]:
                yield f"{dotted((*path, name))} is ignored: {found['why']}"
            elif found["status"] == "block" and value:
                yield f"{dotted((*path, name))} is disabled, and ignored: it is not supported"
        yield from part.remarks()
    yield from warnings_of_recompute(config)
    yield from warnings_of_profiling(config)
    yield from warnings_of_evaluation(config)


def _auto_warnings(config: Any) -> Iterator[str]:
    filled = [path for path in config.auto_keys if {path[0], dotted(path)} & set(_FILLED)]
    if not filled:
        return
    texts = []
    for path in filled:
        value: Any = config
        for name in path:
            value = getattr(value, name, None)
        texts.append(f"{dotted(path)} ({show(to_jsonable_python(value))})")
    name = dotted(filled[0])
    yield (
        f'"auto" means the default of {", ".join(texts)}: the Trainer of transformers would fill '
        f"these keys from its arguments; set the values, such as --set {name}=VALUE"
    )


def notes_of(config: Any) -> Iterator[str]:
    """Yield the defaults that differ between training systems, as lines for the log."""
    if "gradient_clipping" not in config.model_fields_set:
        yield (
            f"gradient_clipping is not set; its default is {config.gradient_clipping:g}, as in "
            "DeepSpeed since June 2026 (0 before); 0 disables clipping"
        )
    tokenizer = None if config.data.mock else config.data.tokenizer
    if config.model and tokenizer and tokenizer == config.model.default_tokenizer():
        yield f"data.tokenizer is {tokenizer}: the tokenizer of the model"
    section = config.optimizer
    decay = getattr(section and section.params, "weight_decay", None)
    # Groups that set the decay show that the user has decided.
    decided = section is not None and any("weight_decay" in group for group in section.groups)
    if (
        decay
        and not decided
        and "weight_decay_norms_and_biases" not in config.training.model_fields_set
    ):
        yield (
            f"optimizer.params.weight_decay {decay:g} also decays norms and biases, as torch and "
            "DeepSpeed do by default; Megatron-LM does not: for its behavior set "
            "training.weight_decay_norms_and_biases to false"
        )


class UserValues(dict[str, Any]):
    """A JSON object, read as `config.user.lr` or `config.user["lr"]`.

    Objects in it can be read in the same way: `config.user.mixup.alpha`. A key that is also the
    name of a method of dict, such as `items`, needs brackets.

    Raises:
        AttributeError: there is no such key; the message names the nearest one.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__({key: _wrapped(value) for key, value in (values or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"config.user has no key {name!r}{did_you_mean(name, self)}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the config is frozen: set user.{name} in its file, or by --set")

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, handler(Mapping[str, Any]))


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return UserValues(value)
    return tuple(map(_wrapped, value)) if isinstance(value, list | tuple) else value


# The types of `model` that pipemega has itself.
MODEL_TYPES = (GPTSection, HFSection, ResNetSection, ViTSection)


class RunKeys(Section):
    """Seed and logging of the run."""

    seed: Whole = own(1234, "Seed of initial weights, dropout and the order of the data.")
    steps_per_print: Count | None = honoured(10, "Steps between log lines; null: no lines.")
    wall_clock_breakdown: bool = honoured(False, "Log how long the parts of a step take.")
    memory_breakdown: bool = honoured(False, "Log the memory use of the device.")
    dump_state: bool = honoured(False, "Log the resolved config at the start.")


class Config(BatchKeys, RunKeys, GradientKeys, MonitorKeys, UnsupportedKeys):
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
    fp8: Fp8Section = section(Fp8Section, "fp8 linears, by torchao.", own=True)
    data_types: DataTypesSection = section(DataTypesSection, "Other dtypes.")
    zero_optimization: ZeroSection = section(ZeroSection, "ZeRO stage 1 and optimizer offload.")
    zero_allow_untested_optimizer: bool = honoured(
        False,
        "true: do not test whether the optimizer of `initialize(optimizer=...)` works on the mesh. "
        "With ZeRO or mesh.tensor, the update of an element must not depend on other elements; "
        "with mesh.pipeline, the update of a parameter must not depend on other parameters.",
    )
    expert_parallel: ExpertParallelSection | None = honoured(None, "DeepSpeed's AutoEP.")
    activation_checkpointing: ActivationCheckpointingSection = section(
        ActivationCheckpointingSection, "Recomputation of activations."
    )
    compile: CompileSection = section(CompileSection, "torch.compile for each layer.")
    checkpoint: CheckpointSection = section(CheckpointSection, "Saving and loading of checkpoints.")
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
        raw = with_expert_axis(with_communication_dtype(raw))
        return count_samples(_mesh_from_stages(raw))

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
        return self.mesh.expert

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


def _fp8_with_bf16(config: Config) -> Iterator[str]:
    if config.fp8.enabled and not config.bf16.enabled:
        dtype = "fp16" if config.fp16.enabled else "fp32"
        yield (
            f"fp8.enabled is true, and the run computes in {dtype}: the fp8 products take bf16 "
            "tensors; set bf16.enabled to true, or fp8.enabled to false"
        )


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
    "model.num_experts", "model.moe_ffn_hidden_size", "model.moe_shared_expert_intermediate_size",
)  # fmt: skip
_RULES = (
    Rule(("fp16.enabled", "bf16.enabled"), _one_precision),
    Rule(("fp8.enabled", "bf16.enabled", "fp16.enabled"), _fp8_with_bf16),
    Rule(
        ("mesh.tensor", "mesh.expert", "mesh.sequence_parallel", *_SHARDED_KEYS), _model_on_mesh
    ),
    Rule(("mesh.expert", "expert_parallel", "model.type", "optimizer.type"), errors_of_experts),
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
         "model.recompute_method", "model.recompute_keep"),
        errors_of_recompute,
    ),
    Rule(("activation_checkpointing", "mesh.tensor"), errors_of_stored_activations),
    Rule(
        ("compile.cuda_graphs", "model.recompute", "activation_checkpointing.cpu_checkpointing"),
        errors_of_graphs,
    ),
    Rule(("pipeline.vocabulary", "lora", "optimizer.type", "mesh.pipeline"), _vocabulary),
    Rule(
        ("pipeline", "mesh.expert", "activation_checkpointing", "compile.cuda_graphs"),
        errors_of_filled_waits,
        ),
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


_SIZES = (TRAIN, MICRO, STEPS)


def size_rules(autos: Collection[KeyPath], world: int | None = None) -> tuple[Rule, ...]:
    """Return the rules.

    Args:
        autos: keys that are "auto" and have their default therefore.
        world: number of ranks; None: the number that the launcher has set, if any.
    """
    unfilled = [name for name in _SIZES if (name,) in autos]

    def batch(config: Config) -> Iterable[str]:
        if unfilled and not (config.train_batch_size or config.train_micro_batch_size_per_gpu):
            raise ConfigError(_auto_batch(unfilled))
        config.batch(config.smallest_data_size)
        return ()

    def growing_batch(config: Config) -> Iterable[str]:
        config.batch_sizes(config.smallest_data_size)
        return ()

    def stage(config: Config) -> Iterator[str]:
        refusal = config.zero_refusal(_data_size(config, world))
        if refusal is not None:
            yield refusal

    return (
        Rule((*_SIZES, "mesh.data"), batch),
        Rule((RAMPUP, "training.train_samples", *_SIZES, "mesh.data"), growing_batch),
        Rule(("zero_optimization.stage", "mesh"), stage),
    )


def _auto_batch(unfilled: Collection[str]) -> str:
    are = "are" if len(unfilled) > 1 else "is"
    return (
        f'{", ".join(unfilled)} {are} "auto", so the batch size is not set: the Trainer of '
        f"transformers fills {'these keys' if len(unfilled) > 1 else 'this key'} from its "
        f"per_device_train_batch_size and gradient_accumulation_steps, and pipemega has no other "
        f"source for them. Set them, such as --set {MICRO}=1 --set {STEPS}=8"
    )


def _data_size(config: Config, world: int | None) -> int | None:
    """Return the number of data ranks, None if neither the config nor the launcher determine it."""
    mesh = config.mesh
    if mesh.data != "auto":
        return mesh.data
    ranks = world or launch_variables().number("WORLD_SIZE", 0)
    ranks_per_copy = mesh.tensor * mesh.pipeline
    if ranks and ranks % ranks_per_copy == 0:
        return ranks // ranks_per_copy
    known = config.train_batch_size and config.train_micro_batch_size_per_gpu
    return config.smallest_data_size if known and config.gradient_accumulation_steps else None

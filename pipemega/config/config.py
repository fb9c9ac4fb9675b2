"""The whole config: its sections, the rules between them, and `load`.  Floor 1."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from pipemega.config.activation_checkpointing import ActivationCheckpointingSection
from pipemega.config.batch import Batch, BatchKeys, solve
from pipemega.config.building import build
from pipemega.config.checkpoint import CheckpointSection
from pipemega.config.data import DataSection
from pipemega.config.gradients import GradientKeys
from pipemega.config.keys import Count, Section, Whole, honoured, marks, own, section, sections
from pipemega.config.mesh import MeshSection
from pipemega.config.model import ModelSection, near_multiples
from pipemega.config.monitors import (
    CsvSection,
    MonitorSection,
    TensorboardSection,
    TimersSection,
    WandbSection,
)
from pipemega.config.optimizer import OptimizerSection
from pipemega.config.pipeline import PipelineSection, check_bounds
from pipemega.config.precision import Bf16Section, DataTypesSection, Fp16Section
from pipemega.config.reading import Invalid, dotted, override, read
from pipemega.config.scheduler import SchedulerSection
from pipemega.config.training import TrainingSection
from pipemega.config.unsupported import UnsupportedKeys
from pipemega.config.zero import ParameterBytes, ZeroOnMesh, ZeroSection
from pipemega.errors import ConfigError

# The embedding and the head are layers as well.
_LAYERS_BESIDE_BLOCKS = 2


class RunKeys(Section):
    """What the run is and what it says."""

    seed: Whole = own(1234, "Weights, dropout and the order of the data are drawn from it.")
    steps_per_print: Count | None = honoured(10, "Steps between lines of the log; null: none.")
    wall_clock_breakdown: bool = honoured(False, "Log where the time of a step goes.")
    memory_breakdown: bool = honoured(False, "Log the memory of the device.")
    dump_state: bool = honoured(False, "Log the resolved config at the start.")


class Config(BatchKeys, RunKeys, GradientKeys, UnsupportedKeys):
    """A run, as one file says it.  Frozen: what follows from the keys is a property or a method."""

    old_names: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    mesh: MeshSection = section(MeshSection, "How the ranks are laid out.", own=True)
    model: ModelSection | None = own(None, "The built-in GPT; null: a model of your own.")
    data: DataSection = section(DataSection, "What it is trained on.", own=True)
    pipeline: PipelineSection = section(PipelineSection, "Stages and their order.")
    training: TrainingSection = section(TrainingSection, "The loop around the steps.", own=True)
    optimizer: OptimizerSection | None = honoured(None, "The optimizer.")
    scheduler: SchedulerSection | None = honoured(None, "The learning rate.")
    fp16: Fp16Section = section(Fp16Section, "Training in fp16.")
    bf16: Bf16Section = section(Bf16Section, "Training in bf16; `bfloat16` is its old name.")
    data_types: DataTypesSection = section(DataTypesSection, "Other dtypes.")
    zero_optimization: ZeroSection = section(ZeroSection, "ZeRO.")
    activation_checkpointing: ActivationCheckpointingSection = section(
        ActivationCheckpointingSection, "Recomputation."
    )
    checkpoint: CheckpointSection = section(CheckpointSection, "Saving and loading.")
    monitor: MonitorSection = section(MonitorSection, "What is always recorded.", own=True)
    tensorboard: TensorboardSection = section(TensorboardSection, "Event files for TensorBoard.")
    wandb: WandbSection = section(WandbSection, "Weights & Biases.")
    csv_monitor: CsvSection = section(CsvSection, "CSV files.")
    timers: TimersSection = section(TimersSection, "DeepSpeed's timers.")

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        return _mesh_of_stages(raw) if isinstance(raw, Mapping) else raw

    def batch(self, data_size: int) -> Batch:
        """The batch equation on `data_size` data ranks.

        Raises:
            ConfigError: it has no solution; the message lists the nearest sizes that have.
        """
        tensor, pipeline = self.mesh.tensor, self.mesh.pipeline
        solution = solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_size,
            tensor * pipeline,
        )
        fills = self.pipeline.schedule in ("gpipe", "1f1b")
        return Batch(*solution, data_size, tensor, pipeline, fills)

    def check_zero(self, data_size: int) -> None:
        """Says what can only be said of ZeRO when the number of data ranks is known.

        Raises:
            ConfigError: a stage that is not here, with what there is in its place.
        """
        refusal = self._zero_on(data_size).refusal
        if refusal is not None:
            raise ConfigError(refusal)

    def zero_notes(self, data_size: int) -> tuple[str, ...]:
        """What ZeRO saves on `data_size` data ranks; to be said once in the log."""
        return tuple(self._zero_on(data_size).notes)

    def _zero_on(self, data_size: int) -> ZeroOnMesh:
        narrow = self.fp16.enabled or self.bf16.enabled
        gradient = {"fp32": 4, None: 4}.get(self.data_types.grad_accum_dtype, 2)
        state = 8 if self.optimizer is None else self.optimizer.state_bytes
        each = ParameterBytes(2 if narrow else 4, gradient, state + 4 * narrow)
        mesh = self.mesh
        stage = self.zero_optimization.stage
        return ZeroOnMesh(stage, each, data_size, mesh.pipeline, mesh.tensor)

    @property
    def smallest_data_size(self) -> int:
        """The data ranks that the file speaks of, or else the fewest that there can be."""
        if self.mesh.data != "auto":
            return self.mesh.data
        micro, steps = self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        if self.train_batch_size and micro and steps:
            return max(1, self.train_batch_size // (micro * steps))
        return 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is ignored or likely not meant; to be said once in the log."""
        return tuple(_warnings(self))

    @property
    def notes(self) -> tuple[str, ...]:
        """Defaults whose meaning differs between systems; to be said once in the log."""
        if "gradient_clipping" in self.model_fields_set:
            return ()
        return (
            f"gradient_clipping is not given and is {self.gradient_clipping:g}, DeepSpeed's "
            "default of today (0 before June 2026); 0 switches it off",
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved config as JSON values: every key that does something, and all written."""
        return _resolved(self)

    def to_json(self) -> str:
        """The same as a text, which `load` reads back to an equal config."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @model_validator(mode="after")
    def _rules(self) -> "Config":
        for rule in (
            _one_precision,
            _model_on_mesh,
            _stages,
            _schedule_length,
            _folder_to_go_back_to,
            _sizes,
        ):
            rule(self)
        return self


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> Config:
    """A checked config.

    Args:
        source: a path, a mapping, the text of a JSON object, or a Config.
        overrides: `a.b=value` each; the value is JSON, or else a text.

    Raises:
        ConfigError: a key is unknown, missing, of the wrong type, refused, or does not fit another.
    """
    if isinstance(source, Config):
        if not overrides:
            return source
        source = source.to_dict()
    found = override(read(source), overrides)
    try:
        return build(Config, found.tree)
    except Invalid as invalid:
        raise found.error(invalid) from None


def _mesh_of_stages(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`pipeline.stages` stands in for a `mesh.pipeline` that is not written."""
    pipeline, mesh = raw.get("pipeline"), raw.get("mesh", {})
    if not isinstance(pipeline, Mapping) or not isinstance(mesh, Mapping) or "pipeline" in mesh:
        return raw
    stages = pipeline.get("stages", "auto")
    return raw if stages == "auto" else {**raw, "mesh": {**mesh, "pipeline": stages}}


def _one_precision(config: Config) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        raise ValueError("fp16.enabled and bf16.enabled are both true: keep one, bf16 if in doubt")


def _model_on_mesh(config: Config) -> None:
    model, mesh = config.model, config.mesh
    if model is None:
        return
    cut = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "ffn_hidden_size": model.feed_forward_size,
    }
    if mesh.sequence_parallel:
        cut["seq_length"] = model.seq_length
    for name, size in cut.items():
        if size % mesh.tensor:
            raise ValueError(
                f"model.{name} ({size}) must be a multiple of mesh.tensor ({mesh.tensor}), which "
                f"cuts it; the nearest {near_multiples(size, mesh.tensor)}"
            )
    layers = model.num_layers + _LAYERS_BESIDE_BLOCKS
    chunks = config.pipeline.stages_per_rank or 1
    if mesh.pipeline * chunks > layers:
        stages = f"mesh.pipeline ({mesh.pipeline})"
        if chunks > 1:
            stages += f" * pipeline.chunks ({chunks}) = {mesh.pipeline * chunks}"
        raise ValueError(
            f"{stages} is more than the layers there are: "
            f"model.num_layers + embedding + head = {model.num_layers} + 1 + 1 = {layers}, and a "
            "stage needs one at least"
        )


def _stages(config: Config) -> None:
    stages, ranks = config.pipeline.stages, config.mesh.pipeline
    if stages not in ("auto", ranks):
        raise ValueError(
            f"pipeline.stages ({stages}) must be mesh.pipeline ({ranks}), one stage on each "
            'pipeline rank: make them equal, or pipeline.stages "auto"'
        )
    if config.pipeline.stages_per_rank is not None:
        check_bounds(config.pipeline.partition, ranks * config.pipeline.stages_per_rank)
    every, parts = (
        config.pipeline.activation_checkpoint_interval,
        config.activation_checkpointing.number_checkpoints,
    )
    if every and parts:
        raise ValueError(
            f"pipeline.activation_checkpoint_interval ({every}) and "
            f"activation_checkpointing.number_checkpoints ({parts}) say the same thing in two "
            "ways: keep one"
        )


def _schedule_length(config: Config) -> None:
    if config.scheduler is not None:
        config.scheduler.params.check(config.training.train_steps)


def _folder_to_go_back_to(config: Config) -> None:
    training = config.training
    wants = {
        "training.resume is 'auto'": training.resume == "auto",
        "training.on_nonfinite.policy is 'rollback'": training.on_nonfinite.policy == "rollback",
    }
    for wish, is_there in wants.items():
        if is_there and config.checkpoint.save is None:
            raise ValueError(
                f"{wish}, which loads what the run has saved, and it saves nothing: give "
                "checkpoint.save"
            )


def _sizes(config: Config) -> None:
    config.batch(config.smallest_data_size)


def _warnings(config: Config) -> Iterator[str]:
    for path, part in sections(config):
        written = [name for name in type(part).model_fields if name in part.model_fields_set]
        for name in written:
            found = marks(type(part).model_fields[name])
            value = getattr(part, name)
            if found["status"] == "ignored" and value not in found["accepts"]:
                yield f"{dotted((*path, name))} is ignored: {found['why']}"
            elif found["status"] == "block" and value:
                yield f"{dotted((*path, name))} is off, and ignored: nothing here reads it"
        yield from part.remarks()
    every = config.pipeline.activation_checkpoint_interval
    whole = config.model is not None and config.model.recompute == "full"
    if whole and (every or config.activation_checkpointing.number_checkpoints):
        yield (
            "model.recompute 'full' recomputes each block, and the activation checkpoints "
            "recompute them once more: one of the two is enough"
        )


def _resolved(part: Section) -> dict[str, Any]:
    found = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        honoured = marks(field)["status"] == "honoured"
        if not honoured and name not in part.model_fields_set:
            continue
        if isinstance(value, Section):
            value = _resolved(value)
            if not value and not field.is_required():
                continue
        found[name] = _listed(value)
    return found


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(below) for key, below in value.items()}
    return [_listed(part) for part in value] if isinstance(value, tuple) else value

"""`fp16`, `bf16`, `fp8`, `data_types`: dtypes of parameters, activations and gradients.

`zero_optimization`: ZeRO stage 1, offload of the optimizer, and what the mesh saves.

Top-level keys of the gradients: clipping, and the reduction over the data ranks.

`activation_checkpointing`: recompute activations in the backward pass.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipemega.config.declarations import (
    STAGE_3,
    STAGE_3_NAMES,
    Auto,
    Count,
    NotNegative,
    Positive,
    Section,
    UnsupportedZeroKeys,
    Whole,
    honoured,
    ignored,
    own,
    refused,
    replaced,
    rule,
    section,
)
from pipemega.config.sections.transformer_sections import TransformerSection

Dtype = Literal["fp32", "fp16", "bf16"]
# The communication of ZeRO that runs beside computation.
Overlap = Literal["nothing", "reductions", "all"]
_MASTERS = (
    "master weights are always fp32, so that small updates are not lost; "
    "data_types.grad_accum_dtype sets the dtype of the gradients"
)


class Fp16Section(Section):
    """fp16 weights and activations, fp32 master weights, loss scaling."""

    enabled: bool = honoured(False, "Train in fp16.")
    auto_cast: bool = honoured(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: NotNegative = honoured(0.0, "Static loss scale; 0: dynamic loss scaling.")
    initial_scale_power: Whole = honoured(16, "log2 of the first dynamic loss scale.", le=127)
    loss_scale_window: Count = honoured(1000, "Steps without overflow until the scale doubles.")
    hysteresis: Count = honoured(2, "Overflows until the loss scale is halved.")
    consecutive_hysteresis: bool = honoured(False, "Reset hysteresis if a step does not overflow.")
    min_loss_scale: Positive = honoured(
        1.0, "Smallest loss scale; an overflow that would halve this scale ends the run."
    )
    fp16_master_weights_and_grads: bool = refused(
        False, "fp16 master weights and gradients.", _MASTERS
    )

    @rule("initial_scale_power", "min_loss_scale", "enabled", "loss_scale")
    def _starts_above_the_minimum(self) -> Iterator[str]:
        start = 2.0**self.initial_scale_power
        if self.enabled and not self.loss_scale and start < self.min_loss_scale:
            yield (
                f"fp16.initial_scale_power {self.initial_scale_power} means a loss scale of "
                f"{start:g}, below fp16.min_loss_scale ({self.min_loss_scale:g}): raise the first "
                "or lower the second"
            )


class Bf16Section(Section):
    """bf16 weights and activations, fp32 master weights."""

    enabled: bool = honoured(False, "Train in bf16.")
    check_grad_overflow: bool = honoured(
        True, "Skip steps with inf or nan gradients unless training.on_nonfinite.policy is set."
    )
    immediate_grad_update: bool = ignored(
        False,
        "DeepSpeed: add each gradient to its fp32 buffer as soon as it exists.",
        "gradients are always added to the gradient buffer immediately",
        agrees=[True],
    )
    bf16_master_weights_and_grads: bool = refused(
        False, "bf16 master weights and gradients.", _MASTERS
    )
    bf16_optimizer_states: bool = refused(
        False, "bf16 optimizer state.", "optimizer state is always fp32"
    )


class Fp8Section(Section):
    """fp8 products of linear layers, by torchao.float8; see docs/optimizer.md."""

    enabled: bool = own(
        False,
        "Compute the linears of the blocks in fp8, in training; needs `bf16.enabled` and torchao "
        "(`pip install -e '.[fp8]'`). Weights, gradients and messages stay in bf16.",
    )
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = own(
        "tensorwise",
        'torchao\'s recipe: `"tensorwise"`: one scale for each tensor, for GPUs of compute '
        'capability 8.9 or newer; `"rowwise"`: one for each row, from 9.0; '
        '`"rowwise_with_gw_hp"`: as rowwise, with weight gradients in bf16.',
    )


class DataTypesSection(Section):
    """Dtypes that `fp16` and `bf16` do not set."""

    grad_accum_dtype: Dtype | None = honoured(
        None, "Dtype of accumulated gradients; null: fp32, or the parameters' dtype if wider."
    )
    param_dtype: Dtype | None = refused(
        None, "DeepSpeed: dtype of the parameters.", "it follows from fp16.enabled and bf16.enabled"
    )
    keep_in_fp32_modules: tuple[str, ...] | Auto | None = ignored(
        None,
        "DeepSpeed: buffers of these modules stay in fp32.",
        "buffers keep the dtype that the model gives them",
        agrees=["auto"],
    )
    buffer_dtype: Dtype | None = refused(
        None, "DeepSpeed: dtype of the buffers.", "buffers keep the dtype that the model gives them"
    )


_OFF = "it applies to ZeRO stage 1, and zero_optimization.stage is 0"
_STAGE_1 = "--set zero_optimization.stage=1"
# For the arithmetic of a file that does not tell the number of ranks.
_EXAMPLE_RANKS = 8
_NO_OFFLOAD = "pipemega's offload does not use this key"
_WEIGHTS_STAY = (
    "as in DeepSpeed below stage 3, weights stay on their device; "
    "zero_optimization.offload_optimizer.device 'cpu' offloads master weights and optimizer state"
)
_SECTION_OF_OLD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_NO_DISK = "only 'none' and 'cpu' are supported, because each step reads and writes the whole state"


class _Offload(Section):
    """Keys that both offload sections have."""

    nvme_path: str | None = ignored(None, "Folder on an NVMe disk.", _NO_OFFLOAD)
    buffer_count: Whole | None = ignored(None, "Number of buffers.", _NO_OFFLOAD)
    buffer_size: NotNegative | None = ignored(None, "Size of a buffer.", _NO_OFFLOAD)
    max_in_cpu: NotNegative | None = ignored(None, "Elements kept in host memory.", _NO_OFFLOAD)
    pipeline_read: bool = ignored(False, "Overlap reads with computation.", _NO_OFFLOAD)
    pipeline_write: bool = ignored(False, "Overlap writes with computation.", _NO_OFFLOAD)
    fast_init: bool = ignored(False, "Faster initialization.", _NO_OFFLOAD)
    ratio: NotNegative | None = ignored(
        None,
        "Share of the tensors to offload.",
        "there is no partial offload",
        agrees=[1.0],
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed uses null for "none".
        if isinstance(raw, dict) and raw.get("device", "") is None:
            return raw | {"device": "none"}
        return raw


class OffloadParamSection(_Offload):
    """Offload of the weights, which belongs to ZeRO stage 3."""

    device: Literal["none", "cpu", "nvme"] = ignored(
        "none", "Device of the weights.", _WEIGHTS_STAY, agrees=["none"]
    )
    pin_memory: bool = ignored(False, "Use pinned host memory.", _NO_OFFLOAD)


class OffloadOptimizerSection(_Offload):
    """Offload of master weights and optimizer state."""

    device: Literal["none", "cpu", "nvme"] = refused(
        "none",
        'Device for master weights, optimizer state and the update: "cpu", or "none" for the '
        'device of the weights; "nvme" is refused.',
        {"nvme": _NO_DISK},
        accepts=["cpu"],
    )
    pin_memory: bool = honoured(False, "Use pinned host memory: faster copies to and from the GPU.")
    super_offload: bool = ignored(False, "SuperOffload, for Grace Hopper.", STAGE_3)
    cpuadam_cores_perc: NotNegative | None = ignored(
        None, "SuperOffload: share of the CPU cores.", STAGE_3
    )


class ZeroSection(UnsupportedZeroKeys):
    """Shard the optimizer state over the data ranks."""

    old_names: ClassVar[Mapping[str, str]] = STAGE_3_NAMES

    stage: Whole = honoured(
        0, "0: no sharding; 1: shard optimizer state and master weights; 2, 3: refused.", le=3
    )
    offload_param: OffloadParamSection = section(OffloadParamSection, "Offload of the weights.")
    offload_optimizer: OffloadOptimizerSection = section(
        OffloadOptimizerSection, "Offload of master weights and optimizer state; with any stage."
    )
    cpu_offload: bool = replaced(
        'Old form of `offload_optimizer.device` "cpu".', "zero_optimization.offload_optimizer"
    )
    cpu_offload_param: bool = replaced(
        'Old form of `offload_param.device` "cpu".', "zero_optimization.offload_param"
    )
    cpu_offload_use_pin_memory: bool = replaced(
        "Old form of `offload_optimizer.pin_memory`, for `cpu_offload`.",
        "zero_optimization.offload_optimizer.pin_memory",
    )
    reduce_bucket_size: NotNegative = honoured(
        4e7,
        "Stage 1: elements per reduction; a larger parameter is reduced alone (DeepSpeed: 5e8).",
    )
    allgather_bucket_size: NotNegative = honoured(
        4e7,
        "Stage 1: elements per all-gather; the smaller of the two bucket sizes is used for both "
        "(DeepSpeed: 5e8).",
    )
    overlap_comm: bool | None = honoured(
        None,
        "Stage 1: overlap reductions with backward, and all-gathers with the next forward; null: "
        "on a GPU reductions only, on a CPU neither.",
    )
    legacy_stage1: bool = ignored(False, "Old implementation.", "there is only one implementation")
    round_robin_gradients: bool = ignored(
        False, "Distribute gradients round-robin.", "every rank owns a slice of each bucket"
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed's oldest form: true or false instead of an object.
        raw = {"stage": int(raw)} if isinstance(raw, bool) else raw
        return _without_old_offload(raw) if isinstance(raw, Mapping) else raw

    def remarks(self) -> Iterable[str]:
        if self.stage == 0:
            for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm"):
                if getattr(self, name) not in (type(self).model_fields[name].default, False):
                    yield f"zero_optimization.{name} is ignored: {_OFF}"

    def overlap(self, device_type: str) -> Overlap:
        """Return what runs beside computation on such a device.

        All-gathers must be asked for: until the next forward needs it, a parameter is not complete
        for a caller who reads it (`Engine.settle`).
        """
        if self.overlap_comm is None:
            return "reductions" if device_type == "cuda" else "nothing"
        return "all" if self.overlap_comm else "nothing"

    @property
    def offloads(self) -> bool:
        """Whether master weights and optimizer state are on the CPU."""
        return self.offload_optimizer.device == "cpu"


def _without_old_offload(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace DeepSpeed's old keys of the offload, unless the sections contradict them."""
    found = dict(raw)
    pinned = found.pop("cpu_offload_use_pin_memory", None)
    memory = {} if pinned is None else {"pin_memory": pinned}
    for old, new in _SECTION_OF_OLD.items():
        given, below = raw.get(old), raw.get(new)
        below = {"device": "cpu"} if below is None else below
        if given is False:
            del found[old]
        elif given is True and isinstance(below, Mapping) and below.get("device") == "cpu":
            del found[old]
            found[new] = {**memory, **below}
    return found


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on a rank that holds it, without ZeRO.

    Args:
        weight: bytes of the weight, in the dtype of the computation.
        gradient: bytes of the gradient, in the dtype of accumulation.
        optimizer: bytes of optimizer state and master weight.
    """

    weight: int
    gradient: int
    optimizer: int

    def at(self, stage: int, data: int) -> float:
        """Return the bytes per parameter with ZeRO `stage` on `data` data ranks."""
        parts = (self.optimizer, self.gradient, self.weight)
        return sum(p / data if stage > n else p for n, p in enumerate(parts))

    @property
    def sum(self) -> str:
        """The three numbers as text: "2 + 4 + 12"."""
        return f"{self.weight} + {self.gradient} + {self.optimizer}"


@dataclass(frozen=True)
class ZeroOnMesh:
    """The memory that ZeRO saves on a mesh.

    Args:
        stage: ZeRO stage in the config.
        each: bytes per parameter.
        data: number of data ranks; None: not known.
        pipeline, tensor: sizes of the other mesh axes.
    """

    stage: int
    each: ParameterBytes
    data: int | None
    pipeline: int
    tensor: int

    @property
    def refusal(self) -> str | None:
        """Error text for stages 2 and 3, with the alternative; None for stages 0 and 1."""
        if self.stage < 2:
            return None
        data = self.data or _EXAMPLE_RANKS
        ranks = self.pipeline * self.tensor
        stage_0, stage_1, wanted = (
            f"{self.each.at(stage, data) / ranks:.3g}" for stage in (0, 1, self.stage)
        )
        where = f"on {_ranks(data)}" if self.data else f"on {_ranks(data)}, for example,"
        sizes = f"A parameter takes {self.each.sum} bytes (weight + gradient + optimizer)"
        others = f"per rank (stage 0: {stage_0}; stage {self.stage} would be {wanted})"
        if self.pipeline == 1:
            return (
                f"zero_optimization.stage {self.stage} is not supported: {self._reason}. {sizes}: "
                f"stage 1 {where} takes {stage_1} {others}{self._with_stages(data)}. Set "
                f"zero_optimization.stage to 1 ({_STAGE_1}); if the model then does not fit, raise "
                "mesh.pipeline or mesh.tensor. If you want neither, torch's fully_shard "
                "(torch.distributed.fsdp) does what stages 2 and 3 do"
            )
        return (
            f"zero_optimization.stage {self.stage} is not supported with pipeline parallelism: "
            f"{self._reason}, so that every micro-batch has to "
            f"reduce{' and gather' if self.stage == 3 else ''} them; stage 1 reduces once per "
            f"step. {sizes}. mesh.pipeline {self.pipeline} x mesh.tensor {self.tensor} divides all "
            f"three by {ranks}, and stage 1 {where} divides the last by {data}: {stage_1} bytes "
            f"{others}. Set zero_optimization.stage to 1 ({_STAGE_1}); to save more, raise "
            f"mesh.pipeline or mesh.tensor"
        )

    @property
    def _reason(self) -> str:
        parts = "gradients and weights" if self.stage == 3 else "gradients"
        return f"it shards the {parts} over the data ranks"

    def _with_stages(self, data: int) -> str:
        """Return what a pipeline over some of the data ranks saves, as text."""
        texts = []
        for stages in (2, 4, 8):
            if data % stages == 0:
                size = self.each.at(1, data // stages) / (stages * self.tensor)
                texts.append(f"mesh.pipeline {stages}: {size:.3g}")
        if not texts:
            return ""
        total = data * self.tensor
        return f"; on the same {total} ranks with {', with '.join(texts)}"

    @property
    def notes(self) -> Iterator[str]:
        """Lines for the log."""
        if self.stage != 1 or self.data is None:
            return
        if self.data == 1:
            yield (
                "zero_optimization.stage 1 saves nothing on one data rank: there are no ranks to "
                "shard the optimizer state over"
            )
            return
        yield (
            f"ZeRO stage 1 on {_ranks(self.data)} lowers memory from {self.each.at(0, 1):.3g} to "
            f"{self.each.at(1, self.data):.3g} bytes per parameter ({self.each.sum}: weight + "
            "gradient + optimizer; the last is sharded)"
        )


def _ranks(data: int) -> str:
    return f"{data} data rank{'s' if data > 1 else ''}"


class GradientKeys(Section):
    """How gradients are reduced and clipped."""

    gradient_clipping: NotNegative = honoured(1.0, "Clip the global gradient norm to this; 0: off.")
    gradient_allreduce_op: Literal["mean", "sum"] = honoured(
        "mean", "Whether the result of the reduction over the data ranks is the mean or the sum."
    )
    prescale_gradients: bool = honoured(
        False,
        "Before the reduction, divide by the number of data ranks, not by "
        "`gradient_predivide_factor`.",
    )
    gradient_predivide_factor: Positive = honoured(
        1.0,
        "Divide gradients by this before the reduction; a second factor after it gives the mean or "
        "the sum.",
    )
    gradient_accumulation_fusion: bool | Auto = own(
        "auto",
        "The product of a linear's weight gradient adds to the accumulated gradient, without a "
        'tensor of its own (Megatron\'s name); `"auto"`: on GPUs. On CPUs only where both have '
        "one dtype.",
    )
    communication_data_type: Dtype | None = honoured(
        None, "Dtype of gradients in the reduction; null: the dtype in which they are accumulated."
    )
    fp32_allreduce: bool = replaced(
        'GPT-NeoX: true is `communication_data_type` "fp32"; false has no effect.',
        "communication_data_type",
    )
    seq_parallel_communication_data_type: Dtype | None = ignored(
        "fp32",
        "DeepSpeed: dtype of the reductions over sequence-parallel ranks.",
        "these reductions use the dtype of the gradients, fp32 by default",
        agrees=["fp32"],
    )
    sparse_gradients: bool = refused(
        False,
        "DeepSpeed: send the gradients of embeddings as sparse tensors.",
        "gradients are stored in flat, dense buffers; remove the key",
    )
    disable_allgather: bool = ignored(
        False, "Broadcast parameters, do not all-gather them.", "parameters are always all-gathered"
    )

    def fuses_gradients(self, device_type: str) -> bool:
        """Return whether products add to the gradients, on a mesh of such devices."""
        fuses = self.gradient_accumulation_fusion
        return fuses is True or (fuses == "auto" and device_type == "cuda")


def with_communication_dtype(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `fp32_allreduce` by `communication_data_type`, unless this key contradicts it."""
    given, dtype = raw.get("fp32_allreduce"), raw.get("communication_data_type")
    if not isinstance(given, bool) or (given and dtype not in (None, "auto", "fp32")):
        return raw
    rest = {key: value for key, value in raw.items() if key != "fp32_allreduce"}
    return {**rest, "communication_data_type": "fp32"} if given else rest


class ActivationCheckpointingSection(Section):
    """DeepSpeed's activation checkpointing; for the GPT, `model.recompute` gives finer control."""

    number_checkpoints: Count | None = honoured(
        None,
        "Largest number of segments of the whole model; each segment stores only its input and is "
        "recomputed in backward; null: off.",
    )
    partition_activations: bool = ignored(
        False,
        "DeepSpeed: split the stored activations over the tensor ranks; refused if "
        "mesh.tensor is above 1.",
        "mesh.tensor is 1, so there is nothing to split",
    )
    cpu_checkpointing: bool = honoured(
        False,
        "Move what the stages on GPUs save for backward to pinned host memory, and back before "
        "the backward. With recomputation that is what is stored, otherwise all activations.",
    )
    contiguous_memory_optimization: bool = ignored(
        False, "Store activations in one buffer.", "torch's allocator manages this memory"
    )
    synchronize_checkpoint_boundary: bool = ignored(
        False, "Synchronize at each segment.", "recomputation does not synchronize with the device"
    )
    profile: bool = ignored(False, "DeepSpeed: time each segment.", "use wall_clock_breakdown")


def errors_of_recompute(config: Any) -> Iterator[str]:
    """Yield why the keys of a `Config` that choose the layers to recompute exclude each other."""
    interval, segments = _checkpoints_of_all_layers(config)
    if interval and segments:
        yield (
            f"pipeline.activation_checkpoint_interval ({interval}) and "
            f"activation_checkpointing.number_checkpoints ({segments}) are two ways to set the "
            "same thing: keep one"
        )
    for key in ("recompute_method", "recompute_keep"):
        value = getattr(config.model, key, None)
        if value is not None and (interval or segments):
            what = "blocks" if key == "recompute_method" else "operators"
            shown = [*value] if isinstance(value, tuple) else repr(value)
            yield (
                f"model.{key} {shown} chooses the {what} to recompute, and activation "
                "checkpointing (pipeline.activation_checkpoint_interval or "
                "activation_checkpointing.number_checkpoints) recomputes all layers: keep one"
            )


def errors_of_stored_activations(config: Any) -> Iterator[str]:
    """Yield the errors if a `Config` treats stored activations in a way that is not supported."""
    stored = config.activation_checkpointing
    if stored.partition_activations and config.mesh.tensor > 1:
        yield (
            "activation_checkpointing.partition_activations is not supported with mesh.tensor "
            f"{config.mesh.tensor}: set mesh.sequence_parallel to true, which splits activations "
            "too"
        )


def errors_of_graphs(config: Any) -> Iterator[str]:
    """Yield the keys of a `Config` that would free memory which CUDA graphs keep."""
    if not config.compile.cuda_graphs:
        return
    kept = "compile.cuda_graphs keeps the memory of all activations of a layer"
    if isinstance(config.model, TransformerSection) and config.model.recompute != "none":
        yield (
            f"{kept}, so model.recompute {config.model.recompute!r} frees none of it: set one of "
            'them to its default (false, "none")'
        )
    if config.activation_checkpointing.cpu_checkpointing:
        yield (
            f"{kept}, so activation_checkpointing.cpu_checkpointing frees none of it: set one of "
            "them to false"
        )


def warnings_of_recompute(config: Any) -> Iterator[str]:
    """Yield a warning if a `Config` chooses the blocks of a built-in model, and all layers."""
    full = isinstance(config.model, TransformerSection) and config.model.recompute == "full"
    if full and any(_checkpoints_of_all_layers(config)):
        yield (
            "model.recompute 'full' recomputes each block, and activation checkpointing recomputes "
            "all layers: one of the two is enough"
        )


def _checkpoints_of_all_layers(config: Any) -> tuple[int, int | None]:
    return (
        config.pipeline.activation_checkpoint_interval,
        config.activation_checkpointing.number_checkpoints,
    )

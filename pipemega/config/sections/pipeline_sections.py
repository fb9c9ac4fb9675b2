"""`mesh`: the number of ranks on each axis.

`pipeline`: how layers are divided into stages, and the order in which stages run.

`compile`: torch.compile for each layer of a stage.

What a pipeline whose ranks have different devices cannot do.  Imports no torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model, field_validator

from pipemega.config.declarations import (
    Auto,
    Count,
    Name,
    NotNegative,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    own,
    refused,
    rule,
)
from pipemega.config.name_suggestions import did_you_mean, nearest
from pipemega.config.source import show
from pipemega.pipeline.schedules import AUTO, SCHEDULES, aliases, splits_backward
from pipemega.printing import counted

DeviceName = Literal["cpu", "cuda"]

_DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}

ONLY_1D = "only tensor mode 1d is supported, not 2d, 2.5d or 3d"


class MeshSection(Section):
    """Sizes of the mesh axes; their product is the number of ranks."""

    tensor: Count = own(1, "Tensor-parallel size: ranks that share each matrix, best in one node.")
    pipeline: Count = own(1, "Pipeline-parallel size: ranks that share the layers of the model.")
    data: Count | Auto = own(
        "auto", 'Data-parallel size: copies of the model; `"auto"`: ranks / (tensor * pipeline).'
    )
    expert: Count = own(
        1,
        "Expert-parallel size: data ranks that share the experts of a layer; divides `mesh.data`.",
    )
    sequence_parallel: bool = own(
        False, "Megatron's sequence parallelism: norms and dropout on slices of the sequence."
    )
    overlap_sequence_parallel: bool | Auto = own(
        "auto",
        "With sequence parallelism: overlap the product of a linear with its all-gather or "
        "reduce-scatter (Megatron's `--tp-comm-overlap`), except in compiled layers; "
        '`"auto"`: on GPUs.',
    )
    device: Auto | DeviceName | tuple[DeviceName, ...] = own(
        "auto",
        'Device of the model; `"auto"`: CUDA if it is available, else the CPU. A list gives the '
        'device of each pipeline rank: `["cpu", "cuda", "cuda"]`.',
    )
    backend: Literal["auto", "gloo", "nccl"] = own(
        "auto",
        "Backend of torch.distributed: gloo for a model on the CPU, nccl on GPUs (and gloo for "
        'tensors in CPU memory). With `device` "auto", `"gloo"` selects the CPU and `"nccl"` the '
        'GPUs. `"auto"`: the backend for the device.',
    )
    keep_cpu_memory: bool = own(
        True, "On a CPU: keep freed memory for the next micro-batch, do not return it to the OS."
    )
    timeout_seconds: Positive = own(600.0, "Longest wait for another rank before the run fails.")
    tensor_mode: Literal["1d", "2d", "2.5d", "3d"] = refused(
        "1d",
        'How matrices are cut over the tensor ranks: `"1d"`, by rows or by columns, as in '
        "Megatron-LM. Colossal-AI's other modes are refused with the following error.",
        f"{ONLY_1D}: remove the mode, and set mesh.tensor to the number of tensor ranks",
        own=True,
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        raw = dict(raw)
        tensor = raw.get("tensor")
        if isinstance(tensor, Mapping) and "mode" in tensor:
            # Colossal-AI's form.
            raw |= {"tensor": tensor.get("size", 1), "tensor_mode": tensor["mode"] or "1d"}
        if raw.get("device", "auto") == "auto" and raw.get("backend") in _DEVICE_OF_BACKEND:
            raw["device"] = _DEVICE_OF_BACKEND[raw["backend"]]
        return raw

    @rule("backend", "device")
    def _backend_of_device(self) -> Iterator[str]:
        device = _DEVICE_OF_BACKEND.get(self.backend)
        found = {*self.device} if isinstance(self.device, tuple) else {self.device}
        if device is not None and found != {device}:
            yield (
                f"mesh.backend {self.backend!r} is for mesh.device {device!r}, and mesh.device is "
                f'{show(self.device)}: set mesh.device to {device!r}, or mesh.backend to "auto"'
            )

    @rule("device", "pipeline")
    def _one_device_per_pipeline_rank(self) -> Iterator[str]:
        if isinstance(self.device, tuple) and len(self.device) != self.pipeline:
            yield (
                f"mesh.device is a list of {counted(len(self.device), 'device')}, and "
                f"mesh.pipeline is {self.pipeline}: give one device for each pipeline rank, or one "
                f'for all: "device": "cuda"'
            )

    @rule("expert", "data")
    def _experts_divide_the_data_ranks(self) -> Iterator[str]:
        if self.data != "auto" and self.data % self.expert:
            yield (
                f"mesh.data ({self.data}) is not a multiple of mesh.expert ({self.expert}): each "
                "group of that many data ranks shares the experts; change one of the two"
            )

    @rule("expert", "device")
    def _experts_on_equal_devices(self) -> Iterator[str]:
        if self.expert > 1 and self.mixed_devices:
            yield (
                f"mesh.expert ({self.expert}) needs equal devices on all ranks, and mesh.device is "
                f"{show(self.device)}: set mesh.expert to 1, or mesh.device to one device"
            )

    @property
    def mixed_devices(self) -> tuple[DeviceName, ...]:
        """The device of each pipeline rank if they differ; empty if they are equal."""
        several = isinstance(self.device, tuple) and len(set(self.device)) > 1
        return self.device if several and isinstance(self.device, tuple) else ()

    @property
    def first_device(self) -> Auto | DeviceName:
        """The device of the first pipeline rank: of all of them unless there are mixed devices."""
        return self.device[0] if isinstance(self.device, tuple) else self.device

    def device_of(self, pipeline_rank: int) -> DeviceName:
        """The device of a pipeline rank for a plan, which takes "auto" as CUDA."""
        wish = self.device[pipeline_rank] if isinstance(self.device, tuple) else self.device
        return "cpu" if wish == "cpu" else "cuda"

    def overlaps_products(self, device_type: str) -> bool:
        """Return whether linears overlap with collectives, on a mesh of such devices."""
        wish = self.overlap_sequence_parallel
        return self.sequence_parallel and (
            wish is True or (wish == "auto" and device_type == "cuda")
        )

    def remarks(self) -> Iterable[str]:
        if self.sequence_parallel and self.tensor == 1:
            yield "mesh.sequence_parallel does nothing while mesh.tensor is 1"
        if self.overlap_sequence_parallel is True:
            if self.tensor == 1:
                yield "mesh.overlap_sequence_parallel does nothing while mesh.tensor is 1"
            elif not self.sequence_parallel:
                yield "mesh.overlap_sequence_parallel does nothing without mesh.sequence_parallel"


if TYPE_CHECKING:
    ScheduleName = str
else:
    _NAMES = (*SCHEDULES, AUTO)
    ScheduleName = Literal[_NAMES]
_ALIASES = "; ".join(
    f'`"{alias}"` is also accepted for `"{name}"`' for alias, name in aliases().items()
)
_ANY_CHUNKS = ", ".join(f"`{name}`" for name, family in SCHEDULES.items() if family.chunks is None)
_PARTITIONS = ("auto", "parameters", "best", "uniform", "profile")
Partition = Literal["auto", "parameters", "best", "uniform", "profile"] | str | tuple[Whole, ...]
_SENT_WHOLE = "tensors are sent whole; with mesh.sequence_parallel they are already partitioned"


class PlanFile(Section):
    """A plan in a file instead of a schedule name; it is proven before it runs."""

    file: Name = own(
        ...,
        "Path of the file. CSV: one row per pipeline rank, with cells such as `0F3`, `1I2`, as in "
        "torch.distributed.pipelining. JSON: the output of `pipemega schedule --format json`.",
    )


Costs = NotNegative | tuple[NotNegative, ...]


class CostsSection(Section):
    """Costs of the steps of one micro-batch, for all stages of one rank together or per stage."""

    forward: Costs = own(
        ...,
        "Time of F in any unit: one number for all stages of a rank together, or a list with one "
        "number per stage.",
    )
    backward_input: Costs = own(..., "Time of I, in the same form.")
    backward_weight: Costs = own(..., "Time of W, in the same form.")
    backward: Costs | None = own(None, "Time of a full B; null: the sum of I and W.")
    activation: Costs | None = own(None, "Memory held after F, in any unit; null: 1 per rank.")
    kept: Costs | None = own(None, "Memory held between I and W; null: the same as `activation`.")
    message: NotNegative = own(0.0, "Time of a message between two ranks.")

    @rule("forward", "backward_input", "backward_weight", "backward", "activation", "kept")
    def _same_form_for_all_times(self) -> Iterator[str]:
        lists = {
            name: len(value)
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), tuple)
        }
        numbers = [n for n in _TIMES if n not in lists]
        if lists and numbers:
            listed = next(iter(lists))
            yield (
                f"pipeline.costs.{listed} has one number per stage, and "
                f"pipeline.costs.{numbers[0]} is one number per rank: write forward, "
                "backward_input and backward_weight in the same form"
            )
        if len(set(lists.values())) > 1:
            found = ", ".join(f"{count} in {name}" for name, count in lists.items())
            yield f"pipeline.costs has different numbers of stages: {found}"
        if not lists and not any(getattr(self, name) for name in _TIMES):
            yield f"pipeline.costs: {', '.join(_TIMES)} are all 0: one must be above 0"

    @property
    def num_stages(self) -> int | None:
        """The length of the lists; None if the numbers are per rank."""
        return len(self.forward) if isinstance(self.forward, tuple) else None


_TIMES = ("forward", "backward_input", "backward_weight")


class PipelineSection(Section):
    """How layers are divided into stages, and the order in which stages run."""

    stages: Count | Auto = honoured(
        "auto",
        "Another name of `mesh.pipeline`; if both keys are set, they must be equal. It is the "
        "number of pipeline ranks, also if a rank has several stages (`chunks`).",
    )
    partition: Partition = honoured(
        "auto",
        'How layers are divided into stages. `"auto"`: so that the simulated step of the schedule '
        "is shortest. The times of the layers come from counted FLOPs and bytes and fixed rates, "
        "so the same config has the same stages everywhere. Exception: if the schedule is also "
        '`"auto"` and no `costs` are given, times are measured, and the stages can differ between '
        "machines. "
        'Or a quantity that is divided evenly: `"parameters"` (same as `"best"`; of experts those '
        'that a token uses), `"uniform"` '
        '(layers), `"profile"` (measured time), `"type:REGEX"` (layers whose class name matches). '
        "Or explicit bounds such as [0, 5, 9, 14].",
    )
    seed_layers: bool = honoured(
        False,
        "Seed the constructor of each layer with `seed` + its position, as DeepSpeed does; false: "
        "with a seed derived from `seed` and the name of the layer.",
    )
    activation_checkpoint_interval: Whole = honoured(
        0, "Recompute in groups of this many layers; a group stores only its input; 0: off."
    )
    pipe_partitioned: bool | None = ignored(
        None, "Partition sent activations over the tensor ranks.", _SENT_WHOLE, agrees=[False]
    )
    grad_partitioned: bool | None = ignored(
        None, "Partition sent gradients over the tensor ranks.", _SENT_WHOLE, agrees=[False]
    )
    use_reentrant: bool | None = ignored(
        None, "Use reentrant recomputation.", "pipemega has one implementation of recomputation"
    )
    schedule: ScheduleName | PlanFile = own(
        "1f1b",
        f'Order of forwards and backwards; {_ALIASES}; `"auto"`: search for the best plan for '
        '`costs` and `memory_limit`; `{"file": ...}`: the plan in this file.',
    )
    chunks: Count | Auto = own(
        "auto",
        f'Stages per rank: any number for {_ANY_CHUNKS} (`"auto"`: 2); fixed for the other '
        'schedules (`"auto"`: that number). With schedule `"auto"`, `"auto"` tries 1, 2, '
        "4 and each number up to 8 that gives all stages equally many layers. It tries each of "
        "these numbers twice, with the stages in a loop and with the stages in a V, and takes the "
        "best. If `costs` are lists, the number is the length of a list divided by the number of "
        "pipeline ranks.",
    )
    costs: CostsSection | Auto | None = own(
        None, 'Costs of F, I, W for schedule `"auto"`; null, `"auto"`: measured in the first steps.'
    )
    memory_limit: Positive | Auto = own(
        "auto",
        'For schedule or partition `"auto"`: limit for each rank, in bytes, of activations and of '
        "tensors stored for queued W (in the unit of `costs.activation` if costs are given). "
        '`"auto"`: with schedule `"auto"`, the limit is what 1F1B needs on the rank with the '
        "highest peak (if no costs are given, the total memory is also limited to what 1F1B "
        "needs); with any other schedule there is no limit.",
    )
    weight_queue_limit: NotNegative | Auto | None = own(
        "auto",
        "Limit for each rank, in bytes, of tensors stored for queued W, for schedules with "
        "split backward. If an I would exceed the limit, queued W run before it; if one I "
        "alone exceeds the limit, a full B replaces I and W. The results are bitwise those "
        "without a limit (with a plan from a file, gradients may be summed in another order). "
        '`"auto"`: the limit is computed from a reference: this schedule with a full B in '
        "place of each I and W, or 1F1B on the same stages if 1F1B needs more memory. M is the "
        "memory of activations and messages on one rank of the reference: the rank where it is "
        "highest. On each rank, activations, messages and the tensors stored for queued W "
        "together need at most 1.4 * M. If layers are recomputed, a rank may exceed 1.4 * M, "
        "as long as its whole memory is at most 1.2 times the highest whole memory of a rank "
        'of the reference. With `"auto"`, a plan from a file has no limit. null: no limit.',
    )
    fill_waits: bool = own(
        False,
        "With `mesh.expert` and a schedule with split backward: run parts of queued W while tokens "
        "are exchanged in F and I. Each W comes one place later, so a rank stores the tensors of "
        "one more W. Counted times decide which part fits. The results are bitwise the same.",
    )
    vocabulary: Literal["auto", "stage", "parallel"] = own(
        "auto",
        'Where the embedding and the output head are: `"stage"`: in the first and the last stage; '
        '`"parallel"`: sharded over all pipeline ranks, so that with a large vocabulary no stage '
        'has more work than the others (docs/pipeline.md); `"auto"`: `"stage"`, except that '
        'schedule `"auto"` takes `"parallel"` if the simulated step is then at least 10 % shorter.',
    )
    shapes: Literal["cached", "declared", "exchanged"] = own(
        "cached",
        'How a receiver gets the shapes of messages: `"cached"`: sent with the first message; '
        '`"declared"`: declared by the model; `"exchanged"`: sent with every message.',
    )
    max_ctas: Whole = own(
        4,
        "On a GPU: most blocks (CTAs) of a message between stages, NCCL's `max_ctas`. A receive "
        "occupies one multiprocessor for each block until its message arrives. 0: NCCL decides.",
    )
    warm_up: bool = own(
        True,
        "On several GPUs: before the first step, and before steps and evaluations with other "
        "shapes, run one micro-batch through all stages, so that CUDA loads the kernels while no "
        "message waits (docs/gpu.md). It changes no parameter, gradient, buffer or generator. Set "
        "it to false if layers count their calls in other attributes.",
    )
    optimizer_sync: Literal["fenced", "post_validate"] = own(
        "fenced",
        'When a rank runs the optimizer step: `"fenced"`: when all ranks have the gradient norm; '
        '`"post_validate"`: as `"fenced"` until `optimizer_sync_after` consecutive steps had no '
        "clipping or overflow, then without waiting for the norm; the update is undone if the norm "
        "requires clipping or a skip (docs/optimizer.md).",
    )
    optimizer_sync_after: Whole = own(
        10,
        "With `post_validate`: number of consecutive steps without clipping or overflow after "
        "which ranks no longer wait for the norm; 0: never wait.",
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        name = raw.get("schedule")
        if name is None and raw.get("costs") is not None:
            return raw | {"schedule": AUTO}
        if isinstance(name, str) and name in aliases():
            return raw | {"schedule": aliases()[name]}
        return raw

    @field_validator("partition")
    @classmethod
    def _valid_partition(cls, partition: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(partition, tuple):
            rising = all(a < b for a, b in pairwise(partition))
            if len(partition) < 2 or partition[0] != 0 or not rising:
                raise ValueError(
                    f"pipeline.partition {list(partition)} must start with 0 and increase, with "
                    "one number more than stages: stage i has the layers from bounds[i] to "
                    "bounds[i + 1] - 1"
                )
        elif partition.startswith("type:"):
            _check_pattern(partition.removeprefix("type:"))
        elif partition not in _PARTITIONS:
            raise ValueError(
                "pipeline.partition must be 'auto', 'parameters', 'best', 'uniform', 'profile', "
                f"'type:REGEX' or a list of bounds, not {partition!r}{_suggested(partition)}"
            )
        return partition

    @rule("chunks", "schedule")
    def _chunks_match_the_schedule(self) -> Iterator[str]:
        family = SCHEDULES.get(str(self.schedule))
        error = family.chunks_error(self.chunks) if family and self.chunks != "auto" else None
        if error is not None:
            yield error

    @rule("costs", "memory_limit", "schedule", "partition")
    def _costs_only_for_schedule_auto(self) -> Iterator[str]:
        if self.schedule == AUTO:
            return
        if isinstance(self.schedule, PlanFile):
            why = f"{self.schedule.file!r} is already a plan"
        else:
            why = f"schedule {self.schedule!r} does not use it"
        if self.costs is not None:
            yield (
                f"pipeline.costs is for pipeline.schedule 'auto', and {why}: remove "
                f"pipeline.costs, or set pipeline.schedule to 'auto'"
            )
        if self.memory_limit != "auto" and self.partition != "auto":
            yield (
                f"pipeline.memory_limit is for pipeline.schedule or pipeline.partition 'auto'; "
                f"{why}, and partition {self.partition!r} does not use it: remove "
                f"pipeline.memory_limit, or set one of the two to 'auto'"
            )

    @rule("weight_queue_limit", "schedule")
    def _weight_queue_limit_needs_split_backward(self) -> Iterator[str]:
        name = self.schedule
        limit = self.weight_queue_limit
        if not isinstance(limit, str | None) and name in SCHEDULES and not splits_backward(name):
            yield (
                f"pipeline.weight_queue_limit limits the queue of W, and schedule {name!r} has "
                "whole backwards: remove pipeline.weight_queue_limit, or use a schedule with split "
                "backward, such as 'zb-h1'"
            )

    @rule("vocabulary", "optimizer_sync")
    def _passes_cannot_be_discarded(self) -> Iterator[str]:
        if self.vocabulary == "parallel" and self.optimizer_sync == "post_validate":
            yield (
                "pipeline.optimizer_sync 'post_validate' may discard forwards and run them again, "
                "which the passes of pipeline.vocabulary 'parallel' cannot: set "
                "pipeline.optimizer_sync to 'fenced', or pipeline.vocabulary to 'stage'"
            )

    @property
    def stages_per_rank(self) -> int | None:
        """The chunks with "auto" resolved; None if only the plan determines them."""
        if self.chunks != "auto":
            return self.chunks
        if self.schedule == AUTO or isinstance(self.schedule, PlanFile):
            return None
        return SCHEDULES[self.schedule].default_chunks


def _suggested(partition: str) -> str:
    return did_you_mean(partition, _PARTITIONS) if nearest(partition, _PARTITIONS) else ""


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"pipeline.partition 'type:{pattern}' is not a regular expression: {error}"
        ) from None
    if not pattern:
        raise ValueError("pipeline.partition 'type:' needs a regular expression after the colon")


def bounds_errors(partition: str | tuple[int, ...], num_stages: int) -> Iterator[str]:
    """Yield the error of explicit bounds for another number of stages."""
    if isinstance(partition, tuple) and len(partition) != num_stages + 1:
        yield (
            f"pipeline.partition has {len(partition)} bounds, for {len(partition) - 1} stages, but "
            f"there are {num_stages}: write {num_stages + 1} numbers"
        )


# Arguments of torch.compile that `kwargs` may have; each is also a key of the section.
_ARGUMENTS = ("backend", "mode", "dynamic")
# Modes that add CUDA graphs -> the same without them.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
_DEEPCOMPILE = (
    "autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
)

if TYPE_CHECKING:
    _DeepCompileKeys = Section
else:
    _DeepCompileKeys = create_model(
        "_DeepCompileKeys",
        __base__=Section,
        __module__=__name__,
        **{
            name: (Any, ignored(None, "An option of DeepCompile.", "DeepCompile is not used"))
            for name in _DEEPCOMPILE.split()
        },
    )


class CompileSection(_DeepCompileKeys):
    """torch.compile for each layer in training; see docs/gpu.md."""

    enabled: bool | Auto = honoured(
        "auto",
        'Compile the forward and backward of each layer; `"auto"`: if all ranks use GPUs.',
    )
    backend: Name = honoured("inductor", "Backend of torch.compile.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = own(
        "default", "Mode of torch.compile, without its CUDA graphs; see `cuda_graphs`."
    )
    cuda_graphs: bool = own(
        False,
        "On GPUs replay the forward and the backward of each layer as CUDA graphs, with memory for "
        "each micro-batch in flight; also of layers that are not compiled.",
    )
    dynamic: bool | None = own(
        None,
        "Compile kernels that work with any size of the inputs: true: always; false: never; null: "
        "when a layer gets inputs of a second size.",
    )
    kwargs: Mapping[str, Any] | None = honoured(
        None, "Arguments of torch.compile: `backend`, `mode`, `dynamic`."
    )
    deepcompile: bool = refused(
        False,
        "DeepSpeed's compiler of the whole step.",
        "DeepCompile rewrites the graph of DeepSpeed's engine: set compile.enabled instead, which "
        "compiles each layer by torch.compile",
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        """Move the arguments in `kwargs` to the keys of the same names."""
        if raw is None or isinstance(raw, bool):
            return {"enabled": bool(raw)}
        given = raw.get("kwargs") if isinstance(raw, Mapping) else None
        if not isinstance(given, Mapping):
            return raw
        moved = {name: given[name] for name in _ARGUMENTS if name in given}
        rest = {name: value for name, value in given.items() if name not in moved}
        return {**moved, **raw, "kwargs": rest}

    @rule("kwargs")
    def _kwargs_are_known(self) -> Iterator[str]:
        unknown = [name for name, value in (self.kwargs or {}).items() if value]
        if unknown:
            yield (
                f"compile.kwargs has {unknown[0]!r}, which pipemega does not pass to "
                f"torch.compile: remove it; {', '.join(_ARGUMENTS)} are allowed"
            )

    def applies(self, device_type: str) -> bool:
        """Return whether the layers of a mesh of such devices are compiled."""
        return self.enabled is True or (self.enabled == "auto" and device_type == "cuda")

    @property
    def mode_without_graphs(self) -> str:
        """The mode without CUDA graphs."""
        return _WITHOUT_GRAPHS.get(self.mode, self.mode)

    def remarks(self) -> Iterable[str]:
        if self.enabled and self.mode in _WITHOUT_GRAPHS:
            yield (
                f"compile.mode {self.mode!r} runs as {self.mode_without_graphs!r}: a CUDA graph "
                "has one memory for its activations, and a pipeline holds those of several "
                "micro-batches: set compile.cuda_graphs"
            )


def errors_of_mixed_devices(config: Any) -> Iterator[str]:
    """Yield the keys of a `Config` that need equal devices on all pipeline ranks."""
    devices, section = config.mesh.mixed_devices, config.pipeline
    if not devices:
        return
    listed = f"mesh.device [{', '.join(devices)}] has ranks of different speed"
    if section.schedule == "auto" and not isinstance(section.costs, CostsSection):
        yield (
            f"pipeline.schedule 'auto' assumes ranks of equal speed, and {listed}: name a "
            f"schedule, such as '1f1b' or 'zb-h1'"
        )
    if section.partition == "profile":
        yield (
            f"pipeline.partition 'profile' measures all layers on the device of rank 0, and "
            f"{listed}: give the bounds of the stages, or use 'parameters'"
        )
    if section.vocabulary == "parallel":
        yield (
            f"pipeline.vocabulary 'parallel' gives each rank an equal part of the vocabulary, and "
            f"{listed}: set it to 'stage'"
        )

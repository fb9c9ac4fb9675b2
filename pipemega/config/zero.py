"""`zero_optimization`: ZeRO stage 1, offload of the optimizer, and what the mesh saves."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipemega.config.key_kinds import Section, honoured, ignored, refused, replaced, section
from pipemega.config.unsupported import STAGE_3, STAGE_3_NAMES, UnsupportedZeroKeys
from pipemega.config.value_types import NotNegative, Whole

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
        None, "Stage 1: overlap communication with backward and the next forward; null: false."
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
        weight: in the dtype of the computation.
        gradient: in the dtype of accumulation.
        optimizer: optimizer state and master weight.
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

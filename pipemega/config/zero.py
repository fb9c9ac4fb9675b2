"""`zero_optimization`: what of DeepSpeed's ZeRO is here.  Floor 1."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipemega.config.keys import (
    NotNegative,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    refused,
    section,
)

_OFF = "ZeRO is off (stage 0), and there is nothing for it to tune"
_NO_OFFLOAD = "nothing is moved by it here"
_STAGE_3 = "it belongs to ZeRO stage 3, which a pipeline cannot use"
_WEIGHTS_STAY = (
    "weights stay where they compute: a pipeline reads each of them in every micro-batch; "
    "zero_optimization.offload_optimizer.device 'cpu' moves masters and optimizer state"
)
_OLD_OFFLOAD = "write zero_optimization.offload_optimizer.device 'cpu' in its place"
_NO_DISK = "only 'none' and 'cpu' are here: the state has to be read and written in every step"


class _Offload(Section):
    """What DeepSpeed's two sections have in common."""

    nvme_path: str | None = ignored(None, "Folder on a fast disk.", _NO_OFFLOAD)
    buffer_count: Whole | None = ignored(None, "Buffers.", _NO_OFFLOAD)
    buffer_size: NotNegative | None = ignored(None, "Size of each.", _NO_OFFLOAD)
    max_in_cpu: NotNegative | None = ignored(None, "What stays in host memory.", _NO_OFFLOAD)
    pipeline_read: bool = ignored(False, "Read ahead.", _NO_OFFLOAD)
    pipeline_write: bool = ignored(False, "Write behind.", _NO_OFFLOAD)
    fast_init: bool = ignored(False, "Start faster.", _NO_OFFLOAD)
    ratio: NotNegative | None = ignored(None, "Share that is moved.", _NO_OFFLOAD, agrees=[1.0])

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed writes null for none.
        if isinstance(raw, dict) and raw.get("device", "") is None:
            return raw | {"device": "none"}
        return raw


class OffloadParamSection(_Offload):
    """DeepSpeed's `offload_param`."""

    device: Literal["none"] = refused("none", "Where the weights lie.", _WEIGHTS_STAY)
    pin_memory: bool = ignored(False, "Pin host memory.", _NO_OFFLOAD)


class OffloadOptimizerSection(_Offload):
    """DeepSpeed's `offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] = refused(
        "none",
        'Where masters and optimizer state lie and the step is done: "cpu", or with the weights.',
        {"nvme": _NO_DISK},
        accepts=["cpu"],
    )
    pin_memory: bool = honoured(
        False, "Host memory that a GPU copies from and to directly: quicker, and never swapped."
    )


class ZeroSection(Section):
    """Cutting the optimizer's state over the data ranks."""

    stage: Whole = honoured(
        0,
        "What is cut over the data ranks: 0 nothing, 1 the optimizer's state and masters; 2 and 3 "
        "are refused, with what 1 saves on the mesh at hand.",
        le=3,
    )
    offload_param: OffloadParamSection = section(
        OffloadParamSection, "DeepSpeed: weights on another device."
    )
    offload_optimizer: OffloadOptimizerSection = section(
        OffloadOptimizerSection, "Masters and optimizer state on another device; with any stage."
    )
    cpu_offload: bool = refused(False, "DeepSpeed's old offload_optimizer.", _OLD_OFFLOAD)
    cpu_offload_param: bool = refused(False, "DeepSpeed's old offload_param.", _WEIGHTS_STAY)
    cpu_offload_use_pin_memory: bool = ignored(
        False, "Pin host memory.", "write zero_optimization.offload_optimizer.pin_memory"
    )
    contiguous_gradients: bool = ignored(
        True, "Gradients in one buffer.", "they always are", agrees=[True]
    )
    reduce_scatter: bool = ignored(
        True, "Reduce to the owner only.", "stage 1 always does", agrees=[True]
    )
    reduce_bucket_size: Positive = honoured(
        4e7,
        "Stage 1: most elements that one reduction takes, unless a parameter alone is larger "
        "(DeepSpeed: 5e8).",
    )
    use_multi_rank_bucket_allreduce: bool = ignored(
        True, "Reduce for several ranks at once.", "each bucket has a slice of every rank",
        agrees=[True],
    )  # fmt: skip
    allgather_partitions: bool = ignored(
        True, "Gather weights by all-gather.", "they always are", agrees=[True]
    )
    allgather_bucket_size: Positive = honoured(
        4e7,
        "Stage 1: most elements that one all-gather takes; it takes the buckets of the reduction, "
        "so the smaller of the two sizes counts (DeepSpeed: 5e8).",
    )
    overlap_comm: bool | None = honoured(
        None,
        "Stage 1: reduce a bucket as soon as its gradients are final, and gather weights beside "
        "the next forwards; null: false.",
    )
    load_from_fp32_weights: bool = ignored(
        True, "Masters come from the checkpoint.", "they always do", agrees=[True]
    )
    elastic_checkpoint: bool = ignored(
        False, "Checkpoints for any number of ranks.", "they always are", agrees=[True]
    )
    sub_group_size: NotNegative = ignored(1e9, "Parameters per optimizer step.", _STAGE_3)
    stage3_prefetch_bucket_size: NotNegative = ignored(5e7, "Weights read ahead.", _STAGE_3)
    stage3_param_persistence_threshold: NotNegative = ignored(
        1e5, "Smaller weights are not cut.", _STAGE_3
    )
    stage3_model_persistence_threshold: NotNegative | None = ignored(
        None, "How much is not cut.", _STAGE_3
    )
    stage3_max_live_parameters: NotNegative = ignored(1e9, "Weights gathered at once.", _STAGE_3)
    stage3_max_reuse_distance: NotNegative = ignored(1e9, "When to let go of them.", _STAGE_3)
    stage3_gather_16bit_weights_on_model_save: bool = ignored(
        False, "Gather weights to save them.", _STAGE_3
    )
    stage3_gather_fp16_weights_on_model_save: bool = ignored(
        False, "Gather weights to save them (old name).", _STAGE_3
    )
    stage3_module_granularity_threshold: NotNegative = ignored(
        0, "Small modules gathered whole.", _STAGE_3
    )
    stage3_use_all_reduce_for_fetch_params: bool = ignored(False, "Gather by all-reduce.", _STAGE_3)
    memory_efficient_linear: bool = ignored(True, "A linear that saves memory.", _STAGE_3)
    ignore_unused_parameters: bool = ignored(
        True, "Parameters without gradient are no error.", "they never are", agrees=[True]
    )
    legacy_stage1: bool = ignored(False, "DeepSpeed's old code.", "there is one stage 1 here")
    round_robin_gradients: bool = ignored(
        False, "Share gradients out in turn.", "every rank owns a slice of each bucket"
    )
    zero_hpz_partition_size: Whole = refused(1, "ZeRO++: second partition inside a node.", _STAGE_3)
    zero_quantized_weights: bool = refused(False, "ZeRO++: weights in 8 bits.", _STAGE_3)
    zero_quantized_nontrainable_weights: bool = refused(
        False, "ZeRO++: frozen weights in 8 bits.", _STAGE_3
    )
    zero_quantized_gradients: bool = refused(False, "ZeRO++: gradients in 4 bits.", _STAGE_3)
    mics_shard_size: int = refused(-1, "MiCS: ranks that share the weights.", _STAGE_3)
    mics_hierarchical_params_gather: bool = refused(False, "MiCS: gather in two levels.", _STAGE_3)

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed's oldest form: the section is a bare bool.
        return {"stage": int(raw)} if isinstance(raw, bool) else raw

    def remarks(self) -> Iterable[str]:
        if self.stage == 0:
            for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm"):
                if getattr(self, name) not in (type(self).model_fields[name].default, False):
                    yield f"zero_optimization.{name} is ignored: {_OFF}"

    @property
    def offloads(self) -> bool:
        return self.offload_optimizer.device == "cpu"


@dataclass(frozen=True)
class ParameterBytes:
    """What a parameter takes on a rank that holds it, between two steps.

    Args:
        weight: as it computes.
        gradient: as it is summed up.
        optimizer: the optimizer's state, and the master.
    """

    weight: int
    gradient: int
    optimizer: int

    def at(self, stage: int, data: int) -> float:
        """With ZeRO `stage` on `data` data ranks."""
        parts = (self.optimizer, self.gradient, self.weight)
        return sum(p / data if stage > n else p for n, p in enumerate(parts))

    @property
    def sum(self) -> str:
        return f"{self.weight} + {self.gradient} + {self.optimizer}"


@dataclass(frozen=True)
class ZeroOnMesh:
    """What ZeRO comes to on a mesh.

    Args:
        stage: of the config.
        each: bytes of a parameter.
        data, pipeline, tensor: sizes of the mesh.
    """

    stage: int
    each: ParameterBytes
    data: int
    pipeline: int
    tensor: int

    @property
    def refusal(self) -> str | None:
        """Why not, and what there is in its place; None where nothing is wrong."""
        if self.stage < 2:
            return None
        cut = f"mesh.pipeline {self.pipeline} x mesh.tensor {self.tensor}"
        ranks = self.pipeline * self.tensor
        now, one, wished = (
            f"{self.each.at(stage, self.data) / ranks:.3g}" for stage in (0, 1, self.stage)
        )
        return (
            f"zero_optimization.stage {self.stage} cannot be had with a pipeline: it cuts the "
            f"gradients{' and weights' if self.stage == 3 else ''} over the data ranks, so that "
            f"each micro-batch would have to reduce{' and gather' if self.stage == 3 else ''} them "
            f"anew; stage 1 reduces once a step. A parameter takes {self.each.sum} bytes here "
            f"(weight, gradient, optimizer). {cut} divide all of them by {ranks}, and stage 1 on "
            f"{_ranks(self.data)} the last by {self.data}: {one} bytes a rank for each parameter "
            f"of the model (stage 0: {now}; stage {self.stage} would be {wished}). Set "
            f"zero_optimization.stage to 1, and raise mesh.pipeline or mesh.tensor for more"
        )

    @property
    def notes(self) -> Iterator[str]:
        """To be said once in the log."""
        if self.stage != 1:
            return
        if self.data == 1:
            yield (
                "zero_optimization.stage 1 saves nothing on one data rank: there is nobody to "
                "share the optimizer's state with"
            )
            return
        yield (
            f"ZeRO stage 1: of {self.each.sum} bytes a parameter (weight, gradient, optimizer) "
            f"the last are cut over {_ranks(self.data)}: {self.each.at(0, 1):.3g} become "
            f"{self.each.at(1, self.data):.3g} on each rank that holds it"
        )


def _ranks(data: int) -> str:
    return f"{data} data rank{'s' if data > 1 else ''}"

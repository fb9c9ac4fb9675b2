"""`zero_optimization`: what of DeepSpeed's ZeRO is here.  Floor 1."""

from typing import Any, Literal

from pipemega.config.keys import NotNegative, Section, Whole, ignored, refused, section

_OFF = "ZeRO is off (stage 0), and there is nothing for it to tune"
_STAGE_3 = "it belongs to ZeRO stage 3, which a pipeline cannot use"
_NO_OFFLOAD = "not here yet: the state stays on the device; write 'none' or remove the block"
_TOO_HIGH = (
    "stages 2 and 3 cut the gradients (and weights) over the data ranks, so that each of a "
    "pipeline's micro-batches would have to reduce (and gather) them anew; stage 1 reduces once a "
    "step. With Adam and 16-bit weights a parameter takes 2 + 2 + 12 bytes for weight, gradient "
    "and optimizer; mesh.pipeline p already divides all 16 by p, and stage 1 over d data ranks "
    "the 12 by d. Raise mesh.pipeline or mesh.tensor, and set zero_optimization.stage to 0"
)


class OffloadSection(Section):
    """DeepSpeed's `offload_param` and `offload_optimizer`."""

    device: Literal["none"] = refused("none", "Where the state lies.", _NO_OFFLOAD)
    nvme_path: str | None = ignored(None, "Folder on a fast disk.", _NO_OFFLOAD)
    buffer_count: Whole | None = ignored(None, "Buffers.", _NO_OFFLOAD)
    buffer_size: NotNegative | None = ignored(None, "Size of each.", _NO_OFFLOAD)
    max_in_cpu: NotNegative | None = ignored(None, "What stays in host memory.", _NO_OFFLOAD)
    pin_memory: bool = ignored(False, "Pin host memory.", _NO_OFFLOAD)
    pipeline_read: bool = ignored(False, "Read ahead.", _NO_OFFLOAD)
    pipeline_write: bool = ignored(False, "Write behind.", _NO_OFFLOAD)
    fast_init: bool = ignored(False, "Start faster.", _NO_OFFLOAD)
    ratio: NotNegative | None = ignored(None, "Share that is moved.", _NO_OFFLOAD)

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed writes null for none.
        if isinstance(raw, dict) and raw.get("device", "") is None:
            return raw | {"device": "none"}
        return raw


class ZeroSection(Section):
    """Cutting the optimizer's state over the data ranks."""

    stage: Whole = refused(
        0,
        "What is cut: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.",
        {
            1: "cutting the optimizer's state is not here yet; set it to 0 (mesh.pipeline and "
            "mesh.tensor divide that state too)",
            2: _TOO_HIGH,
            3: _TOO_HIGH,
        },
        le=3,
    )
    offload_param: OffloadSection = section(OffloadSection, "DeepSpeed: weights on another device.")
    offload_optimizer: OffloadSection = section(
        OffloadSection, "DeepSpeed: optimizer state on another device."
    )
    cpu_offload: bool = refused(False, "DeepSpeed's old offload_optimizer.", _NO_OFFLOAD)
    cpu_offload_param: bool = refused(False, "DeepSpeed's old offload_param.", _NO_OFFLOAD)
    cpu_offload_use_pin_memory: bool = ignored(False, "Pin host memory.", _NO_OFFLOAD)
    contiguous_gradients: bool = ignored(
        True, "Gradients in one buffer.", "they always are", agrees=[True]
    )
    reduce_scatter: bool = ignored(True, "Reduce to the owner only.", _OFF)
    reduce_bucket_size: NotNegative = ignored(5e8, "Elements per reduction.", _OFF)
    use_multi_rank_bucket_allreduce: bool = ignored(True, "Reduce for several ranks at once.", _OFF)
    allgather_partitions: bool = ignored(True, "Gather weights by all-gather.", _OFF)
    allgather_bucket_size: NotNegative = ignored(5e8, "Elements per all-gather.", _OFF)
    overlap_comm: bool | None = ignored(None, "Reduce while the backward pass runs.", _OFF)
    load_from_fp32_weights: bool = ignored(True, "Masters come from the checkpoint.", _OFF)
    elastic_checkpoint: bool = ignored(False, "Checkpoints for any number of ranks.", _OFF)
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
    legacy_stage1: bool = ignored(False, "DeepSpeed's old code.", _OFF)
    round_robin_gradients: bool = ignored(False, "Share gradients out in turn.", _OFF)
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

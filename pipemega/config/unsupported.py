"""The DeepSpeed keys that have no counterpart in pipemega, as one table with reasons.

A block (the section of a feature) is accepted with a warning if it is disabled, and refused if it
is enabled. Other keys are ignored with a warning, or refused.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from pipemega.config.declarations import NotNegative, Section, Whole, block, ignored, refused

_REMOVE = "remove the block or disable it"
STAGE_3 = "this key belongs to ZeRO stage 3, which is not supported"


_BLOCKS = {
    "amp": block(
        "Mixed precision by NVIDIA apex's amp.",
        "use bf16.enabled or fp16.enabled",
        "enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 "
        "master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale "
        "max_loss_scale",
    ),
    "torch_autocast": block(
        "Mixed precision by torch.autocast.",
        "use bf16.enabled or fp16.enabled",
        "enabled dtype lower_precision_safe_modules",
    ),
    "comet": block(
        "Logging to Comet.",
        "use wandb, tensorboard or csv_monitor",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode",
    ),
    "elasticity": block(
        "Batch sizes that work with many numbers of ranks.",
        f"set train_batch_size and its factors, and {_REMOVE}",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
        "prefer_larger_batch version ignore_non_elastic_batch_info num_gpus_per_node "
        "model_parallel_size",
    ),
    "autotuning": block(
        "Search for the fastest config.",
        f"`pipemega plan --compare all` compares schedules; {_REMOVE}",
        "enabled start_step end_step metric_path arg_mappings metric model_info results_dir "
        "exps_dir overwrite fast start_profile_step end_profile_step tuner_type "
        "tuner_early_stopping tuner_num_trials model_info_path mp_size max_train_batch_size "
        "min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
    ),
    "curriculum_learning": block(
        "Sequence lengths that grow during training.",
        _REMOVE,
        "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    "data_efficiency": block(
        "Sampling by difficulty, and random token dropping.",
        _REMOVE,
        "enabled seed data_sampling data_routing",
        on="nested",
    ),
    "compression_training": block(
        "Quantization and pruning during training.",
        _REMOVE,
        "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
        "channel_pruning layer_reduction",
        on="nested",
    ),
    "sparse_attention": block(
        "Block-sparse attention.",
        "attention is dense and causal; remove the block",
        "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
        "horizontal_global_attention num_different_global_patterns num_random_blocks "
        "local_window_blocks global_block_indices global_block_end_indices "
        "num_sliding_window_blocks",
        on="mode",
    ),
    "progressive_layer_drop": block("Randomly skipped layers.", _REMOVE, "enabled theta gamma"),
    "eigenvalue": block(
        "Measurement of the curvature of the loss.",
        _REMOVE,
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    "hybrid_engine": block(
        "Alternating training and fast generation (RLHF).",
        _REMOVE,
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    "nebula": block(
        "Checkpoints by Azure's Nebula.",
        f"checkpoints use torch.distributed.checkpoint; {_REMOVE}",
        "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention "
        "enable_nebula_load load_path",
    ),
    "tensor_parallel": block(
        "DeepSpeed's automatic tensor parallelism.",
        "set mesh.tensor to the value of autotp_size instead",
        "autotp_size preset_model tp_overlap_comm partition_config tp dtype tensor_parallel "
        "vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple "
        "keep_module_on_host replace_with_kernel_inject",
        on="autotp_size",
    ),
    "expert_parallel": block(
        "Expert parallelism.", "expert parallelism is not supported; remove the block", on="any"
    ),
}
# The types of these keys, and their declarations.
_OTHERS = {
    "aio": (
        Mapping[str, Any] | None,
        ignored(None, "Asynchronous I/O for NVMe offload.", "there is no NVMe offload"),
    ),
    "graph_harvesting": (
        bool, refused(False, "Capture of the step as a CUDA graph.", "set it to false"),
    ),
    "disable_python_gc": (
        bool, ignored(False, "Collect garbage between steps only.", "Python's collector stays on"),
    ),
    "use_data_before_expert_parallelism": (
        bool, ignored(False, "Order of the data and expert ranks.", "there are no expert ranks"),
    ),
    "weight_quantization": (
        Mapping[str, Any] | None,
        ignored(None, "Quantized weights of DeepSpeed's inference.", "training does not read it"),
    ),
    "datastates_ckpt": (
        Mapping[str, Any] | None,
        ignored(
            None, "Checkpoints by DataStates.",
            "torch.distributed.checkpoint writes; checkpoint.async writes in the background",
        ),
    ),
    "log_level": (
        str | None,
        ignored(
            None, "DeepSpeed's log level.", "set logging.level instead"
        ),
    ),
    "zero_force_ds_cpu_optimizer": (
        bool,
        ignored(
            True, "Require DeepSpeed's CPU optimizer for offloaded state.",
            "with zero_optimization.offload_optimizer.device 'cpu', torch's optimizers run on the "
            "CPU",
        ),
    ),
}  # fmt: skip

_ZENFLOW = block(
    "ZenFlow: asynchronous updates of offloaded optimizer state.",
    "with offload_optimizer.device 'cpu' the update is always a part of the step; remove the block",
    on="any",
)

# Name, default and meaning of the ZeRO keys that switch what is always done here.
_ZERO_ALWAYS = (
    ("contiguous_gradients", True, "Store gradients in one buffer."),
    ("reduce_scatter", True, "Reduce-scatter gradients instead of all-reducing them."),
    ("use_multi_rank_bucket_allreduce", True, "Reduce the slices of several ranks together."),
    ("allgather_partitions", True, "All-gather weights."),
    ("load_from_fp32_weights", True, "Load fp32 master weights from the checkpoint."),
    ("elastic_checkpoint", False, "Write checkpoints that load on any number of ranks."),
    ("ignore_unused_parameters", True, "Do not fail if a parameter gets no gradient."),
    ("compute_grad_norm", True, "Compute the norm of the gradients."),
)
# Name, type, default and meaning of the keys of ZeRO stage 3; DeepSpeed reads them only there.
_STAGE_3_KEYS = (
    ("sub_group_size", NotNegative, 1e9, "Parameters per optimizer step."),
    ("stage3_prefetch_bucket_size", NotNegative, 5e7, "Number of parameters to prefetch."),
    ("stage3_param_persistence_threshold", NotNegative, 1e5, "Do not shard smaller parameters."),
    (
        "stage3_model_persistence_threshold",
        NotNegative | None,
        None,
        "Largest number of parameters that are not sharded.",
    ),
    ("stage3_max_live_parameters", NotNegative, 1e9, "Most parameters to gather at once."),
    (
        "stage3_max_reuse_distance",
        NotNegative,
        1e9,
        "Keep a parameter gathered if it is reused within this distance.",
    ),
    ("stage3_gather_16bit_weights_on_model_save", bool, False, "Gather weights to save them."),
    (
        "stage3_gather_fp16_weights_on_model_save",
        bool,
        False,
        "Gather weights to save them (old name).",
    ),
    (
        "stage3_module_granularity_threshold",
        NotNegative,
        0,
        "Gather modules below this granularity as a whole.",
    ),
    ("stage3_use_all_reduce_for_fetch_params", bool, False, "Gather parameters by all-reduce."),
    ("stage3_allgather_sequential", bool, False, "Gather parameters one after another."),
    ("memory_efficient_linear", bool, True, "Memory-efficient linear layer."),
    ("leaf_module", Mapping[str, Any] | None, None, "Modules to gather as a whole."),
    ("log_trace_cache_warnings", bool, False, "Warn about the cache of the module order."),
    ("override_module_apply", bool, True, "Gather parameters in `Module.apply`."),
    ("pipeline_loading_checkpoint", bool, False, "Load weights layer by layer."),
    ("save_muon_momentum_buffer_in_memory", bool, False, "Keep Muon's momentum in memory."),
    ("zero_hpz_partition_size", Whole, 1, "ZeRO++: secondary partition inside a node."),
    ("zero_quantized_weights", bool, False, "ZeRO++: 8-bit weights."),
    ("zero_quantized_nontrainable_weights", bool, False, "ZeRO++: 8-bit frozen weights."),
    ("zero_quantized_gradients", bool, False, "ZeRO++: 4-bit gradients."),
    ("mics_shard_size", int, -1, "MiCS: ranks that share the weights."),
    ("mics_hierarchical_params_gather", bool, False, "MiCS: hierarchical gather."),
)

STAGE_3_NAMES = {
    name.removeprefix("stage3_"): name
    for name, *_ in _STAGE_3_KEYS
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""DeepSpeed's second name of a key -> the name that its documentation uses."""

if TYPE_CHECKING:
    UnsupportedKeys = Section
    UnsupportedZeroKeys = Section
else:
    _new = partial(create_model, __base__=Section, __module__=__name__)
    _block = Mapping[str, Any] | bool | None
    UnsupportedKeys = _new(
        "UnsupportedKeys", **{name: (_block, field) for name, field in _BLOCKS.items()}, **_OTHERS
    )
    UnsupportedZeroKeys = _new(
        "UnsupportedZeroKeys",
        zenflow=(_block, _ZENFLOW),
        enable_sanity_checks=(
            bool,
            ignored(False, "Check gradients in each step.", "see training.on_nonfinite"),
        ),
        parameter_alignment=(
            bool,
            ignored(False, "Align parameters in their buffer.", "parameters are aligned"),
        ),
        **{
            name: (bool, ignored(default, text, "this is always done", agrees=[True]))
            for name, default, text in _ZERO_ALWAYS
        },
        **{
            name: (kind, ignored(default, text, STAGE_3, silent=[default]))
            for name, kind, default, text in _STAGE_3_KEYS
        },
    )

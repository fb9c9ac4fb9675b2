"""DeepSpeed's sections for what is not here.  Floor 1.

Switched off they are accepted, with a warning; switched on they are refused, with the way out.
"""

from collections.abc import Mapping
from typing import Any

from pipemega.config.keys import Section, block, ignored, refused

Block = Mapping[str, Any] | bool | None
_REMOVE = "remove the block, or switch it off"


class UnsupportedKeys(Section):
    """Top-level keys that nothing here answers to."""

    amp: Block = block(
        "Mixed precision by NVIDIA apex's amp.",
        "use bf16.enabled or fp16.enabled",
        "enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 "
        "master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale "
        "max_loss_scale",
    )
    torch_autocast: Block = block(
        "Mixed precision by torch.autocast.",
        "use bf16.enabled or fp16.enabled",
        "enabled dtype lower_precision_safe_modules",
    )
    flops_profiler: Block = block(
        "FLOPs per module.",
        f"TFLOP/s and MFU are in every line of the log, and wall_clock_breakdown times the parts; "
        f"{_REMOVE}",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    )
    comms_logger: Block = block(
        "A log of the collectives.",
        f"wall_clock_breakdown times the reductions; {_REMOVE}",
        "enabled verbose prof_all debug prof_ops",
    )
    comet: Block = block(
        "Logs to Comet.",
        "use wandb, tensorboard or csv_monitor",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode",
    )
    elasticity: Block = block(
        "Batch sizes that fit many numbers of ranks.",
        f"give the batch by train_batch_size and its parts, and {_REMOVE}",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
        "prefer_larger_batch version ignore_non_elastic_batch_info num_gpus_per_node "
        "model_parallel_size",
    )
    autotuning: Block = block(
        "Tries configs and keeps the best.",
        _REMOVE,
        "enabled start_step end_step metric_path arg_mappings metric model_info results_dir "
        "exps_dir overwrite fast start_profile_step end_profile_step tuner_type "
        "tuner_early_stopping tuner_num_trials model_info_path mp_size max_train_batch_size "
        "min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
    )
    curriculum_learning: Block = block(
        "Sequences that grow during training.",
        _REMOVE,
        "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    )
    data_efficiency: Block = block(
        "Sampling by difficulty, and dropping of tokens.",
        _REMOVE,
        "enabled seed data_sampling data_routing",
        on="nested",
    )
    compression_training: Block = block(
        "Quantisation and pruning during training.",
        _REMOVE,
        "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
        "channel_pruning layer_reduction",
        on="nested",
    )
    sparse_attention: Block = block(
        "Attention over blocks.",
        "attention is dense and causal; remove the block",
        "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
        "horizontal_global_attention num_different_global_patterns num_random_blocks "
        "local_window_blocks global_block_indices global_block_end_indices "
        "num_sliding_window_blocks",
        on="mode",
    )
    progressive_layer_drop: Block = block(
        "Leaves out layers at random.", _REMOVE, "enabled theta gamma"
    )
    eigenvalue: Block = block(
        "Measures the curvature of the loss.",
        _REMOVE,
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    )
    hybrid_engine: Block = block(
        "Training and fast generation in turns.",
        _REMOVE,
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size",
    )
    nebula: Block = block(
        "Checkpoints by Azure's Nebula.",
        f"checkpoints are torch.distributed.checkpoint's; {_REMOVE}",
        "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention "
        "enable_nebula_load load_path",
    )
    compile: Block = block(
        "Compiles the model.",
        _REMOVE,
        "enabled deepcompile backend kwargs free_activation offload_activation "
        "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters",
        on="enabled deepcompile",
    )
    tensor_parallel: Block = block(
        "DeepSpeed's automatic tensor parallelism.",
        "set mesh.tensor to that size instead",
        "autotp_size preset_model tp_overlap_comm partition_config tp",
        on="autotp_size",
    )
    expert_parallel: Block = block(
        "Experts over the ranks.", "there are no experts here; remove the block", on="any"
    )
    aio: Mapping[str, Any] | None = ignored(
        None, "Reading and writing a fast disk.", "nothing is moved to a disk during a step"
    )
    graph_harvesting: bool = refused(
        False, "DeepSpeed: capture the step as a CUDA graph.", "set it to false"
    )
    log_level: str | None = ignored(
        None, "How much DeepSpeed logs.", "set the level of Python's logger 'pipemega' instead"
    )
    zero_allow_untested_optimizer: bool = ignored(False, "ZeRO with any optimizer.", "ZeRO is off")
    zero_force_ds_cpu_optimizer: bool = ignored(
        True, "DeepSpeed's own optimizer for offloaded state.", "nothing is offloaded"
    )

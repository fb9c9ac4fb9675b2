"""The table of DeepSpeed's modules and names: where each is, and what replaces missing ones.

Module of DeepSpeed -> name -> "module" or "module:name" of ours. Modules below another one are its
attributes.
"""

from collections.abc import Mapping

_HERE = "pipemega.compat.deepspeed"
_MODULE = f"{_HERE}.pipeline_module"
_TOPOLOGY = f"{_HERE}.process_topology"
_CALLS = f"{_HERE}.small_calls"

_SPEC_NAMES = {
    "LayerSpec": f"{_MODULE}:PipeLayerSpec",
    "TiedLayerSpec": f"{_MODULE}:PipeTiedLayerSpec",
}
_PIPE = {"PipelineModule": f"{_MODULE}:DeepSpeedPipelineModule", **_SPEC_NAMES}
_TOPOLOGIES = {
    "ProcessTopology": f"{_TOPOLOGY}:ProcessTopology",
    "PipeDataParallelTopology": f"{_TOPOLOGY}:PipeDataParallelTopology",
    "PipeModelDataParallelTopology": f"{_TOPOLOGY}:PipeModelDataParallelTopology",
    "PipelineParallelGrid": f"{_TOPOLOGY}:PipelineParallelGrid",
}
_CHECKPOINTING = {
    name: f"{_HERE}.activation_checkpoints:{name}"
    for name in (
        "checkpoint", "non_reentrant_checkpoint", "configure", "is_configured", "reset",
        "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed",
        "model_parallel_reconfigure_tp_seed", "set_num_layers",
    )
}  # fmt: skip
_LOADERS = {"RepeatingLoader": f"{_MODULE}:RepeatingLoader"}
_LOG = {
    name: f"{_CALLS}:{name}" for name in (
        "logger", "log_dist", "print_rank_0", "warning_once", "set_log_level_from_string",
    )
}  # fmt: skip
_ACCELERATOR = {"get_accelerator": f"{_HERE}.torch_accelerator:get_accelerator"}
_RUNTIME_UTILS = {
    name: f"{_CALLS}:{name}"
    for name in (
        "set_random_seed", "see_memory_usage", "partition_uniform", "partition_balanced",
        "call_to_str", "ensure_directory_exists",
    )
}  # fmt: skip
_ENGINE = {"DeepSpeedEngine": f"{_HERE}.deepspeed_engine:EngineSettings"}
_ZERO = {
    name: f"{_CALLS}:{name}"
    for name in (
        "Init", "GatheredParameters", "register_external_parameter",
        "unregister_external_parameter",
    )
}  # fmt: skip
_EXPERTS = ("is_moe_param", "has_moe_layers")
_INIT = {"init_distributed": f"{_TOPOLOGY}:init_distributed"}
_COMM = {**_INIT, "log_summary": f"{_CALLS}:log_summary"}

MODULES: Mapping[str, Mapping[str, str]] = {
    "": {
        "initialize": f"{_HERE}.initialize_deepspeed:initialize",
        "add_config_arguments": f"{_TOPOLOGY}:add_config_arguments",
        "PipelineModule": _PIPE["PipelineModule"],
        "PipelineEngine": f"{_HERE}.pipeline_engine:PipelineEngine",
        "dist": "torch.distributed",
        "__version__": f"{_TOPOLOGY}:DEEPSPEED_VERSION",
        "version": f"{_TOPOLOGY}:DEEPSPEED_VERSION",
        **_ENGINE,
        **_INIT,
        **_LOG,
        **_ACCELERATOR,
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "moe": {},
    "moe.layer": {"MoE": f"{_CALLS}:MoE"},
    "moe.utils": {
        name: f"{_CALLS}:{name}"
        for name in (*_EXPERTS, "split_params_into_different_moe_groups_for_optimizer")
    },
    "ops": {},
    "ops.adam": {
        "FusedAdam": f"{_CALLS}:FusedAdam",
        "DeepSpeedCPUAdam": f"{_CALLS}:DeepSpeedCPUAdam",
    },
    "ops.lamb": {"FusedLamb": "pipemega.optimizer.optimizers:Lamb"},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": "torch.optim:Adagrad"},
    "pipe": _PIPE,
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.dataloader": _LOADERS,
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": {
        "WarmupLR": f"{_CALLS}:warmup_lr",
        "WarmupDecayLR": f"{_CALLS}:warmup_decay_lr",
        "WarmupCosineLR": f"{_CALLS}:warmup_cosine_lr",
        "OneCycle": f"{_CALLS}:one_cycle",
        "LRRangeTest": f"{_CALLS}:lr_range_test",
    },
    "runtime.pipe": {**_PIPE, "ProcessTopology": _TOPOLOGIES["ProcessTopology"]},
    "runtime.pipe.engine": {"PipelineEngine": f"{_HERE}.pipeline_engine:PipelineEngine"},
    "runtime.pipe.module": _PIPE,
    # Scripts import all of its names, and use none.
    "runtime.pipe.schedule": {},
    "runtime.pipe.topology": _TOPOLOGIES,
    "runtime.utils": _RUNTIME_UTILS,
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": {
        **_ZERO,
        "ZeroParamStatus": f"{_CALLS}:ZeroParamStatus",
    },
    "utils": {
        **_LOADERS,
        **_LOG,
        **_INIT,
        "set_z3_leaf_modules": f"{_CALLS}:set_z3_leaf_modules",
    },
    "utils.logging": _LOG,
    "utils.zero_to_fp32": {
        name: f"{_CALLS}:{name}"
        for name in (
            "get_fp32_state_dict_from_zero_checkpoint",
            "load_state_dict_from_zero_checkpoint",
            "convert_zero_checkpoint_to_fp32_state_dict",
        )
    },
    "zero": _ZERO,
}

# Other names of these modules are those of another module.
DELEGATES: Mapping[str, str] = {"comm": "torch.distributed", "comm.comm": "torch.distributed"}

# Path in DeepSpeed -> what to use instead; "a.b.*": of each other name in a.b.
ADVICE: Mapping[str, str] = {
    "DeepSpeedConfig": "pipemega.load_config reads the JSON file",
    "OnDevice": "build the model under torch.device('meta')",
    "DeepSpeedTransformerLayer": "use a layer of torch or transformers",
    "DeepSpeedTransformerConfig": "use a layer of torch or transformers",
    "autotuning": "`pipemega plan --compare all` compares schedules",
    "checkpoint": "`pipemega checkpoint import-deepspeed` reads DeepSpeed's checkpoints",
    "compression": "quantization and pruning during training do not exist",
    "comm.mpi_discovery": "start the ranks with torchrun",
    "elasticity": "set train_batch_size and its factors for each number of ranks",
    "env_report": "`pipemega doctor` examines the machine",
    "inference": "`pipemega generate` generates text; serve the model with vLLM or transformers",
    "init_inference": (
        "`pipemega generate` generates text; serve the model with vLLM or transformers"
    ),
    "launcher": "start the ranks with torchrun",
    "module_inject": "tensor parallelism is set by mesh.tensor in the config",
    "moe.*": "mixture-of-experts layers do not exist",
    "monitor": "set wandb, tensorboard or csv_monitor in the config",
    "nebula": "checkpoints are those of torch.distributed.checkpoint",
    "ops.adam.*": "there are FusedAdam and DeepSpeedCPUAdam; or use torch.optim",
    "ops.lion": "torch has no Lion: pass an optimizer of your own to initialize(optimizer=...)",
    "ops.op_builder": "there are no CUDA extensions of DeepSpeed",
    "ops.sparse_attention": "attention is dense; use torch's flex_attention in your layer",
    "ops.transformer": "use a layer of torch or transformers",
    "profiling": "set flops_profiler in the config",
    "runtime.config": "pipemega.load_config reads the JSON file",
    "runtime.data_pipeline": "curriculum learning and data efficiency do not exist",
    "runtime.fp16": "set fp16 in the config, and optimizer.type for the optimizer",
    "runtime.bf16_optimizer": "set bf16 in the config; initialize() makes the master weights",
    "runtime.pipe.p2p": "the engine sends and receives; a layer returns any tree of tensors",
    "runtime.pipe.schedule.*": "set pipeline.schedule in the config, or give initialize(plan=...)",
    "runtime.state_dict_factory": (
        "`pipemega checkpoint import-deepspeed` reads DeepSpeed's checkpoints"
    ),
    "runtime.utils.PartitionedTensor": "the engine sends the tensors between stages",
    "runtime.zero.offload_config": "set zero_optimization.offload_optimizer.device to 'cpu'",
    "runtime.zero.*": "of ZeRO there is stage 1, set by zero_optimization in the config",
    "zero.*": "of ZeRO there is stage 1, set by zero_optimization in the config",
    "sequence": "set mesh.sequence_parallel in the config",
    "utils.safe_get_full_fp32_param": (
        "optimizer.param_groups has the master weights; with ZeRO 1, the slices of this rank"
    ),
    "utils.safe_get_full_grad": "get_global_grad_norm() has the norm of the gradients",
    "utils.safe_get_full_optimizer_state": "optimizer.state has it; with ZeRO 1, of its slices",
    "utils.groups": "engine.grid has the process groups of the axes",
    "tp_model_init": "tensor parallelism is set by mesh.tensor in the config",
}

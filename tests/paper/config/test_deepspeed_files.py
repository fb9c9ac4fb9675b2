"""Forms that real DeepSpeed files have: what they mean here, and what is said about them."""

import json

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import BASE


def errors_of(tree, overrides=()):
    with pytest.raises(ConfigError) as refused:
        load(tree, overrides)
    return refused.value.problems or (str(refused.value),)


AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def test_batch_keys_that_are_auto_are_named_with_the_overrides_that_set_them():
    (message,) = errors_of(AUTO_BATCH)
    assert message.startswith(
        "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps are "
        '"auto", so the batch size is not set: the Trainer of transformers fills these keys'
    )
    overrides = [word for word in message.split() if "=" in word]
    assert overrides == ["train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=8"]
    assert load(AUTO_BATCH, overrides).batch(2).train_batch_size == 16


def test_one_batch_key_that_is_auto_is_computed_from_the_others():
    config = load(AUTO_BATCH | {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4})
    assert config.batch(2).num_microbatches == 4
    (message,) = errors_of({"train_batch_size": "auto", "gradient_accumulation_steps": 2})
    assert message.startswith('train_batch_size is "auto", so the batch size is not set')


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offload_of_weights_is_ignored_below_stage_3_as_in_deepspeed(stage, device):
    zero = {"stage": stage, "offload_param": {"device": device}}
    (warning,) = load(BASE | {"zero_optimization": zero}).warnings
    assert warning.startswith(
        "zero_optimization.offload_param.device is ignored: as in DeepSpeed below stage 3, weights "
        "stay on their device"
    )


@pytest.mark.parametrize("pinned", [None, True, False])
def test_the_old_key_cpu_offload_becomes_offload_optimizer(pinned):
    zero = {"stage": 1, "cpu_offload": True, "cpu_offload_use_pin_memory": pinned}
    config = load(BASE | {"zero_optimization": {k: v for k, v in zero.items() if v is not None}})
    assert config.zero_optimization.offloads
    assert config.zero_optimization.offload_optimizer.pin_memory is bool(pinned)
    assert config.warnings == ()
    assert load(config.to_dict()) == config


def test_the_old_key_cpu_offload_must_not_contradict_the_section():
    same = {"cpu_offload": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert load(BASE | {"zero_optimization": same}).zero_optimization.offloads
    other = {"cpu_offload": True, "offload_optimizer": {"device": "none"}}
    assert errors_of(BASE | {"zero_optimization": other}) == (
        "zero_optimization.cpu_offload is the old form of zero_optimization.offload_optimizer, and "
        "the two contradict each other: keep one",
    )
    (message,) = errors_of(BASE | {"zero_optimization": {"cpu_offload": 1}})
    assert message == "zero_optimization.cpu_offload must be true or false, not 1"
    off = {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}
    assert load(BASE | {"zero_optimization": off}).zero_optimization.offloads


def test_the_old_key_cpu_offload_param_is_ignored_like_offload_param():
    (warning,) = load(BASE | {"zero_optimization": {"cpu_offload_param": True}}).warnings
    assert "offload_param.device is ignored" in warning


def test_partitioned_activations_without_tensor_parallelism_have_nothing_to_split():
    change = {"activation_checkpointing": {"partition_activations": True}}
    (warning,) = load(BASE | change).warnings
    assert warning.endswith("is ignored: mesh.tensor is 1, so there is nothing to split")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pipeline": {"activation_checkpoint_interval": 1}},
        {"model": BASE["model"] | {"recompute": "full"}},
    ],
)
def test_cpu_checkpointing_is_accepted_with_and_without_recomputation(change):
    config = load(BASE | {"activation_checkpointing": {"cpu_checkpointing": True}} | change)
    assert config.activation_checkpointing.cpu_checkpointing
    assert not config.warnings


@pytest.mark.parametrize(
    "key",
    [
        "gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance",
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
    ],
)  # fmt: skip
def test_the_second_names_of_stage_3_keys_are_accepted(key):
    value = True if key.startswith(("gather", "use", "allgather")) else 7
    (warning,) = load(BASE | {"zero_optimization": {"stage": 1, key: value}}).warnings
    assert warning == (
        f"zero_optimization.stage3_{key} is ignored: this key belongs to ZeRO stage 3, which is "
        f"not supported"
    )
    both = {"stage": 1, key: value, f"stage3_{key}": value}
    assert errors_of(BASE | {"zero_optimization": both}) == (
        f"zero_optimization.{key} is another name of zero_optimization.stage3_{key}, and both are "
        f"set: keep one",
    )


def test_keys_that_start_with_an_underscore_are_dropped_at_every_level():
    tree = {
        "_comment": "a", "_read_the_docs": {"x": float("nan")}, "__note": 1,
        "mesh": {"_tensor": 64}, "optimizer": {"type": "SGD", "params": {"_lr": "?", "lr": 0.5}},
    }  # fmt: skip
    config = load(BASE | tree)
    assert (config.mesh.tensor, config.optimizer.params.lr) == (1, 0.5)
    assert config.warnings == ()


def test_the_section_user_is_free_and_is_kept():
    user = {"log": {"dir": "a", "levels": [1, 2.5, None]}, "backend": "nccl"}
    config = load(BASE | {"user": user})
    assert config.user["backend"] == "nccl"
    assert config.user["log"]["levels"] == (1, 2.5, None)
    assert config.to_dict()["user"] == user
    assert load(config.to_json()) == config
    assert config.warnings == ()
    assert load(BASE).user == {}
    assert load(BASE, ["user.run=7"]).user == {"run": 7}
    assert errors_of(BASE | {"user": 3}) == ("user must be an object, not 3",)


def test_a_key_of_the_user_at_the_top_level_is_refused_with_the_section_for_it():
    assert errors_of(BASE | {"cuda_visible_devices": "0"}) == (
        "unknown key 'cuda_visible_devices'; a key of your own belongs in the section 'user' "
        "(`pipemega config from-deepspeed` moves it there), docs/config.md lists the others",
    )


def test_integers_may_be_written_as_numbers_without_a_fraction():
    config = load(json.dumps(BASE)[:-1] + ', "steps_per_print": 1e5, "seed": 42.0}')
    assert (config.steps_per_print, config.seed) == (100_000, 42)
    assert isinstance(config.steps_per_print, int)
    assert errors_of(BASE | {"steps_per_print": 2.5}) == (
        "steps_per_print must be an integer >= 1 or null, not 2.5",
    )
    # A number that may have a fraction stays one, and so do the bounds of a partition.
    assert isinstance(load(BASE | {"gradient_clipping": 1.0}).gradient_clipping, float)


def test_bucket_sizes_may_be_0():
    zero = {"stage": 1, "reduce_bucket_size": 0, "allgather_bucket_size": 0}
    assert load(BASE | {"zero_optimization": zero}).zero_optimization.reduce_bucket_size == 0


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({"fp32_allreduce": True}, "fp32"),
        ({"fp32_allreduce": False}, None),
        ({"fp32_allreduce": False, "communication_data_type": "bf16"}, "bf16"),
        ({"fp32_allreduce": True, "communication_data_type": "fp32"}, "fp32"),
    ],
)
def test_fp32_allreduce_of_gpt_neox_is_a_communication_dtype(change, dtype):
    config = load(BASE | change)
    assert config.communication_data_type == dtype
    assert load(config.to_dict()) == config


def test_fp32_allreduce_must_not_contradict_the_communication_dtype():
    assert errors_of(BASE | {"fp32_allreduce": True, "communication_data_type": "bf16"}) == (
        "fp32_allreduce is the old form of communication_data_type, and the two contradict each "
        "other: keep one",
    )
    assert errors_of(BASE | {"fp32_allreduce": "x"}) == (
        'fp32_allreduce must be true or false, not "x"',
    )


@pytest.mark.parametrize(
    "change",
    [
        {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        {"compression_training": {"layer_reduction": {"enabled": True}}},
        {"data_efficiency": {"enabled": True}},
    ],
)
def test_features_that_change_the_training_stay_refused(change):
    (message,) = errors_of(BASE | change)
    assert "enabled, but not supported" in message


def test_all_enabled_parts_of_a_block_are_named_at_once():
    parts = {
        "weight_quantization": {"shared_parameters": {"enabled": True}},
        "activation_quantization": {"shared_parameters": {"enabled": True}},
        "row_pruning": {"shared_parameters": {"enabled": False}},
    }
    assert errors_of(BASE | {"compression_training": parts}) == (
        "compression_training.weight_quantization.shared_parameters.enabled, "
        "compression_training.activation_quantization.shared_parameters.enabled are enabled, but "
        "not supported: remove the block or disable it",
    )


def test_an_untested_optimizer_at_stage_1_with_offload_gives_no_warning():
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    tree = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    assert load(BASE | tree).warnings == ()


def test_five_errors_of_a_file_are_told_in_one_run():
    tree = {
        "train_batch_size": "auto",
        "optimizer": {"type": "OneBitAdam", "params": {"lr": -1, "freeze_step": 5}, "eps": 1e-8},
        "zero_optimization": {"stage": 3, "cpuoffload": True},
        "bf16": {"enabled": True, "loss_scale": 0},
        "compression_training": {"layer_reduction": {"enabled": True}},
    }
    assert [problem.split(":")[0].split(";")[0] for problem in errors_of(tree)] == [
        "optimizer.type cannot be 'OneBitAdam'",
        "optimizer.params.lr must be a number >= 0, not -1",
        "unknown key 'optimizer.eps'",
        "unknown key 'zero_optimization.cpuoffload'",
        "unknown key 'bf16.loss_scale'",
        "compression_training.layer_reduction.enabled is enabled, but not supported",
        'train_batch_size is "auto", so the batch size is not set',
        "zero_optimization.stage 3 is not supported",
    ]


def test_a_refused_optimizer_names_its_keys_that_must_go():
    params = {"lr": 1e-4, "freeze_step": 5, "cuda_aware": False}
    (message,) = errors_of(BASE | {"optimizer": {"type": "onebitadam", "params": params}})
    assert message.endswith("then remove optimizer.params.freeze_step, optimizer.params.cuda_aware")


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ({"optimizer": {"type": "AdamW", "eps": 1e-8}}, "optimizer.params.eps"),
        ({"optimizer": {"type": "SGD", "momentum": 0.9}}, "optimizer.params.momentum"),
        ({"scheduler": {"type": "WarmupLR", "warmup_num_steps": 5}},
         "scheduler.params.warmup_num_steps"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"max_grad_norm": 1.0}, "gradient_clipping"),
        ({"pipeline": {"partition_method": "uniform"}}, "pipeline.partition"),
        ({"pipeline": {"pipeline_parallel_size": 2}}, "mesh.pipeline"),
        ({"tensor_parallel_size": 2}, "mesh.tensor"),
        ({"bf16": {"loss_scale": 0}}, "fp16.loss_scale"),
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_refused_with_the_right_one(change, meant):
    (message,) = errors_of(BASE | change)
    assert message.endswith(f"; did you mean '{meant}'?")


def test_the_error_of_an_unknown_key_is_short():
    for change in ({"xyz": 1}, {"zero_optimization": {"xyz": 1}}, {"training": {"xyz": 1}},
                   {"optimizer": {"type": "Adam", "params": {"xyz": 1}}}):  # fmt: skip
        (message,) = errors_of(BASE | change)
        assert len(message) < 220
    (message,) = errors_of(BASE | {"monitor_config": {}})
    assert "similar: monitor, csv_monitor" in message


def test_a_warmup_of_0_steps_is_accepted_as_in_deepspeed():
    for kind, params in (("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 9})):
        scheduler = {"type": kind, "params": {"warmup_num_steps": 0, **params}}
        assert load(BASE | {"scheduler": scheduler}).scheduler.params.warmup_num_steps == 0

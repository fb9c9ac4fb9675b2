"""Errors, warnings and notes about keys; the tests read each message."""

import pytest

from pipemega.config import load
from pipemega.config.declarations import key_info
from pipemega.config.reference_pages import all_sections
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import BASE, MODEL, objects, put

BATCH = {"train_batch_size": 4, "mesh": {"pipeline": 2}}


def refusal_of(change: dict) -> str:
    with pytest.raises(ConfigError) as refusal:
        load(BASE | change)
    message = str(refusal.value)
    # One line for each error.
    assert message.count("\n") == len(refusal.value.problems)
    return message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": True}, "seed must be an integer >= 0, not true"),
        ({"seed": -1}, "seed must be an integer >= 0, not -1"),
        ({"seed": None}, "seed must be an integer >= 0, not null"),
        ({"steps_per_print": 0}, "steps_per_print must be an integer >= 1 or null, not 0"),
        ({"mesh": {"tensor": "16"}}, 'mesh.tensor must be an integer >= 1, not "16"'),
        ({"mesh": {"data": "all"}}, 'mesh.data must be an integer >= 1 or "auto", not "all"'),
        ({"mesh": {"tensor": 0, "data": 0}}, "mesh.data must be an integer >= 1"),
        ({"mesh": {"device": "cda"}}, "did you mean 'cuda'?"),
        ({"mesh": 4}, "mesh must be an object, not 4"),
        ({"mesh": None}, "mesh must be an object, not null"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled must be true or false, not 1"),
        ({"fp16": {"enabled": "yes"}}, 'fp16.enabled must be true or false, not "yes"'),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping must be a number >= 0, not "1.0"'),
        ({"communication_data_type": "fp8"}, '"fp32" or "fp16" or "bf16" or null, not "fp8"'),
        ({"wandb": {"tags": "x"}}, 'wandb.tags must be a list of (text) or null, not "x"'),
        ({"training": {"train_steps": 1.5}}, "an integer >= 1 or null, not 1.5"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_right_type(change, message):
    assert message in refusal_of(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 66}, "the nearest that fit are 64 and 68; or give model.kv_channels"),
        ({"hidden_size": 3}, "the nearest that fits is 4"),
        ({"num_query_groups": 3}, "(4) must be a multiple of model.num_query_groups (3)"),
        ({"attention_dropout": 1.0}, "model.attention_dropout must be a number >= 0 and < 1"),
        (
            {"position_embedding_type": "rope", "hidden_size": 12},
            "3 channels of each head would be rotated",
        ),
        (
            {"max_position_embeddings": 16, "seq_length": 32},
            "model.max_position_embeddings (16) must be at least model.seq_length (32)",
        ),
        (
            {"pad_vocab_size_to": 99, "vocab_size": 100},
            "model.pad_vocab_size_to (99) must be at least the size of the vocabulary (100)",
        ),
        ({"squared_relu": True, "swiglu": True}, "model.squared_relu and model.swiglu are two"),
        (
            {"recompute_method": "block"},
            "model.recompute_method 'block' recomputes whole blocks, and model.recompute is "
            "'none': set it to 'full'",
        ),
        (
            {"recompute": "full", "recompute_num_layers": 4},
            "model.recompute_num_layers (4) has no effect without model.recompute_method",
        ),
        ({"recompute_num_layers": 0}, "model.recompute_num_layers must be an integer >= 1, not 0"),
        ({"num_layers": None}, "model.num_layers must be an integer >= 1, not null"),
        ({"num_layers": "auto"}, 'model.num_layers must be an integer >= 1, not "auto"'),
    ],
)
def test_an_invalid_model_is_refused(change, message):
    assert message in refusal_of({"model": MODEL | change})


def test_keys_that_are_missing_are_all_named():
    assert refusal_of({"model": {}}).split("\n  ") == [
        "the config has 4 errors:",
        "model.num_layers is missing, and has no default: Number of transformer blocks",
        "model.hidden_size is missing, and has no default: Hidden size of the transformer",
        "model.num_attention_heads is missing, and has no default: Number of attention (query) "
        "heads",
        "model.seq_length is missing, and has no default: Tokens per sample",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mesh": {"tensor": 8}},
            "model.num_attention_heads (4) must be a multiple of mesh.tensor",
        ),
        (
            {"model": MODEL | {"num_query_groups": 2}, "mesh": {"tensor": 4}},
            "model.num_query_groups (2) must be a multiple of mesh.tensor (4)",
        ),
        (
            {"mesh": {"tensor": 4}, "model": MODEL | {"pad_vocab_size_to": 102}},
            "model.pad_vocab_size_to (102) must be a multiple of mesh.tensor (4), over which it "
            "is sharded; the nearest that fit are 100 and 104",
        ),
        (
            {"model": MODEL | {"ffn_hidden_size": 30}, "mesh": {"tensor": 4}},
            "model.ffn_hidden_size (30) must be a multiple of mesh.tensor (4), over which it is "
            "sharded; the nearest that fit are 28 and 32",
        ),
        (
            {
                "model": MODEL | {"seq_length": 31},
                "mesh": {"tensor": 2, "sequence_parallel": True},
            },
            "model.seq_length (31) must be a multiple of mesh.tensor (2)",
        ),
        (
            {"mesh": {"pipeline": 9}},
            "mesh.pipeline (9) is more than the number of layers: model.num_layers + embedding, "
            "positions, norm and head = 4 + 4 = 8",
        ),
        (
            {"mesh": {"pipeline": 3}, "pipeline": {"schedule": "interleaved", "chunks": 3}},
            "mesh.pipeline (3) * pipeline.chunks (3) = 9 is more than the number of layers",
        ),
        (
            {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "1f1b-v", "partition": [0, 3, 6]}},
            "pipeline.partition has 3 bounds, for 2 stages, but there are 4: write 5 numbers",
        ),
        (
            {"mesh": {"pipeline": 2}, "pipeline": {"stages": 4}},
            "pipeline.stages (4) must equal mesh.pipeline (2)",
        ),
        (
            {"mesh": {"pipeline": 2}, "pipeline": {"partition": [0, 2, 4, 6]}},
            "pipeline.partition has 4 bounds, for 3 stages, but there are 2: write 3 numbers",
        ),
        (
            {"pipeline": {"stages": 2, "partition": [0, 6]}},
            "pipeline.partition has 2 bounds, for 1 stages, but there are 2: write 3 numbers",
        ),
        (
            {
                "pipeline": {"activation_checkpoint_interval": 1},
                "activation_checkpointing": {"number_checkpoints": 2},
            },
            "are two ways to set the same thing: keep one",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true: keep one"),
        ({"bfloat16": {}, "bf16": {}}, "bfloat16 is another name of bf16, and both are set"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}},
            "fp16.initial_scale_power 1 means a loss scale of 2, below fp16.min_loss_scale (4)",
        ),
        ({"checkpoint": {"interval": 5}}, "there is no folder to save in: set checkpoint.save"),
        ({"data": {"corpus": "a", "mock": True}}, "data.corpus and data.mock are set: keep one"),
    ],
)
def test_contradicting_keys_are_refused_with_both_values(change, message):
    assert message in refusal_of(change)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("unifrm", "did you mean 'uniform'?"),
        ("type:(", "'type:(' is not a regular expression: missing )"),
        ("type:", "needs a regular expression after the colon"),
        ([], "must start with 0 and increase"),
        ([1, 6], "must start with 0 and increase"),
        ([0, 3, 3, 6], "must start with 0 and increase"),
        ([0, -1], "pipeline.partition must be"),
        ([0, 2.0], "pipeline.partition must be"),
        (3, "pipeline.partition must be"),
    ],
)
def test_an_invalid_partition_is_refused(partition, message):
    assert message in refusal_of({"pipeline": {"partition": partition}})


@pytest.mark.parametrize(
    "split", ["1,2,,", "1,2,3,4", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1", ""]
)
def test_a_split_that_is_not_three_shares_is_refused(split):
    assert "data.split must be three shares" in refusal_of({"data": {"split": split}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, "a", 2], "must be a prefix, a list of prefixes, or a list of weight, prefix"),
        (["a", 1], "must be a prefix, a list of prefixes, or a list of weight, prefix"),
        ([], "must be a prefix, a list of prefixes, or a list of weight, prefix"),
        ([-1, "a"], "the weights in data.data_path [-1.0] must be positive numbers"),
        ([1, "a", 0, "b"], "[1.0, 0.0] must be positive numbers; remove a prefix that should not"),
        ("0.3 a nan b", "[0.3, nan] must be positive numbers"),
        (["0.3", "a", "b", "c"], "or such words in one text), not ['0.3', 'a', 'b', 'c']"),
        (["a", ""], "data.data_path"),
        ([True, "a"], "data.data_path must be"),
        ("train: 0.3 0:1 a", "data.data_path cannot have START:END, because data.split divides it"),
    ],
)
def test_an_invalid_blend_is_refused(given, message):
    assert message in refusal_of({"data": {"data_path": given}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"valid_data_path": "b"},
            "data.valid_data_path without data.train_data_path: set it too, or give all files in",
        ),
        (
            {"train_data_path": "a", "split": "9,1,0"},
            "data.split ('9,1,0') divides the files of data.data_path, and data.train_data_path",
        ),
        (
            {"train_data_path": "a", "data_path": "b"},
            "data.data_path and data.train_data_path are set: keep one",
        ),
        (
            {"train_data_path": "T: 0.3 0.9:0.5 a"},
            "data.train_data_path: '0.3 0.9:0.5 a' must be WEIGHT START:END PREFIX with 0 <= START",
        ),
        (
            {"train_data_path": "T: 0.3 0:0.9 a, 0.5 b"},
            "data.train_data_path: '0.5 b' must be WEIGHT START:END PREFIX",
        ),
        (
            {"train_data_path": "a", "valid_data_path": ["A: 1 0:1 a", "B: 1 0:1 b"]},
            "data.valid_data_path has 2 groups of token files, and a split is one group: keep one",
        ),
        ({"dataloader_type": "external"}, 'data.dataloader_type must be "single" or "cyclic"'),
        (
            {"data_sharding": False},
            "data.data_sharding false changes the order of data.dataloader_type 'cyclic' only",
        ),
    ],
)
def test_token_files_and_orders_that_contradict_each_other_are_refused(data, message):
    assert message in refusal_of({"data": data})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "Adm"}, "optimizer.type 'Adm' is not known; did you mean 'Adam'?"),
        ({}, "optimizer.type is missing; known here: Adam, AdamW, Lamb, SGD"),
        ({"type": 3}, "optimizer.type must be text, not 3"),
        ({"type": "auto"}, "optimizer.type 'auto' is not known"),
        ({"type": "OneBitAdam"}, "needs a compressed all-reduce"),
        ({"type": "zerooneadam"}, "needs a compressed all-reduce"),
        ({"type": "MuAdamW"}, "belongs to the mup package"),
        ({"type": "LBFGS"}, "evaluates the model several times per step"),
        ({"type": "Adam", "params": {"max_grad_norm": 1.0}}, "set gradient_clipping at the top"),
        ({"type": "Adam", "params": {"betas": [0.9]}}, "must be [a number >= 0 and < 1, a number"),
        ({"type": "Adam", "params": {"lr": -1}}, "optimizer.params.lr must be a number >= 0"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, "unknown key 'optimizer.params.betas'"),
        ({"type": "Adam", "params": 3}, "optimizer.params must be an object, not 3"),
        (["Adam"], 'optimizer must be an object, not ["Adam"]'),
    ],
)
def test_an_invalid_optimizer_is_refused(optimizer, message):
    assert message in refusal_of({"optimizer": optimizer})


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("warmup", {}, "scheduler.type 'warmup' is not known"),
        ("WSD", {}, "scheduler.params.wsd_decay_steps is missing"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr is missing"),
        ("WarmupLR", {"total_num_steps": 5}, "unknown key 'scheduler.params.total_num_steps'"),
        ("WarmupLR", {"warmup_type": "lin"}, 'must be "log" or "linear", not "lin"'),
        ("linear", {"warmup_steps": 1, "warmup_fraction": 0.1}, "are both given: keep one"),
        ("linear", {"warmup_steps": 100}, "(100) must be above the length of the warm-up (100)"),
        ("WSD", {"wsd_decay_steps": 91, "warmup_steps": 10}, "(91) must be at most decay_steps"),
        ("cosine", {"wsd_decay_steps": 5}, "unknown key 'scheduler.params.wsd_decay_steps'"),
    ],
)
def test_an_invalid_lr_schedule_is_refused(kind, params, message):
    assert message in refusal_of({"scheduler": {"type": kind, "params": params}})


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupDecayLR", {}, "total_num_steps is missing, and so is training.train_steps"),
        ("WarmupCosineLR", {}, "total_num_steps is missing, and so is training.train_steps"),
        ("cosine", {}, "decay_steps is missing, and so is training.train_steps"),
        ("constant", {"warmup_fraction": 0.1}, "is a share of scheduler.params.decay_steps"),
    ],
)
def test_an_lr_schedule_needs_the_length_of_the_run(kind, params, message):
    assert message in refusal_of({"training": {}, "scheduler": {"type": kind, "params": params}})


def test_the_length_of_a_schedule_in_epochs_is_that_of_the_run_in_epochs():
    by_epoch = {"scheduler": {"type": "cosine", "by": "epoch"}}
    assert (
        "scheduler.params.decay_steps is missing, and so is training.epochs, its default"
        in refusal_of({"training": {}, **by_epoch})
    )
    short = {"type": "linear", "by": "epoch", "params": {"warmup_steps": 3}}
    assert "decay_steps (3) must be above the length of the warm-up (3)" in refusal_of(
        {"training": {"epochs": 3}, "scheduler": short}
    )
    assert load(BASE | {"training": {"epochs": 3}, **by_epoch}).scheduler.by == "epoch"
    # The number of steps of an epoch depends on the data.
    assert load(BASE | {"training": {"epochs": 3}, "scheduler": {"type": "cosine"}}).scheduler


def test_a_scheduler_section_may_contain_by_alone():
    config = load(BASE | {"scheduler": {"by": "epoch"}})
    assert (config.scheduler.type, config.scheduler.by) == (None, "epoch")
    assert load(config.to_dict()).scheduler == config.scheduler
    assert "scheduler.type is missing" in refusal_of({"scheduler": {}})
    assert "scheduler.type is missing" in refusal_of({"scheduler": {"by": "epoch", "params": {}}})


COSTS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            {"schedule": "1f1b", "costs": "auto"},
            "pipeline.costs is for pipeline.schedule 'auto', and schedule '1f1b' does not use "
            "it: remove pipeline.costs, or set pipeline.schedule to 'auto'",
        ),
        (
            {"schedule": {"file": "my.csv"}, "memory_limit": 5, "partition": "uniform"},
            "pipeline.memory_limit is for pipeline.schedule or pipeline.partition 'auto'; 'my.csv' "
            "is already a plan, and partition 'uniform' does not use it",
        ),
        ({"costs": {**COSTS, "forward": -1.0}}, "pipeline.costs.forward"),
        ({"costs": {**COSTS, "kept": float("nan")}}, "numbers must be finite"),
        ({"costs": {"forward": 1.0}}, "pipeline.costs.backward_input is missing"),
        ({"costs": {**COSTS, "backwards": 2}}, "unknown key 'pipeline.costs.backwards'"),
        (
            {"costs": dict.fromkeys(COSTS, 0.0)},
            "pipeline.costs: forward, backward_input, backward_weight are all 0: one must be",
        ),
        (
            {"costs": {**COSTS, "forward": [1.0, 2.0]}},
            "pipeline.costs.forward has one number per stage, and "
            "pipeline.costs.backward_input is one number per rank",
        ),
        (
            {"costs": {**{name: [1.0, 2.0] for name in COSTS}, "activation": [1.0, 2.0, 3.0]}},
            "different numbers of stages: 2 in forward, 2 in backward_input, 2 in "
            "backward_weight, 3 in activation",
        ),
        ({"memory_limit": 0}, "pipeline.memory_limit must be"),
        ({"schedule": {"path": "my.csv"}}, "unknown key 'pipeline.schedule.path'"),
        ({"schedule": "autoo"}, "did you mean 'auto'"),
    ],
)
def test_invalid_costs_and_plans_are_refused(pipeline, message):
    assert message in refusal_of({"pipeline": pipeline})


def test_costs_select_the_schedule_auto():
    assert load({"pipeline": {"costs": COSTS}, **BATCH}).pipeline.schedule == "auto"
    assert load({"pipeline": {"costs": "auto"}, **BATCH}).pipeline.schedule == "auto"
    assert load({"pipeline": {}, **BATCH}).pipeline.schedule == "1f1b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage must be an integer >= 0 and <= 3, not 4"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "only 'none' and 'cpu' are supported",
        ),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size must be"),
        (
            {"pipeline": {"chunks": 2}},
            "pipeline.chunks is 2, and schedule '1f1b' runs one stage per rank: set it to 1, or "
            "use pipeline.schedule 'interleaved'",
        ),
        (
            {"pipeline": {"schedule": "1f1b-v", "chunks": 3}},
            "pipeline.chunks is 3, and schedule '1f1b-v' runs 2 stages per rank, placed in a v: "
            "set it to 2",
        ),
        ({"data": {"reset_attention_mask": True}}, "set data.reset_position_ids to true too"),
        (
            {"model": {"type": "hf", "path": "llama"}, "data": {"reset_position_ids": True}},
            "limit attention to the document: set data.reset_attention_mask to true too, or both",
        ),
        ({"data": {"path": "a.jsonl"}}, "data.path need data.format: set it to 'chat'"),
        (
            {"data": {"format": "chat", "path": "a.jsonl", "prompt_template": "{prompt}"}},
            "data.prompt_template is for data.format 'instruction', not 'chat'",
        ),
        (
            {"data": {"format": "text", "path": "a.jsonl", "chat_template": "a.jinja"}},
            "data.chat_template is for data.format 'chat', not 'text'",
        ),
        (
            {"data": {"format": "text", "path": "a.jsonl", "pad_to_multiple_of": 8}},
            "set data.packing to false",
        ),
        (
            {
                "data": {"format": "text", "packing": False, "pad_to_multiple_of": 8},
                "mesh": {"pipeline": 2},
            },
            "pipeline.shapes is 'cached': set it to 'exchanged'",
        ),
        (
            {
                "data": {"format": "text", "packing": False, "pad_to_multiple_of": 9},
                "mesh": {"tensor": 2, "sequence_parallel": True},
            },
            "data.pad_to_multiple_of (9) must be a multiple of mesh.tensor (2)",
        ),
        (
            {
                "activation_checkpointing": {"partition_activations": True},
                "mesh": {"tensor": 2},
            },
            "is not supported with mesh.tensor 2: set mesh.sequence_parallel to true",
        ),
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "the update is always a part of the step",
        ),
        ({"sparse_gradients": True}, "gradients are stored in flat, dense buffers"),
        ({"graph_harvesting": True}, "set it to false"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "are always fp32"),
        ({"data_types": {"param_dtype": "bf16"}}, "follows from fp16.enabled and bf16.enabled"),
        ({"amp": {"enabled": True}}, "amp.enabled is enabled, but not supported"),
        ({"amp": True}, "amp cannot be true"),
        ({"torch_autocast": {"enabled": True}}, "use bf16.enabled or fp16.enabled"),
        (
            {"flops_profiler": {"enabled": True, "module_depth": -2}},
            "flops_profiler.module_depth must be an integer >= -1, not -2",
        ),
        ({"comms_logger": {"prof_ops": ["sends"]}}, "comms_logger.prof_ops has 'sends', which is"),
        ({"comet": {"enabled": True}}, "use wandb, tensorboard or csv_monitor"),
        ({"elasticity": {"enabled": True}}, "set train_batch_size and its factors"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile cannot be true"),
        ({"tensor_parallel": {"autotp_size": 2}}, "set mesh.tensor to the value of autotp_size"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 2}, "mesh": {"expert": 4}},
            "expert_parallel.autoep_size (2) must equal mesh.expert (4): make them equal, or",
        ),
        (
            {"expert_parallel": {"enabled": True, "top_k": 4}},
            "expert_parallel.top_k cannot be 4: the model determines its router: set the key of",
        ),
        (
            {"expert_parallel": {"load_balance_coeff": 0.001}},
            "load_balance_coeff cannot be 0.001: set model.moe_router_enable_expert_bias and",
        ),
        (
            {"expert_parallel": {"ep_size": 2}},
            "unknown key 'expert_parallel.ep_size'",
        ),
        ({"sparse_attention": {"mode": "fixed"}}, "attention is dense"),
        (
            {"compression_training": {"weight_quantization": {"a": {"enabled": True}}}},
            "compression_training.weight_quantization.a.enabled is enabled",
        ),
        (
            {"data_efficiency": {"data_routing": {"enabled": True}}},
            "data_routing.enabled is enabled",
        ),
    ],
)
def test_an_unsupported_feature_is_refused_with_the_alternative(change, message):
    assert message in refusal_of(change)


@pytest.mark.parametrize(
    "change",
    [
        {"zero_optimization": {"stage": 0, "cpu_offload": False}},
        {"zero_optimization": {"offload_optimizer": {"device": None}}},
        {"zero_optimization": {"offload_param": {"device": "none"}}},
        {"pipeline": {"chunks": 1, "pipe_partitioned": False}},
        {"checkpoint": {"load_universal": True, "tag_validation": "WARN", "async": True}},
        {"timers": {"throughput": {"enabled": True}}},
        {"managed_gradient_accumulation": True, "sparse_gradients": False},
        {"amp": None},
    ],
)
def test_a_disabled_feature_or_a_default_behaviour_gives_no_warning(change):
    assert load(BASE | change).warnings == ()


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (
            {"vocabulary_size": 50257},
            "vocabulary_size is ignored: the vocabulary of the built-in GPT is padded",
        ),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is ignored"),
        ({"disable_allgather": True}, "disable_allgather is ignored"),
        ({"log_level": "info"}, "set logging.level instead"),
        ({"pipeline": {"use_reentrant": True}}, "pipeline.use_reentrant is ignored"),
        ({"pipeline": {"pipe_partitioned": True}}, "pipeline.pipe_partitioned is ignored"),
        ({"activation_checkpointing": {"profile": True}}, "use wall_clock_breakdown"),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.stage is 0"),
        ({"zero_optimization": {"reduce_bucket_size": 5e8}}, "reduce_bucket_size is ignored"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, ""),
        ({"zero_optimization": {"stage": 1, "reduce_scatter": False}}, "this is always done"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "owns a slice"),
        ({"timers": {"throughput": {"synchronized": False}}}, "synchronized is ignored"),
        ({"checkpoint": {"parallel_write": {"pipeline_stage": False}}}, ""),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer is ignored"),
        ({"checkpoint": {"keep_every": 100}}, "no effect without checkpoint.keep_last"),
        ({"bf16": {"immediate_grad_update": True}}, ""),
        ({"amp": {"enabled": False}}, "amp is disabled, and ignored"),
        ({"optimizer": {"type": "Adam", "legacy_fusion": True}}, "legacy_fusion is ignored"),
        ({"seq_parallel_communication_data_type": "bf16"}, "dtype of the gradients"),
        (
            {"comms_logger": {"enabled": True, "prof_all": False}},
            "comms_logger.prof_ops is empty: name the operations",
        ),
        ({"mesh": {"sequence_parallel": True}}, "does nothing while mesh.tensor is 1"),
        (
            {"mesh": {"overlap_sequence_parallel": True}},
            "mesh.overlap_sequence_parallel does nothing while mesh.tensor is 1",
        ),
        (
            {"mesh": {"tensor": 2, "overlap_sequence_parallel": True}},
            "mesh.overlap_sequence_parallel does nothing without mesh.sequence_parallel",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}},
            "optimizer Adam decays the weights as AdamW does",
        ),
        (
            {"scheduler": {"type": "constant", "params": {"min_lr": 0.1}}},
            "scheduler.params.min_lr is ignored: a constant rate does not decay",
        ),
        (
            {
                "flops_profiler": {"enabled": True, "profile_step": 7},
                "training": {"train_steps": 6},
            },
            "flops_profiler.profile_step (7) is after the last step (training.train_steps 6)",
        ),
        ({"flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None}}, ""),
        (
            {
                "model": MODEL | {"recompute": "full"},
                "pipeline": {"activation_checkpoint_interval": 1},
            },
            "one of the two is enough",
        ),
    ],
)
def test_an_ignored_key_gives_one_warning(change, warning):
    warnings = load(BASE | change).warnings
    assert len(warnings) == (1 if warning else 0)
    assert warning in "".join(warnings)


def test_adam_with_adam_w_mode_or_without_weight_decay_gives_no_warning():
    for params in ({"weight_decay": 0.1, "adam_w_mode": True}, {"weight_decay": 0.0}):
        assert load(BASE | {"optimizer": {"type": "Adam", "params": params}}).warnings == ()


def test_default_clipping_is_noted_with_its_value():
    assert "gradient_clipping is not set; its default is 1" in load(BASE).notes[0]
    assert load(BASE | {"gradient_clipping": 0.0}).notes == ()


def test_weight_decay_of_norms_is_noted_unless_a_key_or_a_group_decides_it():
    adam = {"type": "AdamW", "params": {"weight_decay": 0.1}}
    quiet = BASE | {"gradient_clipping": 0.0}
    (note,) = load(quiet | {"optimizer": adam}).notes
    assert "optimizer.params.weight_decay 0.1 also decays norms and biases" in note
    group = {"params": "norm|bias", "weight_decay": 0.0}
    assert load(quiet | {"optimizer": {**adam, "groups": [group]}}).notes == ()
    training = {"training": {**BASE["training"], "weight_decay_norms_and_biases": True}}
    assert load(quiet | training | {"optimizer": adam}).notes == ()


def test_no_unsupported_key_is_silently_dropped():
    """Sets each unsupported key to several values: a warning or an error for each."""
    count = 0
    for (path, tree, _), (_, _, kind) in zip(
        (o for o in objects() if o[0] in {g[1] for g in all_sections()}),
        all_sections(),
        strict=True,
    ):
        for name, field in kind.model_fields.items():
            if key_info(field)["status"] not in ("ignored", "refused"):
                continue
            silent = key_info(field)["accepts"]
            values = [v for v in (True, False, 1, 7, "fp16", "x", {"a": 1}) if v not in silent]
            reported = 0
            for value in values:
                try:
                    warnings = load(put(tree, path, name, value)).warnings
                except ConfigError:
                    reported += 1
                else:
                    assert any(name in warning for warning in warnings), (path, name, value)
                    reported += 1
            assert reported == len(values) > 0
            count += 1
    assert count > 50

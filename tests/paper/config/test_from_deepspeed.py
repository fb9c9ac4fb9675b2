"""A DeepSpeed file is explained key by key, and printed as a config."""

import json

import pytest

from pipemega.cli import main
from pipemega.config import load
from pipemega.config.from_deepspeed import as_json, explain
from pipemega.errors import ConfigError

FILE = """{
  "_comment": "a typical file",
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "log": {"dir": "logs"},
  "optimizer": {"type": "adamw", "params": {"lr": "auto", "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
  "bf16": {"enabled": true},
  "fp32_allreduce": true,
  "steps_per_print": 1e5,
  "zero_optimization": {
    "stage": 3, "cpu_offload": true, "max_live_parameters": 2e9, "reduce_scatter": true,
    "offload_param": {"device": "cpu"}, "overlap": true
  },
  "curriculum_learning": {"enabled": true, "min_difficulty": 8},
  "elasticity": {"enabled": false}
}"""
SET = [
    "train_micro_batch_size_per_gpu=4",
    "gradient_accumulation_steps=2",
    "training.train_steps=9",
]


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 2}])
def test_a_missing_batch_size_is_among_the_options_that_the_file_needs(given):
    found = explain({**given, "zero_optimization": {"stage": 2}})
    assert set(found.overrides) == {
        "train_micro_batch_size_per_gpu=N", "zero_optimization.stage=1",
    }  # fmt: skip
    load(
        {**given, "zero_optimization": {"stage": 2}},
        [override.replace("=N", "=4") for override in found.overrides],
    )


def test_each_key_is_explained_in_the_order_of_the_file():
    found = explain(FILE)
    assert [(key.status, key.text.split(":")[0][:66]) for key in found.keys] == [
        ("needed", "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumul"),
        ("default", 'train_micro_batch_size_per_gpu "auto" -> null'),
        ("default", 'gradient_accumulation_steps "auto" -> null'),
        ("user", 'log {"dir"'),
        ("honoured", 'optimizer.type "adamw"'),
        ("default", 'optimizer.params.lr "auto" -> 0.001; the Trainer of transformers w'),
        ("honoured", "optimizer.params.weight_decay 0.1"),
        ("honoured", 'scheduler.type "WarmupDecayLR"'),
        ("default", 'scheduler.params.total_num_steps "auto" -> null; the Trainer of tr'),
        ("needed", "scheduler.params.total_num_steps is missing, and so is training.tr"),
        ("honoured", "bf16.enabled true"),
        ("changed", "fp32_allreduce true -> communication_data_type"),
        ("honoured", "steps_per_print 100000.0"),
        ("changed", "zero_optimization.stage 3 -> 1"),
        ("changed", "zero_optimization.cpu_offload true -> zero_optimization.offload_op"),
        ("ignored", "zero_optimization.max_live_parameters 2000000000.0"),
        ("honoured", "zero_optimization.reduce_scatter true"),
        ("ignored", 'zero_optimization.offload_param.device "cpu"'),
        ("refused", "unknown key 'zero_optimization.overlap'; similar"),
        ("refused", "curriculum_learning.enabled is enabled, but not supported"),
        ("ignored", 'elasticity {"enabled"'),
    ]
    assert found.overrides == (
        "training.train_steps=N", "train_micro_batch_size_per_gpu=N",
        "gradient_accumulation_steps=N", "zero_optimization.stage=1",
    )  # fmt: skip
    assert not found.is_complete


def test_the_config_has_the_keys_with_an_effect_under_their_names_here():
    found = explain(FILE, SET)
    assert json.loads(as_json(found)) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "user": {"log": {"dir": "logs"}},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR"},
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "steps_per_print": 100000,
        "training": {"train_steps": 9},
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    assert found.overrides == ("zero_optimization.stage=1",)
    assert {key.text.split(" ")[0] for key in found.keys if key.status == "refused"} == {
        "unknown",
        "curriculum_learning.enabled",
    }
    assert not found.is_complete


def test_a_file_that_differs_only_in_the_stage_is_complete_and_gives_an_equal_config():
    tree = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
        "fp16": {"enabled": True, "initial_scale_power": 12},
        "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
        "zero_optimization": {"stage": 2, "contiguous_gradients": True},
    }
    found = explain(tree)
    assert found.is_complete
    assert found.overrides == ("zero_optimization.stage=1",)
    expected = load(tree, found.overrides).to_dict()
    assert load(found.tree).to_dict() | {"zero_optimization": None} == expected | {
        "zero_optimization": None
    }
    assert found.tree["mesh"] == {"pipeline": 2}


def test_a_key_of_stage_3_is_ignored_whatever_its_value():
    for value in (5e7, 1e6):  # DeepSpeed's default, another
        zero = {"stage": 1, "stage3_prefetch_bucket_size": value, "contiguous_gradients": True}
        found = explain({"train_batch_size": 8, "zero_optimization": zero})
        status = {".".join(key.path): key.status for key in found.keys}
        assert status["zero_optimization.stage3_prefetch_bucket_size"] == "ignored"
        assert status["zero_optimization.contiguous_gradients"] == "honoured"


def test_a_refused_optimizer_gets_the_one_to_use_instead():
    params = {"lr": 0.1, "freeze_step": 7}
    tree = {"train_batch_size": 8, "optimizer": {"type": "OneBitLamb", "params": params}}
    found = explain(tree)
    assert found.tree["optimizer"] == {"type": "Lamb", "params": {"lr": 0.1}}
    assert found.overrides == ("optimizer.type=Lamb",)
    assert not found.is_complete
    assert [key.status for key in found.keys] == ["honoured", "refused", "honoured", "refused"]


def test_notes_are_told_once_and_ignored_keys_only_in_their_line():
    tree = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}
    found = explain(tree | {"disable_allgather": True})
    assert [note.split(" ")[0] for note in found.notes] == [
        "gradient_clipping",
        "optimizer.params.weight_decay",
    ]


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ({"train_batch_size": "x"}, "needed"),
        ({"train_batch_size": 8, "mesh": 3}, "refused"),
        ({"train_batch_size": 8, "optimizer": {"type": "Nothing"}}, "refused"),
        ('{"train_batch_size": 8, "seed": 1, "seed": 2}', "refused"),
        ({"train_batch_size": 8, "optimizer": 4}, "refused"),
    ],
)
def test_any_file_is_explained(source, status):
    found = explain(source)
    assert status in [key.status for key in found.keys]
    assert not found.is_complete


def test_a_file_that_is_not_an_object_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"must be an object, not \[1\]"):
        explain(tmp_path / "list.json")


def test_a_key_of_the_user_is_adopted_by_load_with_a_warning():
    tree = {"train_batch_size": 8, "log": {"a": 1}, "user": {"b": 2}}
    with pytest.raises(ConfigError, match="unknown key 'log'"):
        load(tree)
    config = load(tree, adopt=True)
    assert config.user == {"log": {"a": 1}, "b": 2}
    assert config.warnings == (
        "the key 'log' is not one of pipemega or DeepSpeed: it is in config.user",
    )
    # A key that is probably a slip stays an error.
    with pytest.raises(ConfigError, match="did you mean 'zero_optimization'"):
        load(tree | {"zero_optimisation": {"stage": 1}}, adopt=True)


def test_the_command_prints_the_config_and_the_explanation_apart(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(FILE)
    assert main(["config", "from-deepspeed", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == (
        "result     to run the file itself, add --set training.train_steps=N --set "
        "train_micro_batch_size_per_gpu=N --set gradient_accumulation_steps=N --set "
        "zero_optimization.stage=1; 2 refused, left out of the config"
    )
    assert json.loads(printed.out)["bf16"] == {"enabled": True}
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    assert main(["config", "from-deepspeed", str(path), "--world", "4"]) == 0
    printed = capsys.readouterr()
    assert "changed    zero_optimization.stage 2 -> 1: " in printed.err
    assert "stage 1 on 4 data ranks takes" in printed.err
    path.write_text(printed.out)
    assert main(["check", str(path)]) == 0

"""Reading a config: accepted forms, errors, overrides, derived values."""

import base64
import json
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipemega.config import Config, load
from pipemega.config.source import key_lines
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import BASE, MODEL

HAND_WRITTEN = """\
{
  // two of the three sizes are enough
  "train_batch_size": 16,  # samples
  "train_micro_batch_size_per_gpu": 2,
  "_comment": {"anything": [1, 2]},
  /* "mesh": {"tensor": 64},
     is a comment */
  "mesh": {"tensor": 2, "_comment_mesh": "http://not/a/comment #1"},
  "tensorboard": {"output_path": "runs//a # b /* c */"},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95],}},
}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_comments_and_trailing_commas_are_accepted_and_comment_keys_dropped(tmp_path):
    config = load(write(tmp_path, HAND_WRITTEN))
    assert config.batch(1).num_microbatches == 8
    assert config.mesh.tensor == 2
    assert config.tensorboard.output_path == "runs//a # b /* c */"
    assert config.optimizer.params.arguments()["betas"] == (0.9, 0.95)


def test_a_path_a_mapping_a_text_and_a_config_give_equal_configs(tmp_path):
    path = write(tmp_path, HAND_WRITTEN)
    config = load(path)
    assert load(str(path)) == load(HAND_WRITTEN) == load(config.to_dict()) == config
    assert load(config) is config


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(BASE).encode())
    assert load(path) == load(BASE)


FULL = BASE | {
    "mesh": {"tensor": 2, "pipeline": 2, "data": 2, "sequence_parallel": True},
    "pipeline": {"partition": [0, 3, 8], "schedule": "f-then-b", "use_reentrant": True},
    "optimizer": {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}},
    "scheduler": {"type": "wsd", "params": {"wsd_decay_steps": 10, "warmup_fraction": 0.1}},
    "data": {"data_path": [0.3, "a", 1, "b"], "split": "8,1,1"},
    "bfloat16": {"enabled": True},
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8},
    "aio": {"block_size": 1},
    "wandb": {"enabled": True, "tags": ["x", "y"]},
    "amp": {"enabled": False},
}


@pytest.mark.parametrize("tree", [BASE, FULL])
def test_a_resolved_config_reads_back_to_an_equal_one_with_equal_warnings(tree, tmp_path):
    config = load(tree)
    again = load(write(tmp_path, config.to_json()))
    assert again == config
    assert again.to_json() == config.to_json()
    expected = [w for w in config.warnings if not w.startswith("optimizer Adam")]
    assert list(again.warnings) == expected


def test_a_resolved_config_has_all_supported_keys_and_no_unsupported_ones_that_were_not_set():
    found = load(BASE).to_dict()
    assert found["pipeline"]["schedule"] == "1f1b"
    assert found["gradient_clipping"] == 1.0
    assert "amp" not in found
    assert "sub_group_size" not in found["zero_optimization"]


def test_a_config_is_frozen():
    config = load(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.mesh.tensor = 2


def test_a_config_does_not_share_state_with_the_mapping_it_was_loaded_from():
    tree = {**BASE, "mesh": {"tensor": 1}, "aio": {"block_size": [1]}}
    config = load(tree)
    tree["mesh"]["tensor"] = 4
    tree["aio"]["block_size"].append(2)
    assert config.mesh.tensor == 1
    assert config.to_dict()["aio"] == {"block_size": [1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seed": 1, "seed": 2}', "key 'seed' occurs twice"),
        ('{"mesh": {"tensor": 1, "tensor": 1}}', "key 'mesh.tensor' occurs twice"),
        ('{"mesh": {}, "_comment": 1, "_comment": 2, "mesh": {}}', "key 'mesh' occurs twice"),
        ('{"seed": NaN}', "seed is nan: numbers must be finite"),
        ('{"gradient_clipping": Infinity}', "gradient_clipping is inf"),
        ('{"optimizer": {"params": {"lr": 1e999}}}', "optimizer.params.lr is inf"),
        ('{"seed": 1', "is not JSON"),
        ("[1, 2]", "the config must be an object, not [1, 2]"),
        ("", "is not JSON"),
        ('{"seed": ' + "[" * 5000, "is not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(text, message, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        load(write(tmp_path, text))
    assert message in str(refusal.value)
    assert "ds.json" in str(refusal.value)


def test_a_syntax_error_is_reported_with_its_line(tmp_path):
    with pytest.raises(ConfigError, match=r"ds\.json is not JSON: line 3 .*column"):
        load(write(tmp_path, '{\n"seed": 1,\n"mesh" {}\n}'))


def test_an_invalid_value_is_reported_with_file_and_line(tmp_path):
    text = HAND_WRITTEN.replace('"lr": 3e-4', '"lr": "3e-4"')
    with pytest.raises(ConfigError, match=r'not "3e-4" \(.*ds\.json, line 10\)$'):
        load(write(tmp_path, text))


MISTAKES = """\
{
  "train_batch_sze": 32,
  "mesh": {"tensor": "two", "pipeline": 40},
  "seed": NaN,
  "model": {"num_layer": 4, "hidden_size": 130, "num_attention_heads": 4, "seq_length": 128},
  "checkpoint": {"interval": 5},
  "optimizer": {"type": "Adamm", "params": {"lr": -1}},
  "fp16": {"enabled": true},
  "bf16": {"enabled": true},
  "amp": {"enabled": true, "optlevel": 1, "lossscale": 2}
}
"""


def test_all_errors_of_a_file_are_reported_with_their_lines_and_no_consequences(tmp_path):
    """A misspelled key does not also count as missing, and no rule reads a key with an error."""
    with pytest.raises(ConfigError) as refusal:
        load(write(tmp_path, MISTAKES))
    title, *problems = str(refusal.value).split("\n  ")
    assert title == f"{tmp_path}/ds.json has 12 errors:"
    assert tuple(problems) == refusal.value.problems
    assert [problem.partition(",")[0].partition(";")[0] for problem in problems] == [
        "line 2: unknown key 'train_batch_sze'",
        "line 3: mesh.tensor must be an integer >= 1",
        "line 4: seed is nan: numbers must be finite",
        "line 5: unknown key 'model.num_layer'",
        "line 5: model.hidden_size (130) must be a multiple of model.num_attention_heads (4): the "
        "nearest that fit are 128 and 132",
        "line 6: checkpoint.interval is 5",
        "line 7: optimizer.type 'Adamm' is not known",
        "line 7: optimizer.params.lr must be a number >= 0",
        "line 8: fp16.enabled and bf16.enabled are both true: keep one",
        "line 10: unknown key 'amp.optlevel'",
        "line 10: unknown key 'amp.lossscale'",
        "line 10: amp.enabled is enabled",
    ]


def test_an_error_in_one_key_does_not_hide_a_contradiction_of_others():
    tree = {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2, "seed": "x"}
    with pytest.raises(ConfigError) as refusal:
        load(tree | {"model": MODEL | {"hidden_dropout": 2}, "mesh": {"tensor": 8}})
    assert [problem.partition(" ")[0] for problem in refusal.value.problems] == [
        "model.hidden_dropout",
        "seed",
        "model.num_attention_heads",
        "train_batch_size",
    ]


def test_a_duplicate_key_is_reported_with_both_lines(tmp_path):
    with pytest.raises(ConfigError, match=r"ds\.json, lines 2 and 4\)$"):
        load(write(tmp_path, '{\n"seed": 1,\n"train_batch_size": 1,\n"seed": 2}'))


def test_lines_of_keys_are_found_through_comments_strings_and_lists():
    text = '{"a": /* \n */ [{"b": 1},\n {"b": 2}], // "c": 1\n "d": {"e": ":{", \n\'f\': 1}, g: 2}'
    assert key_lines(text) == {
        ("a",): [1], ("a", "b"): [2, 3], ("d",): [4], ("d", "e"): [4], ("d", "f"): [5], ("g",): [5],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/file.json", "cannot read the config 'no/such/file.json': No such file"),
        (".", "cannot read the config '.': Is a directory"),
        ("a\0b", "cannot read the config"),
        (17, "a config is a path, a mapping or a Config, not int"),
        ({1: 2}, "keys must be text"),
        ({"seed": object()}, "seed is of type object, which JSON does not have"),
    ],
)
def test_a_source_of_the_wrong_type_is_refused(source, message):
    with pytest.raises(ConfigError) as refusal:
        load(source)
    assert message in str(refusal.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"{\xff\xfe}")
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(path)


def test_a_mapping_that_contains_itself_is_refused():
    tree = {**BASE}
    tree["aio"] = tree
    with pytest.raises(ConfigError, match="contains itself"):
        load(tree)


def test_overrides_replace_keys_of_the_file_and_create_missing_sections():
    config = load(
        BASE,
        [
            "pipeline.schedule=gpipe",
            "mesh.tensor=2",
            "seed = 7",
            "checkpoint.save=a=b",
            "model=null",
        ],
    )
    assert config.pipeline.schedule == "gpipe"
    assert config.mesh.tensor == 2
    assert config.seed == 7
    assert config.checkpoint.save == "a=b"
    assert config.model is None


def test_an_override_may_be_a_whole_object_or_a_list():
    config = load(
        BASE, ['optimizer={"type": "SGD", "params": {"lr": 1}}', "pipeline.partition=[0, 6]"]
    )
    assert config.optimizer.params.arguments() == {"lr": 1.0}
    assert config.pipeline.partition == (0, 6)


def test_overrides_apply_to_a_loaded_config_too():
    config = load(load(FULL), ["training.train_steps=7", "scheduler=null"])
    assert config.training.train_steps == 7
    assert config.mesh == load(FULL).mesh


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.shedule=gpipe", "unknown key 'pipeline.shedule'; did you mean 'schedule'?"),
        ("mesh.tensor=two", 'mesh.tensor must be an integer >= 1, not "two"'),
        ("mesh.tensor=2.5", "mesh.tensor must be an integer >= 1, not 2.5"),
        ("mesh.tensor", "write KEY=VALUE, such as pipeline.schedule=gpipe"),
        ("mesh..tensor=1", "write KEY=VALUE"),
        ("=1", "write KEY=VALUE"),
        ("train_micro_batch_size_per_gpu.x=1", "'x' needs an object above it, not 2"),
        ("seed=NaN", "seed is nan"),
        ('mesh={"tensor": 1, "tensor": 2}', "key 'mesh.tensor' occurs twice"),
        ("fp16.loss_scale=-1", "fp16.loss_scale must be a number >= 0, not -1"),
    ],
)
def test_an_override_is_as_strict_as_the_file(override, message):
    with pytest.raises(ConfigError) as refusal:
        load(BASE, [override])
    assert message in str(refusal.value)


def test_a_large_file_is_read_in_a_moment(tmp_path):
    free = {f"key {n}": list(range(10)) for n in range(4000)}
    text = json.dumps({"train_batch_size": 1, "user": free, "seed": -1}, indent=1)
    started = time.process_time()
    with pytest.raises(ConfigError, match=rf"seed .* line {text.count(chr(10))}\)$"):
        load(write(tmp_path, text))
    assert time.process_time() - started < 10  # json5 alone takes 30 s


@pytest.mark.parametrize("deep", ['{"user": {"a": ' + "[" * 90000, '{"a": /**/' + "[" * 90000])
def test_text_that_is_nested_too_deeply_is_refused(tmp_path, deep):
    with pytest.raises(ConfigError, match=r"ds.json is not JSON: it is nested too deeply$"):
        load(write(tmp_path, deep))


def test_base64_text_is_a_config_as_in_deepspeed():
    text = base64.urlsafe_b64encode(json.dumps(BASE | {"seed": 7}).encode()).decode()
    assert load(text).seed == 7
    with pytest.raises(ConfigError, match="the given base64 text is not JSON: line 1"):
        load(base64.urlsafe_b64encode(b'{"seed": what}').decode())
    with pytest.raises(ConfigError, match="cannot read the config 'ezezezezez': No such file"):
        load("ezezezezez")


def test_no_line_is_reported_for_a_key_that_an_override_set(tmp_path):
    with pytest.raises(ConfigError, match=r"ds\.json\)$"):
        load(write(tmp_path, '{\n"train_batch_size": 1, "seed": 1}'), ["seed=-1"])


def test_auto_as_the_value_of_a_deepspeed_key_means_its_default():
    tree = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": "auto"},
        "zero_optimization": {"reduce_bucket_size": "auto"},
        "pipeline": {"stages": "auto"},
        "mesh": {"data": "auto", "device": "auto"},
    }
    config = load(tree)
    assert config.warnings == (
        '"auto" means the default of gradient_clipping (1.0), fp16.enabled (false), '
        "optimizer.params.lr (0.001), optimizer.params.betas ([0.9, 0.999]): the Trainer of "
        "transformers would fill these keys from its arguments; set the values, such as --set "
        "gradient_clipping=VALUE",
    )
    assert config.optimizer.params.lr == 1e-3
    assert config.batch(3).train_batch_size == 6
    assert config.gradient_clipping == 1.0


def test_zero_optimization_may_be_a_bool_and_bf16_has_its_old_name():
    config = load(BASE | {"zero_optimization": False, "bfloat16": {"enabled": True}})
    assert config.zero_optimization.stage == 0
    assert config.bf16.enabled
    assert load(BASE | {"zero_optimization": True}).zero_optimization.stage == 1


def test_monitor_trace_may_be_a_list_of_steps():
    short, whole = (
        load({"train_batch_size": 2, "monitor": {"trace": trace}})
        for trace in ([1, 10], {"steps": [1, 10]})
    )
    assert short == whole
    assert short.monitor.trace.steps == (1, 10)
    assert load({"train_batch_size": 2}, ["monitor.trace=[3]"]).monitor.trace.steps == (3,)
    with pytest.raises(ConfigError, match=r"monitor.trace.steps"):
        load({"train_batch_size": 2, "monitor": {"trace": [0]}})


def test_pipeline_stages_sets_mesh_pipeline_if_that_is_missing():
    assert load(BASE | {"pipeline": {"stages": 3}}).mesh.pipeline == 3
    with pytest.raises(ConfigError, match=r"pipeline\.stages must be an integer"):
        load(BASE | {"pipeline": {"stages": "3"}})


def test_model_sizes_that_are_null_are_computed():
    model = load(BASE).model
    assert (model.feed_forward_size, model.query_groups, model.head_size) == (256, 4, 16)
    llama = load(
        BASE | {"model": MODEL | {"swiglu": True, "hidden_size": 512, "num_query_groups": 2}}
    ).model
    # 8/3 * 512 = 1365.3, up to a multiple of 64.
    assert (llama.feed_forward_size, llama.query_groups, llama.head_size) == (1408, 2, 128)
    exact = load(BASE | {"model": MODEL | {"swiglu": True, "hidden_size": 192}}).model
    assert exact.feed_forward_size == 512


def test_the_blend_and_the_split_are_read_into_numbers():
    data = load(FULL).data
    assert data.token_files("train") == ((0.3, "a", None), (1.0, "b", None))
    assert data.split_weights == (0.8, 0.1, 0.1)
    assert load(BASE).data.token_files("train") == ()


WEIGHTED, PLAIN = ((0.3, "a", None), (0.7, "b", None)), ((None, "a", None), (None, "b", None))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ((None, "a", None),)),
        ("my data/a", ((None, "my data/a", None),)),
        ("0.3 a 0.7 b", WEIGHTED),
        (" 0.3  a\n 0.7 b ", WEIGHTED),
        ([0.3, "a", 0.7, "b"], WEIGHTED),
        (["0.3", "a", "0.7", "b"], WEIGHTED),
        (["0.3", "a", 0.7, " b"], WEIGHTED),
        (["0.3 a 0.7 b"], WEIGHTED),
        ("1 a", ((1.0, "a", None),)),
        (["a", "b"], PLAIN),
        (["1", "2", "3"], ((None, "1", None), (None, "2", None), (None, "3", None))),
        (["1", "2"], ((1.0, "2", None),)),
    ],
)
def test_megatrons_forms_of_a_data_path_are_read(given, expected):
    assert load(BASE | {"data": {"data_path": given}}).data.token_files("valid") == expected
    paths = {"train_data_path": given, "valid_data_path": "c"}
    data = load(BASE | {"data": paths}).data
    assert (data.token_files("train"), data.token_files("test")) == (expected, ())
    assert data.keyed_token_files[-1] == ("data.valid_data_path", "c")
    assert load(json.loads(load(BASE | {"data": paths}).to_json())).data == data


def test_words_that_are_prefixes_of_existing_files_are_several_prefixes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.idx").touch()
    given = f"{tmp_path}/a {tmp_path}/b.bin"
    files = load(BASE | {"data": {"data_path": given}}).data.token_files("train")
    assert [part.prefix for part in files] == given.split()


def test_a_part_of_the_documents_is_given_in_bigsciences_form():
    data = load(BASE | {"data": {
        "train_data_path": "TRAIN: 0.3 0:0.6 data/a, 1 0.5:1 data/b", "valid_data_path": "1 .6:1 a",
    }}).data  # fmt: skip
    assert data.token_files("train") == ((0.3, "data/a", (0, 0.6)), (1, "data/b", (0.5, 1)))
    assert data.token_files("valid") == ((1, "a", (0.6, 1)),)


def test_missing_shares_of_a_split_are_zero():
    for split, weights in {"99,1": (0.99, 0.01, 0), "1": (1, 0, 0), "8/2": (0.8, 0.2, 0)}.items():
        data = load(BASE | {"data": {"split": split}}).data
        assert data.split_weights == weights
        assert data.splits == ("train", "valid")[: 2 if weights[1] else 1]


def test_a_run_without_validation_data_warns_that_it_does_not_evaluate():
    training = {"eval_interval": 5}
    for data, why in (
        ({"data_path": "a", "split": "100,0,0"}, "data.split has none"),
        ({"train_data_path": "a"}, "data.valid_data_path is not set"),
    ):
        expected = f"the run has no validation data, and does not evaluate: {why}"
        assert expected in load(BASE | {"data": data, "training": training}).warnings
        assert not any("validation" in text for text in load(BASE | {"data": data}).warnings)


def test_every_optimizer_and_schedule_is_found_in_any_case_of_letters():
    config = load(BASE | {"optimizer": {"type": "ADAMW"}, "scheduler": {"type": "wsd",
                  "params": {"wsd_decay_steps": 1}}})  # fmt: skip
    assert config.optimizer.type == "AdamW"
    assert config.scheduler.type == "WSD"


def test_a_schedule_uses_train_steps_if_its_own_length_is_not_set():
    def arguments(kind, **params):
        section = load(BASE | {"scheduler": {"type": kind, "params": params}}).scheduler
        return section.params.arguments(100)

    assert arguments("WarmupDecayLR")["total_num_steps"] == 100
    assert arguments("WarmupDecayLR", total_num_steps=5)["total_num_steps"] == 5
    assert arguments("cosine")["decay_steps"] == 100
    assert arguments("cosine", warmup_fraction=0.25)["warmup_steps"] == 25
    assert arguments("linear", warmup_fraction=0.25, decay_steps=40)["warmup_steps"] == 10
    assert "max_lr" not in arguments("linear")


def test_a_config_with_only_a_batch_size_is_complete():
    assert isinstance(load({"train_batch_size": 1}), Config)

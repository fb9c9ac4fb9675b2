"""What a file may look like, and what comes of it."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipemega.config import Config, load
from pipemega.config.reading import key_lines
from pipemega.errors import ConfigError
from tests.paper.config_tree import BASE, MODEL

HAND_WRITTEN = """\
{
  // of two, the third follows
  "train_batch_size": 16,  # samples
  "train_micro_batch_size_per_gpu": 2,
  "_comment": {"anything": [1, 2]},
  /* "mesh": {"tensor": 64},
     is not said */
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


def test_a_path_a_mapping_a_text_and_a_config_say_the_same(tmp_path):
    path = write(tmp_path, HAND_WRITTEN)
    config = load(path)
    assert load(str(path)) == load(HAND_WRITTEN) == load(config.to_dict()) == config
    assert load(config) is config


def test_a_byte_order_mark_is_read_over(tmp_path):
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
    told = [w for w in config.warnings if not w.startswith("optimizer Adam")]
    assert list(again.warnings) == told


def test_a_resolved_config_has_every_default_that_matters_and_nothing_that_was_not_written():
    found = load(BASE).to_dict()
    assert found["pipeline"]["schedule"] == "1f1b"
    assert found["gradient_clipping"] == 1.0
    assert "amp" not in found
    assert "sub_group_size" not in found["zero_optimization"]


def test_a_config_cannot_be_written_to():
    config = load(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.mesh.tensor = 2


def test_what_is_read_does_not_change_with_the_mapping_that_it_came_from():
    tree = {**BASE, "mesh": {"tensor": 1}, "aio": {"block_size": [1]}}
    config = load(tree)
    tree["mesh"]["tensor"] = 4
    tree["aio"]["block_size"].append(2)
    assert config.mesh.tensor == 1
    assert config.to_dict()["aio"] == {"block_size": [1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seed": 1, "seed": 2}', "key 'seed' is written twice"),
        ('{"mesh": {"tensor": 1, "tensor": 1}}', "key 'mesh.tensor' is written twice"),
        ('{"mesh": {}, "_comment": 1, "_comment": 2, "mesh": {}}', "key 'mesh' is written twice"),
        ('{"seed": NaN}', "seed is nan: a config has finite numbers only"),
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


def test_a_syntax_error_is_told_with_its_line(tmp_path):
    with pytest.raises(ConfigError, match=r"ds\.json is not JSON: line 3 .*column"):
        load(write(tmp_path, '{\n"seed": 1,\n"mesh" {}\n}'))


def test_a_wrong_key_is_told_with_its_file_and_line(tmp_path):
    text = HAND_WRITTEN.replace('"lr": 3e-4', '"lr": "3e-4"')
    with pytest.raises(ConfigError, match=r'not "3e-4" \(.*ds\.json, line 10\)$'):
        load(write(tmp_path, text))


def test_a_key_that_is_written_twice_is_told_with_both_lines(tmp_path):
    with pytest.raises(ConfigError, match=r"lines? 2 and 4\)$"):
        load(write(tmp_path, '{\n"seed": 1,\n"mesh": {},\n"seed": 2}'))


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
        ({1: 2}, "keys are texts"),
        ({"seed": object()}, "seed is a object, which JSON does not have"),
    ],
)
def test_a_source_that_is_no_config_is_refused(source, message):
    with pytest.raises(ConfigError) as refusal:
        load(source)
    assert message in str(refusal.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"{\xff\xfe}")
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(path)


def test_a_mapping_that_contains_itself_is_refused():
    tree = {**BASE}
    tree["aio"] = tree
    with pytest.raises(ConfigError, match="contains itself"):
        load(tree)


def test_overrides_write_over_the_file_and_make_sections_that_are_missing():
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


def test_overrides_go_over_a_loaded_config_too():
    config = load(load(FULL), ["training.train_steps=7", "scheduler=null"])
    assert config.training.train_steps == 7
    assert config.mesh == load(FULL).mesh


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.shedule=gpipe", "unknown key 'pipeline.shedule'; did you mean 'schedule'?"),
        ("mesh.tensor=two", 'mesh.tensor must be an integer >= 1, not "two"'),
        ("mesh.tensor=2.0", "mesh.tensor must be an integer >= 1, not 2.0"),
        ("mesh.tensor", "write KEY=VALUE, such as pipeline.schedule=gpipe"),
        ("mesh..tensor=1", "write KEY=VALUE"),
        ("=1", "write KEY=VALUE"),
        ("train_micro_batch_size_per_gpu.x=1", "there is 2 above 'x', and no object"),
        ("seed=NaN", "seed is nan"),
        ('mesh={"tensor": 1, "tensor": 2}', "key 'mesh.tensor' is written twice"),
        ("fp16.loss_scale=-1", "fp16.loss_scale must be a number >= 0, not -1"),
    ],
)
def test_an_override_is_as_strict_as_the_file(override, message):
    with pytest.raises(ConfigError) as refusal:
        load(BASE, [override])
    assert message in str(refusal.value)


def test_the_line_of_a_key_is_not_told_where_an_override_wrote_it(tmp_path):
    with pytest.raises(ConfigError, match=r"ds\.json\)$"):
        load(write(tmp_path, '{\n"seed": 1}'), ["seed=-1"])


def test_auto_at_a_key_of_deepspeeds_means_its_default():
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
    assert config.warnings == ()
    assert config.optimizer.params.lr == 1e-3
    assert config.batch(3).train_batch_size == 6
    assert config.gradient_clipping == 1.0


def test_the_bare_bool_of_zero_and_the_old_name_of_bf16_are_understood():
    config = load(BASE | {"zero_optimization": False, "bfloat16": {"enabled": True}})
    assert config.zero_optimization.stage == 0
    assert config.bf16.enabled
    assert load(BASE | {"zero_optimization": True}).zero_optimization.stage == 1


def test_the_steps_to_time_may_be_a_list_alone():
    short, whole = (
        load({"train_batch_size": 2, "monitor": {"trace": trace}})
        for trace in ([1, 10], {"steps": [1, 10]})
    )
    assert short == whole
    assert short.monitor.trace.steps == (1, 10)
    assert load({"train_batch_size": 2}, ["monitor.trace=[3]"]).monitor.trace.steps == (3,)
    with pytest.raises(ConfigError, match=r"monitor.trace.steps"):
        load({"train_batch_size": 2, "monitor": {"trace": [0]}})


def test_pipeline_stages_stand_in_for_a_mesh_that_is_not_written():
    assert load(BASE | {"pipeline": {"stages": 3}}).mesh.pipeline == 3
    with pytest.raises(ConfigError, match=r"pipeline\.stages must be an integer"):
        load(BASE | {"pipeline": {"stages": "3"}})


def test_sizes_of_the_model_that_are_null_are_worked_out():
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
    assert data.blend == ((0.3, "a"), (1.0, "b"))
    assert data.split_weights == (0.8, 0.1, 0.1)
    assert load(BASE | {"data": {"data_path": ["a", "b"]}}).data.blend == ((None, "a"), (None, "b"))
    assert load(BASE | {"data": {"data_path": "a"}}).data.blend == ((None, "a"),)
    assert load(BASE).data.blend == ()


def test_every_optimizer_and_schedule_is_found_in_any_case_of_letters():
    config = load(BASE | {"optimizer": {"type": "ADAMW"}, "scheduler": {"type": "wsd",
                  "params": {"wsd_decay_steps": 1}}})  # fmt: skip
    assert config.optimizer.type == "AdamW"
    assert config.scheduler.type == "WSD"


def test_a_schedule_takes_the_length_of_the_run_where_its_own_is_not_given():
    def arguments(kind, **params):
        section = load(BASE | {"scheduler": {"type": kind, "params": params}}).scheduler
        return section.params.arguments(100)

    assert arguments("WarmupDecayLR")["total_num_steps"] == 100
    assert arguments("WarmupDecayLR", total_num_steps=5)["total_num_steps"] == 5
    assert arguments("cosine")["decay_steps"] == 100
    assert arguments("cosine", warmup_fraction=0.25)["warmup_steps"] == 25
    assert arguments("linear", warmup_fraction=0.25, decay_steps=40)["warmup_steps"] == 10
    assert "max_lr" not in arguments("linear")


def test_a_config_stays_small_to_build():
    assert isinstance(load({"train_batch_size": 1}), Config)

"""Any input gives a config or a ConfigError."""

from pathlib import Path

import json5
from hypothesis import given
from hypothesis import strategies as st

from pipemega.config import Config, load
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import objects, put
from tests.paper.mutations import changed, damaged, fuzzing, text_of

OBJECTS = list(objects())
# A typical DeepSpeed config.
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "overlap_comm": False,
        "contiguous_gradients": True,
    },
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None},
    "pipeline": {"seed_layers": False, "activation_checkpoint_interval": 0, "stages": "auto"},
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "a"},
    "csv_monitor": {"enabled": False},
    "wandb": {"enabled": False, "team": None, "project": "p"},
}
FILES = sorted((Path(__file__).parents[3] / "configs").glob("*.json"))
TREES = [*(json5.loads(path.read_text()) for path in FILES), DEEPSPEED]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "Adam", "gpipe", "fp16", "type:(", "1,1,1", "linear", "{", "nan"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "params", "enabled", "stage", "a"]), below)
    ),
    max_leaves=6,
)


@st.composite
def changed_configs(draw):
    tree = None
    for _ in range(draw(st.integers(1, 3))):
        path, base, names = draw(st.sampled_from(OBJECTS))
        try:
            tree = put(tree or base, path, draw(st.sampled_from(list(names))), draw(VALUES))
        except (AttributeError, TypeError):  # an earlier change replaced the object
            continue
    return tree


def outcome(source, overrides=()) -> Config | None:
    try:
        return load(source, overrides)
    except ConfigError as error:
        refusal = error
    lines = str(refusal).split("\n")
    assert len(lines) == 1 + len(refusal.problems)
    assert all(line.strip() for line in lines)
    return None


@fuzzing(400)
@given(changed_configs())
def test_any_value_at_any_key_is_accepted_or_refused_by_a_config_error(tree):
    config = outcome(tree)
    if config is not None:
        assert load(config.to_dict()) == config
        assert all(isinstance(warning, str) for warning in config.warnings)


@fuzzing(120)
@given(VALUES)
def test_anything_in_place_of_a_config_is_refused_by_a_config_error(value):
    outcome(value)


@fuzzing(80)
@given(st.text("{}[]\":,'/*#\\ \nasn1.5e-", max_size=40))
def test_any_text_in_place_of_a_file_is_refused_by_a_config_error(text):
    outcome("{" + text)


@fuzzing(80)
@given(st.text("mesh.tnor=1,{}[]\" '", max_size=20))
def test_any_override_is_accepted_or_refused_by_a_config_error(text):
    outcome({"train_batch_size": 8}, [text])


@fuzzing(120)
@given(st.sampled_from(TREES).flatmap(changed))
def test_a_real_config_with_a_changed_structure_is_accepted_or_refused_by_a_config_error(tree):
    config = outcome(tree if isinstance(tree, dict) else text_of(tree))
    if config is not None:
        assert load(config.to_dict()) == config


@fuzzing(60)
@given(st.sampled_from(FILES).flatmap(lambda path: damaged(path.read_bytes())))
def test_a_damaged_file_is_accepted_or_refused_by_a_config_error(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(raw)
    outcome(path)


PATHS = st.sampled_from(
    ["mesh.pipeline", "mesh", "optimizer.params.lr", "model", "a.b", "data.x.y"]
)


@fuzzing(80)
@given(
    PATHS, st.text(max_size=12) | st.sampled_from(["9" * 5000, "[" * 5000, "1e999", "{}", "[[]]"])
)
def test_an_override_of_a_real_config_is_accepted_or_refused_by_a_config_error(path, value):
    outcome(DEEPSPEED, [f"{path}={value}"])

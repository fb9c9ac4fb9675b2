"""Configs as python files and as JSON5, and the section `user`."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError

MODULE = """
from dataclasses import dataclass
import math

BATCH_SIZE = 16
MIXUP = {"alpha": 0.2}
_steps = 4
train_batch_size = BATCH_SIZE * _steps
optimizer = dict(type="AdamW", params=dict(lr=math.pow(10, -3)))
mesh = {"pipeline": 2}
user = {"log_dir": "logs"}

def unused():
    pass
"""


def write(folder: Path, text: str, name: str = "run.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_names_of_a_python_file_are_keys_and_those_in_upper_case_are_in_user(tmp_path):
    config = load(write(tmp_path, MODULE), ["mesh.pipeline=4"])
    assert (config.train_batch_size, config.mesh.pipeline, config.name) == (64, 4, "run")
    assert config.optimizer.params.lr == pytest.approx(1e-3)
    assert config.user.BATCH_SIZE == 16
    assert config.user.MIXUP.alpha == 0.2
    assert config.user.log_dir == "logs"


@pytest.mark.parametrize("name", ["config", "CONFIG"])
def test_a_dict_named_config_is_the_whole_config(tmp_path, name):
    config = load(write(tmp_path, f"size = 8\n{name} = dict(train_batch_size=size)\n"))
    assert config.train_batch_size == 8
    assert config.user == {}


def test_a_python_config_may_import_modules_of_its_folder(tmp_path):
    write(tmp_path, "size = 8", "sizes_of_this_test.py")
    path = write(tmp_path, "from sizes_of_this_test import size as _size\ntrain_batch_size = _size")
    assert load(path).train_batch_size == 8


def test_each_config_imports_the_module_of_its_own_folder(tmp_path):
    """The second config got the module of the first one, which has the same name."""
    text = "from neighbour_of_config import HIDDEN\ntrain_batch_size = 2\n"
    found = []
    for hidden in (8, 16):
        folder = tmp_path / str(hidden)
        folder.mkdir()
        write(folder, f"HIDDEN = {hidden}\n", "neighbour_of_config.py")
        found.append(load(write(folder, text)).user.HIDDEN)
    assert found == [8, 16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train_batch_size = 8\nmesh = dict(\n  pipelin=2)",
            r"'mesh.pipelin'.*\(.*run.py, line 3\)",
        ),
        ("config = {'train_batch_size': 8,\n 'sede': 1}", r"'sede'.*\(.*run.py, line 2\)"),
        (
            "size = 1\n\nx = size / 0",
            r"run.py failed: ZeroDivisionError: .* \(line 3: x = size / 0",
        ),
        ("mesh = {", r"run.py failed: SyntaxError: .*line 1"),
        ("import torch_of_nobody", r"run.py failed: ModuleNotFoundError: .*torch_of_nobody"),
        ("raise SystemExit(3)", r"run.py failed: SystemExit: 3"),
        ("user = {'a': {1, 2}}", r"line 1: user.a is of type set, which JSON"),
        (
            "NUM_MICRO_BATCHES = 4",
            r"'NUM_MICRO_BATCHES'; did you mean 'gradient_accumulation_steps'",
        ),
        (
            "parallel = dict(pipeline=2, tensor=dict(mode='2d', size=4))",
            r"'parallel' is a section of Colossal-AI: write \"mesh\": \{\"pipeline\": 2, "
            r"\"tensor\": 4\} in its place; only tensor mode 1d is supported, not 2d, 2.5d or 3d",
        ),
    ],
)
def test_an_error_of_a_python_config_names_the_file_and_the_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(write(tmp_path, text))


def test_json5_is_read(tmp_path):
    text = "{train_batch_size: 0x10, // 16\n 'mesh': {pipeline: +2,},}"
    config = load(write(tmp_path, text, "run.json5"))
    assert (config.train_batch_size, config.mesh.pipeline) == (16, 2)


@pytest.mark.parametrize("ending", [".yaml", ".yml", ".toml"])
def test_another_format_is_refused_with_the_formats_that_are_read(tmp_path, ending):
    path = write(tmp_path, "a: 1", f"run{ending}")
    with pytest.raises(ConfigError, match="write JSON, JSON5, or a python file"):
        load(path)


def test_user_is_read_by_attributes_and_is_a_json_value():
    config = load(
        {"train_batch_size": 8, "user": {"lr": 0.1, "stages": [{"name": "a"}], "items": 3}}
    )
    assert config.user.lr == config.user["lr"] == 0.1
    assert config.user.stages[0].name == "a"
    assert config.user["items"] == 3
    assert json.loads(config.to_json())["user"]["stages"] == [{"name": "a"}]
    assert load(config.to_dict()).user == config.user
    assert copy.deepcopy(config).user == pickle.loads(pickle.dumps(config)).user == config.user
    with pytest.raises(
        AttributeError, match=r"config.user has no key 'stage'; did you mean 'stages'"
    ):
        _ = config.user.stage
    with pytest.raises(AttributeError, match=r"the config is frozen: set user.lr"):
        config.user.lr = 1


@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
@pytest.mark.parametrize("form", ["mode", "size and mode"])
def test_only_tensor_mode_1d_is_supported(mode, form):
    mesh = {"tensor": {"size": 4, "mode": mode}} if form != "mode" else {"tensor_mode": mode}
    with pytest.raises(ConfigError, match=r"only tensor mode 1d is supported, not 2d, 2.5d or 3d"):
        load({"train_batch_size": 8, "mesh": mesh})
    assert (
        load({"train_batch_size": 8, "mesh": {"tensor": {"size": 4, "mode": "1d"}}}).mesh.tensor
        == 4
    )


def test_the_backend_chooses_the_device_and_must_fit_it():
    assert load({"train_batch_size": 8, "mesh": {"backend": "gloo"}}).mesh.device == "cpu"
    assert load({"train_batch_size": 8, "mesh": {"backend": "nccl"}}).mesh.device == "cuda"
    with pytest.raises(ConfigError, match=r"'nccl' is for mesh.device 'cuda', and mesh.device is"):
        load({"train_batch_size": 8, "mesh": {"backend": "nccl", "device": "cpu"}})
    with pytest.raises(ConfigError, match=r'mesh.backend must be "auto" or "gloo" or "nccl", not'):
        load({"train_batch_size": 8, "mesh": {"backend": "mpi"}})

"""Loading a checkpoint never runs code from it; torch alone can read a checkpoint."""

import hashlib
import io
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from pipemega import initialize
from pipemega.checkpoint.dcp_storage import ShardReader
from pipemega.checkpoint.manifest import FileEntry, dump_state, parse_state
from pipemega.config.sections.optimizer_section import PARAMS
from pipemega.engine.engine import Engine
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import LocalStorage
from tests.optional_packages import HAS_MUON
from tests.ranks.checkpoint.checkpoint_runs import (
    matrices,
    resume_small,
    small_config,
    small_data,
    small_net,
)

CONFIG = small_config("AdamW", {"lr": 0.01}, bf16={"enabled": False})
WEIGHT = "parameters/layers.0.weight"


def build() -> Engine:
    return initialize(small_net(statistics=True), CONFIG)[0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = build()
    engine.train_batch(small_data(engine, 0))
    return engine.save_checkpoint(tmp_path / "runs/mine", "global_step100", {"a": 1})


class Payload:
    """Runs code when it is unpickled: creates a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def replace(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file as an attacker would: with matching size and checksum in state.json."""
    (checkpoint / name).write_bytes(data)
    state = parse_state((checkpoint / "state.json").read_bytes())
    state["files"][name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    (checkpoint / "state.json").write_bytes(dump_state(state))


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_error(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        build().load_checkpoint(checkpoint.parent, checkpoint.name)
    return str(error.value)


@pytest.mark.parametrize("name", ["client.pt", "rank_00000.pt"])
def test_code_in_a_file_of_torch_is_not_run(saved, tmp_path, name):
    data = torch_bytes({"a": Payload(tmp_path / "ran")})
    torch.load(io.BytesIO(data), weights_only=False)
    (tmp_path / "ran").rmdir()  # A plain load runs the code.
    replace(saved, name, data)
    error = load_error(saved)
    assert f"{name} is damaged: " in error
    assert "posix.mkdir" in error
    assert not (tmp_path / "ran").exists()


def test_code_in_a_file_of_tensors_is_not_run(saved, tmp_path):
    """The code is at a position where the index expects a tensor."""
    index = FileSystemReader(saved / "tensors").read_metadata()
    data = torch_bytes(Payload(tmp_path / "ran"))
    file = saved / "tensors" / "__0_0.distcp"
    for info in index.storage_data.values():
        info.offset, info.length = file.stat().st_size, len(data)
    replace(saved, "tensors/__0_0.distcp", file.read_bytes() + data)
    replace(saved, "tensors/.metadata", pickle.dumps(index))
    assert "posix.mkdir" in load_error(saved)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_index_is_not_run(saved, tmp_path):
    data = pickle.dumps(Payload(tmp_path / "ran"))
    pickle.loads(data)
    (tmp_path / "ran").rmdir()  # A plain load runs the code.
    replace(saved, "tensors/.metadata", data)
    assert "it contains posix.mkdir, which no index needs" in load_error(saved)
    assert not (tmp_path / "ran").exists()


def by_name(module: str, name: str, *arguments: str) -> bytes:
    """Return a pickle that calls a function by its module and name."""
    texts = [pickle.SHORT_BINUNICODE + bytes([len(t)]) + t.encode() for t in (module, name)]
    given = b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(t.encode())]) + t.encode() for t in arguments
    )
    call = pickle.STACK_GLOBAL + pickle.MARK + given + pickle.TUPLE + pickle.REDUCE
    return pickle.PROTO + b"\x04" + b"".join(texts) + call + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        # Through the imports of an allowed module.
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch", "os.mkdir"),
    ],
)
def test_the_index_cannot_call_a_function_by_any_name(saved, tmp_path, module, name):
    data = by_name(module, name, str(tmp_path / "ran"))
    pickle.loads(data)
    (tmp_path / "ran").rmdir()  # A plain load runs the code.
    replace(saved, "tensors/.metadata", data)
    assert f"it contains {module}.{name}, which no index needs" in load_error(saved)
    assert not (tmp_path / "ran").exists()


def test_a_bytes_entry_in_the_index_is_not_unpickled(saved, tmp_path):
    """torch loads a bytes entry, which it can write for any object, with plain pickle."""
    index = FileSystemReader(saved / "tensors").read_metadata()
    data = torch_bytes(Payload(tmp_path / "ran"))
    index.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    replace(saved, "tensors/.metadata", pickle.dumps(index))
    assert "BytesStorageMetadata, which no index needs" in load_error(saved)
    replace(saved, "tensors/__0_0.distcp", data)
    assert "BytesStorageMetadata" in load_error(saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [None, {}, Metadata(None), Metadata({})], ids=repr)  # type: ignore[arg-type]
def test_a_file_that_is_not_an_index_is_refused(saved, value):
    replace(saved, "tensors/.metadata", pickle.dumps(value))
    error = load_error(saved)
    assert ".metadata is damaged: it is not a tensor" in error or "missing in the chec" in error


def test_the_index_names_every_tensor_with_shape_and_dtype_and_no_path(saved):
    assert ShardReader(LocalStorage(saved), "tensors").tensors[WEIGHT] == ((8, 6), torch.float32)
    # The folder was renamed after the index was written.
    assert b".saving" not in (saved / "tensors" / ".metadata").read_bytes()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_of_every_dtype_can_be_indexed(tmp_path, dtype):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.zeros(3, dtype=dtype)}, checkpoint_id=tmp_path)
    # torch writes a path object into the index, which is refused; our writer leaves it out.
    with pytest.raises(CheckpointError, match=r"it contains pathlib\S*Path, which no index needs"):
        ShardReader(LocalStorage(tmp_path.parent), tmp_path.name)


def test_plain_torch_reads_the_tensors_by_their_logical_names(saved, tmp_path, monkeypatch):
    """Runs the code blocks of docs/checkpoints.md."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    recipes = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {"engine": build()}
    for recipe in (text for text in recipes if "engine" not in text):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            exec(recipe, names)
    everything = torch.load("all.pt", weights_only=True)
    engine = build()
    engine.load_checkpoint(saved.parent)
    for name, whole in engine.parameter_state().items():
        assert torch.equal(everything[f"parameters/{name}"], whole)
    assert everything["buffers/layers.1.running_mean"].shape == (8,)
    assert everything["optimizer/exp_avg/layers.0.weight"].shape == (8, 6)
    assert everything["optimizer/step/layers.0.weight"] == 1
    assert torch.equal(names["weights"][WEIGHT], everything[WEIGHT])
    # Also the first code block, which uses the engine.
    exec(recipes[0], names)
    assert names["path"].name == "best"


@pytest.mark.parametrize("name", sorted(PARAMS.keys() - ({"Muon"} if not HAS_MUON else set())))
def test_every_optimizer_resumes_bit_for_bit(tmp_path, name):
    config = small_config(name, {"lr": 0.01}, bf16={"enabled": False})
    net = matrices() if name == "Muon" else None
    assert resume_small(config, str(tmp_path), net) == []


def test_a_checkpoint_without_optimizer_loads_into_a_run_with_one_and_back(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    bare = initialize(small_net(statistics=True), config)[0]
    with torch.no_grad():
        for parameter in bare.module.parameters():
            parameter.fill_(0.25)
    bare.save_checkpoint(tmp_path)
    engine = build()
    engine.load_checkpoint(tmp_path)
    assert all((p == 0.25).all() for p in engine.parameter_state().values())
    engine.train_batch(small_data(engine, 0))
    engine.save_checkpoint(tmp_path / "trained")
    # The other direction: the optimizer state in the checkpoint is ignored.
    bare.load_checkpoint(tmp_path / "trained")
    ours, theirs = engine.parameter_state(), bare.parameter_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_fp32_checkpoint_loads_into_an_fp16_run_and_back(tmp_path):
    net = small_net(statistics=False)
    plain = initialize(net, CONFIG)[0]
    fp16 = {"enabled": True, "initial_scale_power": 8, "auto_cast": True}
    half = initialize(net, {**CONFIG, "fp16": fp16})[0]
    plain.train_batch(small_data(plain, 0))
    plain.save_checkpoint(tmp_path)
    half.load_checkpoint(tmp_path)
    before, after = plain.parameter_state(), half.parameter_state()
    assert all(
        torch.equal(before[name], after[name].float()) for name in before if "2." not in name
    )
    half.train_batch(small_data(half, 1))
    half.save_checkpoint(tmp_path)
    plain.load_checkpoint(tmp_path)
    assert plain.global_steps == 2
    after, before = plain.parameter_state(), half.parameter_state()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)

"""Nothing that is loaded can run code; and what plain torch makes of a checkpoint."""

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
from pipemega.checkpoint.disk import LocalDisk
from pipemega.checkpoint.manifest import FileEntry, opened, sealed
from pipemega.checkpoint.storage import Reader
from pipemega.config.optimizer import PARAMS
from pipemega.engine import Engine
from pipemega.errors import CheckpointError
from tests.ranks.checkpoint_run import matrices, resume_small, small_config, small_data, small_net

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
    """Runs code when it is unpickled: leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def replace(checkpoint: Path, name: str, data: bytes) -> None:
    """As an attacker would, with size and sum as they are written down."""
    (checkpoint / name).write_bytes(data)
    state = opened((checkpoint / "state.json").read_bytes())
    state["files"][name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    (checkpoint / "state.json").write_bytes(sealed(state))


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def refused(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        build().load_checkpoint(checkpoint.parent, checkpoint.name)
    return str(error.value)


@pytest.mark.parametrize("name", ["client.pt", "rank_00000.pt"])
def test_code_in_a_file_of_torch_is_not_run(saved, tmp_path, name):
    data = torch_bytes({"a": Payload(tmp_path / "ran")})
    torch.load(io.BytesIO(data), weights_only=False)
    (tmp_path / "ran").rmdir()  # It would have been.
    replace(saved, name, data)
    said = refused(saved)
    assert f"{name} is damaged: " in said
    assert "posix.mkdir" in said
    assert not (tmp_path / "ran").exists()


def test_code_in_a_file_of_tensors_is_not_run(saved, tmp_path):
    """In the place of a tensor, where the index says that there is one."""
    index = FileSystemReader(saved / "tensors").read_metadata()
    data = torch_bytes(Payload(tmp_path / "ran"))
    file = saved / "tensors" / "__0_0.distcp"
    for info in index.storage_data.values():
        info.offset, info.length = file.stat().st_size, len(data)
    replace(saved, "tensors/__0_0.distcp", file.read_bytes() + data)
    replace(saved, "tensors/.metadata", pickle.dumps(index))
    assert "posix.mkdir" in refused(saved)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_index_is_not_run(saved, tmp_path):
    data = pickle.dumps(Payload(tmp_path / "ran"))
    pickle.loads(data)
    (tmp_path / "ran").rmdir()  # It would have been.
    replace(saved, "tensors/.metadata", data)
    assert "it asks for posix.mkdir, which no index needs" in refused(saved)
    assert not (tmp_path / "ran").exists()


def by_name(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls a function by its module and name."""
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
        # By way of what an allowed module has imported.
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch", "os.mkdir"),
    ],
)
def test_no_way_by_name_leads_from_the_index_to_code(saved, tmp_path, module, name):
    data = by_name(module, name, str(tmp_path / "ran"))
    pickle.loads(data)
    (tmp_path / "ran").rmdir()  # It would have been.
    replace(saved, "tensors/.metadata", data)
    assert f"it asks for {module}.{name}, which no index needs" in refused(saved)
    assert not (tmp_path / "ran").exists()


def test_bytes_that_the_index_declares_are_not_unpickled(saved, tmp_path):
    """torch reads an entry of bytes, which it would write for any object, by plain pickle."""
    index = FileSystemReader(saved / "tensors").read_metadata()
    data = torch_bytes(Payload(tmp_path / "ran"))
    index.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    replace(saved, "tensors/.metadata", pickle.dumps(index))
    assert "BytesStorageMetadata, which no index needs" in refused(saved)
    replace(saved, "tensors/__0_0.distcp", data)
    assert "BytesStorageMetadata" in refused(saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [None, {}, Metadata(None), Metadata({})], ids=repr)  # type: ignore[arg-type]
def test_an_index_that_is_none_is_refused(saved, value):
    replace(saved, "tensors/.metadata", pickle.dumps(value))
    said = refused(saved)
    assert ".metadata is damaged: it is no index" in said or "and missing there" in said


def test_the_index_names_every_tensor_with_shape_and_dtype_and_no_path(saved):
    assert Reader(LocalDisk(saved), "tensors").tensors[WEIGHT] == ((8, 6), torch.float32)
    # The folder had another name when it was written.
    assert b".saving" not in (saved / "tensors" / ".metadata").read_bytes()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_of_every_dtype_can_be_indexed(tmp_path, dtype):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.zeros(3, dtype=dtype)}, checkpoint_id=tmp_path)
    # torch writes its own path into the index, which is no data: ours does not.
    with pytest.raises(CheckpointError, match=r"it asks for pathlib\S*Path, which no index needs"):
        Reader(LocalDisk(tmp_path.parent), tmp_path.name)


def test_plain_torch_reads_the_tensors_by_their_logical_names(saved, tmp_path, monkeypatch):
    """With the recipes of the page."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    recipes = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {"engine": build()}
    for recipe in recipes[1:]:
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
    # And how the page uses them.
    exec(recipes[0], names)
    assert names["path"].name == "best"


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_every_optimizer_resumes_bit_for_bit(tmp_path, name):
    config = small_config(name, {"lr": 0.01}, bf16={"enabled": False})
    net = matrices() if name == "Muon" else None
    assert resume_small(config, str(tmp_path), net) == []


def test_a_checkpoint_without_an_optimizer_is_taken_up_by_a_run_with_one(tmp_path):
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
    # And the other way round: the state of the optimizer is left where it is.
    bare.load_checkpoint(tmp_path / "trained")
    ours, theirs = engine.parameter_state(), bare.parameter_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_in_fp16_takes_up_one_in_fp32_and_the_other_way_round(tmp_path):
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

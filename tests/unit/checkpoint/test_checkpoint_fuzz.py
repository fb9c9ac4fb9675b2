"""A checkpoint with randomly damaged files is loaded, or refused with a CheckpointError."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemega import initialize
from pipemega.checkpoint.manifest import FileEntry, dump_state, parse_state
from pipemega.engine.engine import Engine
from pipemega.errors import CheckpointError
from tests.paper.mutations import changed, damaged, fuzzing, text_of
from tests.ranks.checkpoint.checkpoint_runs import small_config, small_data, small_net

TAG = "global_step1"


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = small_config("AdamW", {"lr": 0.01}, bf16={"enabled": False})
    return initialize(small_net(statistics=True), config)[0]


@pytest.fixture(scope="module")
def saved(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint; tests damage a copy of it."""
    folder = tmp_path_factory.mktemp("whole")
    engine.train_batch(small_data(engine, 0))
    engine.save_checkpoint(folder, TAG, {"a": 1})
    return folder


def copy_of(saved: Path) -> Path:
    copy = saved.with_name("damaged")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(saved, copy)
    return copy


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def load(engine: Engine, folder: Path) -> str:
    """Return the error message; empty if it was loaded."""
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error) or "no message"
    return ""


@fuzzing(25)
@given(data=st.data())
def test_a_damaged_file_is_refused_with_its_path_or_harmless(data, engine, saved):
    copy = copy_of(saved)
    name = data.draw(st.sampled_from(files_of(copy)))
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(data.draw(damaged(whole)))
    error = load(engine, copy)
    assert error != "no message"
    if name.startswith(f"{TAG}/") and not same_content((copy / name).read_bytes(), whole):
        assert str(copy) in error


def same_content(one: bytes, other: bytes) -> bool:
    """Return whether the bytes, or the JSON values in them, are equal."""
    try:
        return one == other or bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


@fuzzing(25)
@given(data=st.data())
def test_a_damaged_file_with_a_matching_checksum_is_refused_or_loaded(data, engine, saved):
    folder = copy_of(saved) / TAG
    names = [name for name in files_of(folder) if name != "state.json"]
    name = data.draw(st.sampled_from(names))
    raw = data.draw(damaged((folder / name).read_bytes()))
    (folder / name).write_bytes(raw)
    state = parse_state((folder / "state.json").read_bytes())
    state["files"][name] = FileEntry(len(raw), hashlib.sha256(raw).hexdigest())
    (folder / "state.json").write_bytes(dump_state(state))
    assert load(engine, folder.parent) != "no message"


@fuzzing(25)
@given(data=st.data())
def test_a_state_json_with_changed_values_is_refused(data, engine, saved):
    path = copy_of(saved) / TAG / "state.json"
    whole = json.loads(path.read_text())
    other = data.draw(changed(whole))
    path.write_text(text_of(other))
    error = load(engine, path.parents[1])
    assert other == whole or "state.json is damaged" in error or "format" in error


def test_a_state_json_with_100_000_nested_lists_is_refused(engine, saved):
    path = copy_of(saved) / TAG / "state.json"
    path.write_text("[" * 100_000)
    assert "state.json is damaged" in load(engine, path.parents[1])

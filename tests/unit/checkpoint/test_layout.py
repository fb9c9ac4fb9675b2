"""The layout of a folder of checkpoints stays consistent, on a disk and in an object store."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from pipemega.checkpoint import layout, newest
from pipemega.checkpoint.layout import Retention
from pipemega.checkpoint.manifest import (
    ChecksumWriter,
    DamagedCheckpoint,
    dump_state,
    file_damage,
    parse_state,
)
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import FsspecStorage, LocalStorage, Storage, storage_at


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A local folder, and the same folder through fsspec."""
    return (
        LocalStorage(tmp_path) if request.param == "local" else FsspecStorage(f"file://{tmp_path}")
    )


def save(storage: Storage, tag: str, text: str = "text", *, set_latest: bool = True) -> str:
    """Save a checkpoint with one file in a subfolder; return the folder of its files."""
    folder = layout.begin_save(storage, tag)
    writer = ChecksumWriter(storage, folder)
    writer.write("tensors/file", text.encode())
    return layout.commit_save(
        storage, tag, folder, {"steps": 3}, writer.files, set_latest=set_latest
    ).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def default_tag(storage: Storage) -> str:
    """The tag of the checkpoint that is loaded by default."""
    for tag in layout.candidates(storage)[0]:
        try:
            return layout.find_checkpoint(storage, tag).tag
        except DamagedCheckpoint:
            continue
    raise AssertionError("all are damaged")


def test_a_saved_checkpoint_is_found_as_the_newest_and_by_its_tag(storage, tmp_path):
    assert newest(tmp_path / "no") is None
    assert newest(tmp_path) is None
    save(storage, "a")
    second = save(storage, "b")
    assert layout.candidates(storage) == (["b", "a"], None)
    assert newest(tmp_path) == newest(f"file://{tmp_path}") == "b"
    found = layout.find_checkpoint(storage, "b")
    assert (found.path, found.size) == (second, 4)
    assert (found.state["steps"], found.state["number"], found.state["format"]) == (3, 2, 3)
    assert found.files["tensors/file"].size == 4
    assert names(tmp_path) == ["a", "b", "latest"]


def test_saving_without_set_latest_does_not_change_the_default(storage, tmp_path):
    save(storage, "a")
    save(storage, "b", set_latest=False)
    assert layout.candidates(storage)[0] == ["a"]
    assert layout.find_checkpoint(storage, "b").tag == "b"


def test_saving_again_under_a_tag_replaces_the_checkpoint(storage, tmp_path):
    save(storage, "a", "old")
    path = save(storage, "a", "new")
    assert storage.read(f"{path}/tensors/file") == b"new"
    assert names(tmp_path) == ["a", "latest"]
    assert len([path for path in tmp_path.rglob("*") if path.name == "file"]) == 1


def test_every_file_and_folder_is_synced_before_the_renames(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, Path.rename

    def record_sync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(self, target):
        calls.append(f"{self.name} -> {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(LocalStorage(tmp_path / "deep" / "er"), "a")
    # The parents of created folders are synced too.
    assert set(calls[:2]) == {tmp_path.name, "deep"}
    at = calls.index(".a.saving -> a")
    assert {"file", "tensors", "state.json", ".a.saving", ".latest.saving"} <= set(calls[2:at])
    assert calls[at + 1 :] == ["er", ".latest.saving -> latest", "er"]


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "latest", "a\n"])
def test_a_tag_that_is_not_a_valid_folder_name_is_refused(storage, tag):
    with pytest.raises(
        CheckpointError, match="cannot be the tag, which names a folder: use letters"
    ):
        layout.begin_save(storage, tag)
    with pytest.raises(CheckpointError, match="cannot be the tag"):
        layout.find_checkpoint(storage, tag)


def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(storage, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    with pytest.raises(CheckpointError, match=r"thesis exists and is not .* contains 'chapter'"):
        layout.begin_save(storage, "thesis")
    save(storage, "a")
    assert names(tmp_path / "thesis") == ["chapter"]


def test_a_step_whose_checkpoint_has_lost_its_state_file_can_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that resumed from the previous checkpoint saves this step again, and must not fail."""
    storage = LocalStorage(tmp_path)
    for tag in ("global_step1", "global_step2"):
        save(storage, tag)
    (tmp_path / "global_step2/state.json").unlink()
    assert default_tag(storage) == "global_step1"
    save(storage, "global_step2", "anew")
    assert default_tag(storage) == "global_step2"
    assert (tmp_path / "global_step2/tensors/file").read_text() == "anew"
    assert "global_step2 has no state.json" in caplog.text
    assert "is moved to .global_step2.incomplete" in caplog.text
    assert (tmp_path / ".global_step2.incomplete/tensors/file").read_text() == "text"
    # A folder with other files stays.
    (tmp_path / "global_step2/state.json").unlink()
    (tmp_path / "global_step2/notes").touch()
    with pytest.raises(CheckpointError, match="global_step2 exists and is not a checkpoint"):
        save(storage, "global_step2")


def storage_has(storage: Storage, left: list[str]) -> bool:
    return bool(left) or isinstance(storage, LocalStorage)


@pytest.mark.parametrize("left", [[], ["client.pt"], ["rank_00000.pt", "client.pt"], ["tensors"]])
def test_a_folder_with_a_part_of_a_checkpoint_never_blocks_a_save(storage, tmp_path, left, caplog):
    """A run that was killed in a save resumed from the checkpoint before, came to this step again
    and ended with "exists and is not a checkpoint", after every restart."""
    save(storage, "global_step1")
    for _ in range(2):
        (tmp_path / "global_step2").mkdir()
        for name in left:
            (tmp_path / "global_step2" / name).write_text("old")
        assert default_tag(storage) == "global_step1"
        path = save(storage, "global_step2", "anew")
        assert default_tag(storage) == "global_step2"
        assert storage.read(f"{path}/tensors/file") == b"anew"
        # An object store has no empty folders.
        assert ("global_step2 has no state.json" in caplog.text) == storage_has(storage, left)
        storage.delete("global_step2")
    if isinstance(storage, LocalStorage):
        assert names(tmp_path / ".global_step2.incomplete") == sorted(left)


def test_a_file_of_the_name_of_a_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "global_step2").write_text("notes")
    with pytest.raises(CheckpointError, match="global_step2 exists and is not a checkpoint"):
        save(LocalStorage(tmp_path), "global_step2")
    assert (tmp_path / "global_step2").read_text() == "notes"


def test_a_folder_latest_is_an_error_before_anything_is_written(storage, tmp_path):
    """Each save renamed its checkpoint, and then failed to replace the folder."""
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/file").touch()
    for use in (lambda: save(storage, "a"), lambda: newest(tmp_path)):
        with pytest.raises(CheckpointError, match="latest is a folder, and must be a file"):
            use()
    assert names(tmp_path) == ["latest"]


def test_the_next_save_deletes_the_leftovers_of_an_interrupted_one(storage, tmp_path):
    save(storage, "a")
    storage.write(f"{layout.begin_save(storage, 'b')}/file", b"half")
    (tmp_path / ".latest.saving").write_text("b\n")
    (tmp_path / ".bashrc").write_text("not ours")
    assert default_tag(storage) == "a"
    save(storage, "c")
    left = {".bashrc", "a", "c", "latest"}
    if isinstance(storage, LocalStorage):
        assert set(names(tmp_path)) == left
    else:
        # An empty folder does not exist in an object store.
        assert left <= set(names(tmp_path)) <= left | {"b", ".latest.saving"}
        assert list((tmp_path / "b").glob("*")) == []


def test_an_interrupted_save_under_an_existing_tag_changes_nothing(storage):
    save(storage, "a", "old")
    storage.write(f"{layout.begin_save(storage, 'a')}/tensors/file", b"half of the new")
    found = layout.find_checkpoint(storage, "a")
    assert storage.read(f"{found.path}/tensors/file") == b"old"
    save(storage, "a", "new")
    assert storage.read(f"{layout.find_checkpoint(storage, 'a').path}/tensors/file") == b"new"


def test_a_checkpoint_stays_loadable_between_the_two_renames_of_its_replacement(tmp_path):
    storage = LocalStorage(tmp_path)
    save(storage, "a", "old")
    layout.begin_save(storage, "a")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert default_tag(storage) == "a"
    assert storage.read(f"{layout.find_checkpoint(storage, 'a').path}/tensors/file") == b"old"
    layout.delete_leftovers(storage)
    assert names(tmp_path) == ["a", "latest"]
    assert layout.find_checkpoint(storage, "a").path == "a"


def test_a_replaced_checkpoint_is_deleted_once_the_new_one_exists(tmp_path):
    storage = LocalStorage(tmp_path)
    save(storage, "a", "new")
    (tmp_path / ".a.replaced").mkdir()
    (tmp_path / ".a.replaced" / "state.json").write_text("{}")
    layout.delete_leftovers(storage)
    assert names(tmp_path) == ["a", "latest"]


def test_pruning_keeps_the_newest_the_latest_and_user_chosen_tags(storage, tmp_path):
    save(storage, "best", set_latest=False)
    save(storage, "global_step900")
    # A run that resumed from an earlier step: sorted by step these would be the oldest.
    for step in (10, 20, 30):
        save(storage, layout.step_tag(step), set_latest=False)
    layout.prune(storage, Retention(2))
    assert names(tmp_path) == ["best", "global_step20", "global_step30", "global_step900", "latest"]
    layout.prune(storage, Retention(5))
    layout.prune(storage, Retention())
    assert len(names(tmp_path)) == 5


def test_pruning_permanently_keeps_the_multiples_of_keep_every(storage, tmp_path):
    for step in range(10, 80, 10):
        save(storage, layout.step_tag(step))
    layout.prune(storage, Retention(keep_last=2, keep_every=30))
    assert [name for name in names(tmp_path) if name != "latest"] == [
        f"global_step{step}" for step in (30, 60, 70)
    ]
    assert Retention(None, 30).to_delete([10, 20, 30]) == []


def test_pruning_uses_the_order_of_saving_and_not_file_times(tmp_path):
    for step in (1, 2, 3):
        path = tmp_path / save(LocalStorage(tmp_path), layout.step_tag(step))
        for file in (path, path / "state.json"):
            os.utime(file, (1e9 - step, 1e9 - step))
    layout.prune(LocalStorage(tmp_path), Retention(1))
    assert names(tmp_path) == ["global_step3", "latest"]


def test_a_checkpoint_that_cannot_be_deleted_stays_with_a_warning(tmp_path, caplog, monkeypatch):
    for step in (1, 2, 3):
        save(LocalStorage(tmp_path), layout.step_tag(step))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    layout.prune(LocalStorage(tmp_path), Retention(1))
    assert names(tmp_path) == ["global_step1", "global_step2", "global_step3", "latest"]
    assert caplog.text.count("could not delete the old checkpoint") == 2


def test_a_missing_folder_and_an_empty_one_have_different_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint folder '.*/no': is the path right\?"):
        layout.candidates(LocalStorage(tmp_path / "no"))
    with pytest.raises(
        CheckpointError, match=r"has no file 'latest'; there is no complete checkpoint$"
    ):
        layout.candidates(LocalStorage(tmp_path))


def test_a_truncated_or_missing_file_is_named_with_both_sizes(storage, tmp_path):
    save(storage, "a")
    file = tmp_path / save(storage, "b") / "tensors" / "file"
    file.write_text("tex")
    wanted = "b is damaged: tensors/file has 3 bytes; 4 bytes were saved"
    with pytest.raises(DamagedCheckpoint, match=wanted):
        layout.find_checkpoint(storage, "b")
    file.unlink()
    with pytest.raises(DamagedCheckpoint, match="tensors/file is missing; 4 bytes were saved"):
        layout.find_checkpoint(storage, "b")
    assert layout.describe_complete(storage, "b") == (
        "complete checkpoints there: a: name one of them as the tag"
    )
    assert newest(tmp_path) == "a"


def test_if_all_checkpoints_are_damaged_newest_raises_an_error(storage, tmp_path):
    """Otherwise a new run would overwrite checkpoints that can perhaps be repaired."""
    for tag in ("a", "b"):
        (tmp_path / save(storage, tag) / "tensors" / "file").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is complete and undamaged: .*b is .*a is dam"
    ):
        newest(tmp_path)


def test_without_the_file_latest_the_newest_that_once_was_latest_is_loaded(storage, tmp_path):
    for tag in ("a", "b"):
        save(storage, tag)
    save(storage, "best", set_latest=False)
    (tmp_path / "latest").unlink()
    tags, defect = layout.candidates(storage)
    assert tags == ["b", "a"]
    assert defect is not None
    assert "has no file 'latest'" in defect
    (tmp_path / "latest").write_bytes(b"../\xff\n")
    tags, defect = layout.candidates(storage)
    assert tags == ["b", "a"]
    assert defect is not None
    assert "latest is damaged" in defect


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}', "\0\xff"])
def test_a_damaged_state_file_is_named(tmp_path, text):
    save(LocalStorage(tmp_path), "a")
    (tmp_path / "a" / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(DamagedCheckpoint, match=r"a is damaged: state.json is damaged: "):
        layout.find_checkpoint(LocalStorage(tmp_path), "a")


def test_a_changed_number_in_state_json_is_detected():
    data = dump_state({"steps": 3, "rate": 0.1, "loss": float("nan"), "files": {}})
    assert parse_state(data)["steps"] == 3
    with pytest.raises(DamagedCheckpoint, match="its digest does not match its content"):
        parse_state(data.replace(b'"steps": 3', b'"steps": 4'))


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path):
    save(LocalStorage(tmp_path), "a")
    file = tmp_path / "a" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 7}))
    with pytest.raises(
        CheckpointError, match=r"has format 7, and this version .* reads formats 2 and 3"
    ):
        layout.find_checkpoint(LocalStorage(tmp_path), "a")


def test_a_damaged_checkpoint_does_not_stop_the_next_save(storage, tmp_path):
    save(storage, "a")
    (tmp_path / "a" / "state.json").write_text("{")
    save(storage, "b")
    assert default_tag(storage) == "b"


def test_an_object_store_without_folders_works():
    storage = storage_at("memory://runs/mine")
    for step, text in enumerate(("old", "new", "newer")):
        save(storage, "best", text)
        save(storage, layout.step_tag(step))
    assert storage.read(f"{layout.find_checkpoint(storage, 'best').path}/tensors/file") == b"newer"
    layout.prune(storage, Retention(1))
    assert storage.listdir() == ["best", "global_step2", "latest"]
    assert newest("memory://runs/mine") == "global_step2"


def test_an_unknown_protocol_is_refused_with_the_needed_packages():
    with pytest.raises(CheckpointError, match=r"nosuch://a cannot be opened: .* URLs need fsspec"):
        storage_at("nosuch://a")


def test_every_exception_of_the_stores_client_becomes_an_os_error(monkeypatch):
    class NoCredentials(Exception):
        pass

    def refuse(*_args, **_kwargs):
        raise NoCredentials("who are you?")

    storage = storage_at("memory://runs/refused")
    for name in ("open", "info", "ls"):
        monkeypatch.setattr(storage._files, name, refuse)
    for action in (
        storage.open,
        storage.size,
        storage.listdir,
        lambda name: storage.write(name, b""),
    ):
        with pytest.raises(OSError, match=r"NoCredentials: who are you\?.*memory://runs/refused/a"):
            action("a")


def test_a_checkpoint_with_an_unreadable_state_json_is_skipped(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    save(storage, "global_step1")
    save(storage, "global_step2")
    read = LocalStorage.read

    def fail(self, name):
        if name == "global_step2/state.json":
            raise OSError(5, "Input/output error", name)
        return read(self, name)

    monkeypatch.setattr(LocalStorage, "read", fail)
    assert layout.newest(storage) == "global_step1"


def test_an_error_when_listing_the_folder_skips_pruning_with_a_warning(
    tmp_path, caplog, monkeypatch
):
    storage = LocalStorage(tmp_path)
    save(storage, "global_step1")
    monkeypatch.setattr(
        LocalStorage, "listdir", mock.Mock(side_effect=FileNotFoundError(2, "gone"))
    )
    layout.prune(storage, Retention(1))
    assert "could not list old checkpoints" in caplog.text


def test_a_file_that_cannot_be_read_counts_as_damaged(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    path = save(storage, "a")
    (entry,) = layout.find_checkpoint(storage, "a").files.values()

    def fail(self, name):
        raise OSError(5, "Input/output error", name)

    monkeypatch.setattr(LocalStorage, "open", fail)
    damage = file_damage(storage, f"{path}/tensors/file", entry, checksum=True)
    assert damage == "cannot be read: Input/output error"

"""A folder of checkpoints is whole at every moment, on a disk and in an object store."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from pipemega.checkpoint import folder as folders
from pipemega.checkpoint import newest
from pipemega.checkpoint.disk import Disk, LocalDisk, RemoteDisk, disk_at
from pipemega.checkpoint.folder import Retention
from pipemega.checkpoint.manifest import Damage, Written, difference, opened, sealed
from pipemega.errors import CheckpointError


@pytest.fixture(params=["local", "remote"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """A folder, and a place that fsspec knows: files of this machine again."""
    return LocalDisk(tmp_path) if request.param == "local" else RemoteDisk(f"file://{tmp_path}")


def save(disk: Disk, tag: str, text: str = "text", *, point: bool = True) -> str:
    """A checkpoint with a file in a folder in it; returns where its files are."""
    part = folders.start(disk, tag)
    written = Written(disk, part)
    written.write("tensors/file", text.encode())
    return folders.finish(disk, tag, part, {"steps": 3}, written.files, point=point).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def taken(disk: Disk) -> str:
    """The one that is loaded by default."""
    for tag in folders.candidates(disk)[0]:
        try:
            return folders.examine(disk, tag).tag
        except Damage:
            continue
    raise AssertionError("none is whole")


def test_a_saved_checkpoint_is_found_as_the_newest_and_by_its_tag(disk, tmp_path):
    assert newest(tmp_path / "no") is None
    assert newest(tmp_path) is None
    save(disk, "a")
    second = save(disk, "b")
    assert folders.candidates(disk) == (["b", "a"], None)
    assert newest(tmp_path) == newest(f"file://{tmp_path}") == "b"
    found = folders.examine(disk, "b")
    assert (found.path, found.size) == (second, 4)
    assert (found.state["steps"], found.state["number"], found.state["format"]) == (3, 2, 2)
    assert found.files["tensors/file"].size == 4
    assert names(tmp_path) == ["a", "b", "latest"]


def test_one_that_is_not_pointed_at_leaves_the_newest_as_it_was(disk, tmp_path):
    save(disk, "a")
    save(disk, "b", point=False)
    assert folders.candidates(disk)[0] == ["a"]
    assert folders.examine(disk, "b").tag == "b"


def test_saving_again_under_a_tag_replaces_the_checkpoint(disk, tmp_path):
    save(disk, "a", "old")
    path = save(disk, "a", "new")
    assert disk.read(f"{path}/tensors/file") == b"new"
    assert names(tmp_path) == ["a", "latest"]
    assert len([path for path in tmp_path.rglob("*") if path.name == "file"]) == 1


def test_every_file_and_folder_is_synced_and_the_renames_come_after(tmp_path, monkeypatch):
    happened = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(self, target):
        happened.append(f"{self.name} -> {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(LocalDisk(tmp_path / "deep" / "er"), "a")
    # The folders that were made are names in their parents.
    assert set(happened[:2]) == {tmp_path.name, "deep"}
    at = happened.index(".a.saving -> a")
    assert {"file", "tensors", "state.json", ".a.saving", ".latest.saving"} <= set(happened[2:at])
    assert happened[at + 1 :] == ["er", ".latest.saving -> latest", "er"]


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "latest", "a\n"])
def test_a_tag_that_is_no_plain_name_is_refused(disk, tag):
    with pytest.raises(
        CheckpointError, match="cannot be the tag, which names a folder: use letters"
    ):
        folders.start(disk, tag)
    with pytest.raises(CheckpointError, match="cannot be the tag"):
        folders.examine(disk, tag)


def test_a_folder_that_is_no_checkpoint_is_never_replaced(disk, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    with pytest.raises(CheckpointError, match="thesis is there already and is no checkpoint"):
        folders.start(disk, "thesis")
    save(disk, "a")
    assert names(tmp_path / "thesis") == ["chapter"]


def test_a_step_whose_checkpoint_has_lost_its_state_file_can_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that goes back to the one before comes there again; it used to end there each time."""
    disk = LocalDisk(tmp_path)
    for tag in ("global_step1", "global_step2"):
        save(disk, tag)
    (tmp_path / "global_step2/state.json").unlink()
    assert taken(disk) == "global_step1"
    save(disk, "global_step2", "anew")
    assert taken(disk) == "global_step2"
    assert (tmp_path / "global_step2/tensors/file").read_text() == "anew"
    assert "global_step2 has lost its state.json, and goes" in caplog.text
    # What holds anything of somebody else's stays.
    (tmp_path / "global_step2/state.json").unlink()
    (tmp_path / "global_step2/notes").touch()
    with pytest.raises(CheckpointError, match="global_step2 is there already and is no checkpoint"):
        save(disk, "global_step2")


def test_what_an_interrupted_save_left_goes_with_the_next(disk, tmp_path):
    save(disk, "a")
    disk.write(f"{folders.start(disk, 'b')}/file", b"half")
    (tmp_path / ".latest.saving").write_text("b\n")
    (tmp_path / ".bashrc").write_text("not ours")
    assert taken(disk) == "a"
    save(disk, "c")
    left = {".bashrc", "a", "c", "latest"}
    if isinstance(disk, LocalDisk):
        assert set(names(tmp_path)) == left
    else:
        # A folder of an object store is what is in it.
        assert left <= set(names(tmp_path)) <= left | {"b", ".latest.saving"}
        assert list((tmp_path / "b").glob("*")) == []


def test_an_interrupted_save_under_a_tag_that_is_there_changes_nothing(disk):
    save(disk, "a", "old")
    disk.write(f"{folders.start(disk, 'a')}/tensors/file", b"half of the new")
    found = folders.examine(disk, "a")
    assert disk.read(f"{found.path}/tensors/file") == b"old"
    save(disk, "a", "new")
    assert disk.read(f"{folders.examine(disk, 'a').path}/tensors/file") == b"new"


def test_a_checkpoint_stays_loadable_between_the_two_renames_of_its_replacement(tmp_path):
    disk = LocalDisk(tmp_path)
    save(disk, "a", "old")
    folders.start(disk, "a")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert taken(disk) == "a"
    assert disk.read(f"{folders.examine(disk, 'a').path}/tensors/file") == b"old"
    folders.tidy(disk)
    assert names(tmp_path) == ["a", "latest"]
    assert folders.examine(disk, "a").path == "a"


def test_a_replaced_checkpoint_goes_when_the_new_one_is_there(tmp_path):
    disk = LocalDisk(tmp_path)
    save(disk, "a", "new")
    (tmp_path / ".a.replaced").mkdir()
    (tmp_path / ".a.replaced" / "state.json").write_text("{}")
    folders.tidy(disk)
    assert names(tmp_path) == ["a", "latest"]


def test_pruning_keeps_the_last_saved_the_one_pointed_at_and_those_with_names(disk, tmp_path):
    save(disk, "best", point=False)
    save(disk, "global_step900")
    # A run that went on from an earlier step: by its step it would be the oldest.
    for step in (10, 20, 30):
        save(disk, folders.step_tag(step), point=False)
    folders.prune(disk, Retention(2))
    assert names(tmp_path) == ["best", "global_step20", "global_step30", "global_step900", "latest"]
    folders.prune(disk, Retention(5))
    folders.prune(disk, Retention())
    assert len(names(tmp_path)) == 5


def test_pruning_keeps_the_multiples_of_keep_every_for_good(disk, tmp_path):
    for step in range(10, 80, 10):
        save(disk, folders.step_tag(step))
    folders.prune(disk, Retention(keep_last=2, keep_every=30))
    assert [name for name in names(tmp_path) if name != "latest"] == [
        f"global_step{step}" for step in (30, 60, 70)
    ]
    assert Retention(None, 30).forgets([10, 20, 30]) == []


def test_pruning_goes_by_the_order_of_saving_whatever_the_clock_says(tmp_path):
    for step in (1, 2, 3):
        path = tmp_path / save(LocalDisk(tmp_path), folders.step_tag(step))
        for file in (path, path / "state.json"):
            os.utime(file, (1e9 - step, 1e9 - step))
    folders.prune(LocalDisk(tmp_path), Retention(1))
    assert names(tmp_path) == ["global_step3", "latest"]


def test_what_cannot_be_pruned_is_left_with_a_warning(tmp_path, caplog, monkeypatch):
    for step in (1, 2, 3):
        save(LocalDisk(tmp_path), folders.step_tag(step))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    folders.prune(LocalDisk(tmp_path), Retention(1))
    assert names(tmp_path) == ["global_step1", "global_step2", "global_step3", "latest"]
    assert caplog.text.count("could not delete the old checkpoint") == 2


def test_a_missing_folder_and_an_empty_one_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint folder .*/no: is the path right\?"):
        folders.candidates(LocalDisk(tmp_path / "no"))
    with pytest.raises(CheckpointError, match=r"has no file 'latest'; there is no complete one$"):
        folders.candidates(LocalDisk(tmp_path))


def test_a_file_that_was_cut_or_lost_is_named_with_both_sizes(disk, tmp_path):
    save(disk, "a")
    file = tmp_path / save(disk, "b") / "tensors" / "file"
    file.write_text("tex")
    wanted = "b is damaged: tensors/file has 3 bytes, 4 bytes were written"
    with pytest.raises(Damage, match=wanted):
        folders.examine(disk, "b")
    file.unlink()
    with pytest.raises(Damage, match="tensors/file is missing, 4 bytes were written"):
        folders.examine(disk, "b")
    assert folders.there(disk, "b") == "complete ones there: a: name one of them as the tag"
    assert newest(tmp_path) == "a"


def test_when_all_are_damaged_the_newest_is_an_error_and_not_nothing(disk, tmp_path):
    """Or a run would begin anew over what can perhaps be saved."""
    for tag in ("a", "b"):
        (tmp_path / save(disk, tag) / "tensors" / "file").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*b is .*a is dam"):
        newest(tmp_path)


def test_without_a_pointer_the_last_saved_of_those_that_had_it_is_the_newest(disk, tmp_path):
    for tag in ("a", "b"):
        save(disk, tag)
    save(disk, "best", point=False)
    (tmp_path / "latest").unlink()
    tags, wrong = folders.candidates(disk)
    assert tags == ["b", "a"]
    assert wrong is not None
    assert "has no file 'latest'" in wrong
    (tmp_path / "latest").write_bytes(b"../\xff\n")
    tags, wrong = folders.candidates(disk)
    assert tags == ["b", "a"]
    assert wrong is not None
    assert "latest is damaged" in wrong


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}', "\0\xff"])
def test_a_damaged_state_file_is_named(tmp_path, text):
    save(LocalDisk(tmp_path), "a")
    (tmp_path / "a" / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(Damage, match=r"a is damaged: state.json is damaged: "):
        folders.examine(LocalDisk(tmp_path), "a")


def test_a_number_that_was_changed_in_a_state_file_is_found():
    data = sealed({"steps": 3, "rate": 0.1, "loss": float("nan"), "files": {}})
    assert opened(data)["steps"] == 3
    with pytest.raises(Damage, match="its digest is not that of its contents"):
        opened(data.replace(b'"steps": 3', b'"steps": 4'))


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path):
    save(LocalDisk(tmp_path), "a")
    file = tmp_path / "a" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 7}))
    with pytest.raises(
        CheckpointError, match=r"is of format 7, and this version .* reads format 2"
    ):
        folders.examine(LocalDisk(tmp_path), "a")


def test_a_damaged_checkpoint_does_not_stop_the_next_save(disk, tmp_path):
    save(disk, "a")
    (tmp_path / "a" / "state.json").write_text("{")
    save(disk, "b")
    assert taken(disk) == "b"


def test_a_store_that_knows_no_folders_keeps_checkpoints_too():
    disk = disk_at("memory://runs/mine")
    for step, text in enumerate(("old", "new", "newer")):
        save(disk, "best", text)
        save(disk, folders.step_tag(step))
    assert disk.read(f"{folders.examine(disk, 'best').path}/tensors/file") == b"newer"
    folders.prune(disk, Retention(1))
    assert disk.names() == ["best", "global_step2", "latest"]
    assert newest("memory://runs/mine") == "global_step2"


def test_a_place_that_nothing_knows_is_refused_with_what_is_needed():
    with pytest.raises(CheckpointError, match=r"nosuch://a cannot be opened: .* need fsspec"):
        disk_at("nosuch://a")


def test_whatever_the_client_of_a_store_raises_is_an_error_of_the_disk(monkeypatch):
    class NoCredentials(Exception):
        pass

    def refuse(*_args, **_kwargs):
        raise NoCredentials("who are you?")

    disk = disk_at("memory://runs/refused")
    for name in ("open", "info", "ls"):
        monkeypatch.setattr(disk._files, name, refuse)
    for action in (disk.open, disk.size, disk.names, lambda name: disk.write(name, b"")):
        with pytest.raises(OSError, match=r"NoCredentials: who are you\?.*memory://runs/refused/a"):
            action("a")


def test_a_checkpoint_whose_state_file_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    disk = LocalDisk(tmp_path)
    save(disk, "global_step1")
    save(disk, "global_step2")
    read = LocalDisk.read

    def fail(self, name):
        if name == "global_step2/state.json":
            raise OSError(5, "Input/output error", name)
        return read(self, name)

    monkeypatch.setattr(LocalDisk, "read", fail)
    assert folders.newest(disk) == "global_step1"


def test_a_folder_that_cannot_be_listed_is_not_pruned_and_ends_nothing(
    tmp_path, caplog, monkeypatch
):
    disk = LocalDisk(tmp_path)
    save(disk, "global_step1")
    monkeypatch.setattr(LocalDisk, "names", mock.Mock(side_effect=FileNotFoundError(2, "gone")))
    folders.prune(disk, Retention(1))
    assert "could not look for old checkpoints" in caplog.text


def test_a_file_that_the_disk_cannot_read_any_more_is_damaged(tmp_path, monkeypatch):
    disk = LocalDisk(tmp_path)
    path = save(disk, "a")
    (entry,) = folders.examine(disk, "a").files.values()

    def fail(self, name):
        raise OSError(5, "Input/output error", name)

    monkeypatch.setattr(LocalDisk, "open", fail)
    said = difference(disk, f"{path}/tensors/file", entry, read=True)
    assert said == "cannot be read: Input/output error"

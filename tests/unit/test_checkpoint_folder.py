"""A folder of checkpoints is whole at every moment; no torch is needed to see that."""

import json
import os
from pathlib import Path

import pytest

from pipemega.checkpoint import folder as folders
from pipemega.errors import CheckpointError


def save(folder: Path, tag: str, text: str = "text", **kwargs: bool) -> Path:
    """A checkpoint with a file in a folder in it."""
    part = folders.start(folder, tag)
    (part / "tensors").mkdir()
    (part / "tensors" / "file").write_text(text)
    return folders.finish(folder, tag, {"steps": 3}, **kwargs)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_found_as_the_newest_and_by_its_tag(tmp_path):
    first, second = save(tmp_path, "a"), save(tmp_path, "b")
    assert folders.find(tmp_path) == second
    assert folders.find(tmp_path, "a") == first
    state = folders.read_state(second)
    assert (state["steps"], state["number"], state["format"]) == (3, 2, 1)
    assert state["files"] == {"tensors/file": 4}
    assert names(tmp_path) == ["a", "b", "latest"]


def test_one_that_is_not_pointed_at_leaves_the_newest_as_it_was(tmp_path):
    save(tmp_path, "a")
    save(tmp_path, "b", point=False)
    assert folders.find(tmp_path).name == "a"
    assert folders.find(tmp_path, "b").name == "b"


def test_saving_again_under_a_tag_replaces_the_checkpoint(tmp_path):
    save(tmp_path, "a", "old")
    path = save(tmp_path, "a", "new")
    assert (path / "tensors" / "file").read_text() == "new"
    assert names(tmp_path) == ["a", "latest"]


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
    save(tmp_path / "deep" / "er", "a")
    # The folders that were made are names in their parents.
    assert set(happened[:2]) == {tmp_path.name, "deep"}
    at = happened.index(".a.saving -> a")
    assert {"file", "tensors", "state.json", ".a.saving", ".latest.saving"} <= set(happened[2:at])
    assert happened[at + 1 :] == ["er", ".latest.saving -> latest", "er"]


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "latest", "a\n"])
def test_a_tag_that_is_no_plain_name_is_refused(tmp_path, tag):
    with pytest.raises(
        CheckpointError, match="cannot be the tag, which names a folder: use letters"
    ):
        folders.start(tmp_path, tag)
    with pytest.raises(CheckpointError, match="cannot be the tag"):
        folders.find(tmp_path, tag)


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(CheckpointError, match="thesis is there already and is no checkpoint"):
        folders.start(tmp_path, "thesis")
    assert names(tmp_path) == ["thesis"]


def test_what_an_interrupted_save_left_goes_with_the_next(tmp_path):
    save(tmp_path, "a")
    (folders.start(tmp_path, "b") / "file").write_text("half")
    (tmp_path / ".latest.saving").write_text("b\n")
    (tmp_path / ".bashrc").write_text("not ours")
    assert folders.find(tmp_path).name == "a"
    save(tmp_path, "c")
    assert names(tmp_path) == [".bashrc", "a", "c", "latest"]


def test_a_checkpoint_stays_loadable_between_the_two_renames_of_its_replacement(tmp_path):
    save(tmp_path, "a", "old")
    folders.start(tmp_path, "a")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert (folders.find(tmp_path) / "tensors" / "file").read_text() == "old"
    assert (folders.find(tmp_path, "a") / "tensors" / "file").read_text() == "old"
    folders.tidy(tmp_path)
    assert names(tmp_path) == ["a", "latest"]
    assert folders.find(tmp_path) == tmp_path / "a"


def test_a_replaced_checkpoint_goes_when_the_new_one_is_there(tmp_path):
    save(tmp_path, "a", "new")
    (tmp_path / ".a.replaced").mkdir()
    (tmp_path / ".a.replaced" / "state.json").write_text("{}")
    folders.tidy(tmp_path)
    assert names(tmp_path) == ["a", "latest"]


def test_pruning_keeps_the_last_saved_the_one_pointed_at_and_those_with_names(tmp_path):
    save(tmp_path, "best", point=False)
    save(tmp_path, "global_step900")
    # A run that went on from an earlier step: by its step it would be the oldest.
    for step in (10, 20, 30):
        save(tmp_path, folders.step_tag(step), point=False)
    folders.prune(tmp_path, 2)
    assert names(tmp_path) == ["best", "global_step20", "global_step30", "global_step900", "latest"]
    folders.prune(tmp_path, 5)
    assert len(names(tmp_path)) == 5


def test_pruning_goes_by_the_order_of_saving_whatever_the_clock_says(tmp_path):
    for step in (1, 2, 3):
        path = save(tmp_path, folders.step_tag(step))
        for file in (path, path / "state.json"):
            os.utime(file, (1e9 - step, 1e9 - step))
    folders.prune(tmp_path, 1)
    assert names(tmp_path) == ["global_step3", "latest"]


def test_what_cannot_be_pruned_is_left_with_a_warning(tmp_path, caplog, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, folders.step_tag(step))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    folders.prune(tmp_path, 1)
    assert names(tmp_path) == ["global_step1", "global_step2", "global_step3", "latest"]
    assert caplog.text.count("could not delete the old checkpoint") == 2


def test_a_missing_folder_and_an_empty_one_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint folder .*/no: is the path right\?"):
        folders.find(tmp_path / "no")
    with pytest.raises(CheckpointError, match=r"has no file 'latest'; there is no complete one$"):
        folders.find(tmp_path)


def test_a_file_that_was_cut_or_lost_is_named_with_both_sizes(tmp_path):
    save(tmp_path, "a")
    path = save(tmp_path, "b")
    (path / "tensors" / "file").write_text("tex")
    wanted = (
        "b is damaged: tensors/file has 3 bytes, 4 bytes were written; "
        "complete ones there: a: name one of them as the tag"
    )
    with pytest.raises(CheckpointError, match=wanted):
        folders.find(tmp_path)
    (path / "tensors" / "file").unlink()
    with pytest.raises(CheckpointError, match="tensors/file is missing, 4 bytes were written"):
        folders.find(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}', "\0\xff"])
def test_a_damaged_state_file_is_named(tmp_path, text):
    (save(tmp_path, "a") / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"a/state.json is damaged: "):
        folders.find(tmp_path)


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path):
    path = save(tmp_path, "a")
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 7}))
    with pytest.raises(
        CheckpointError, match=r"is of format 7, and this version .* reads format 1"
    ):
        folders.find(tmp_path)


def test_a_damaged_checkpoint_does_not_stop_the_next_save(tmp_path):
    (save(tmp_path, "a") / "state.json").write_text("{")
    save(tmp_path, "b")
    assert folders.find(tmp_path).name == "b"

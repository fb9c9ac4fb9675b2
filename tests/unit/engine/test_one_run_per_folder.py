"""A run keeps other runs out of its folders, in a Trainer and in the user's own loop."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule, Trainer, initialize
from pipemega.errors import CheckpointError, FolderLockedError
from pipemega.storage.filesystem import LocalStorage
from pipemega.storage.locks import (
    LOCK_FILE,
    FolderLocks,
    LockOptions,
    ProcessIdentity,
    folder_locks,
)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    folder_locks.release_all()


def build(folder=None, **sections):
    config = {
        "train_batch_size": 2,
        "mesh": {"device": "cpu"},
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "training": {"train_steps": 2, "progress": False, **sections.pop("training", {})},
    }
    if folder is not None:
        config["checkpoint"] = {"save": str(folder), **sections.pop("checkpoint", {})}
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)], nn.functional.mse_loss)
    data = [(torch.ones(4), torch.ones(4))] * 8
    return initialize(net, {**config, **sections}, data)[0]


def is_free(folder):
    """Return whether another process could lock the folder; if so, it does for a moment."""
    other = FolderLocks()
    try:
        other.lock(LocalStorage(folder))
    except FolderLockedError:
        return False
    other.release(LocalStorage(folder))
    return True


def take_over(folder):
    """Take the folder over as another process does."""
    FolderLocks().lock(LocalStorage(folder), LockOptions(take_over=True))
    lock = json.loads((folder / LOCK_FILE).read_text())
    (folder / LOCK_FILE).write_text(json.dumps({**lock, "host": "node7", "pid": 4711}))


def test_an_own_loop_holds_its_folder_from_the_first_step_until_it_is_closed(tmp_path):
    engine = build(tmp_path / "run")
    assert is_free(tmp_path / "run")
    engine.train_batch()
    assert not is_free(tmp_path / "run")
    engine.close()
    assert is_free(tmp_path / "run")


def test_a_trainer_releases_its_folder_at_the_end_and_after_an_error(tmp_path):
    Trainer(build(tmp_path / "good")).fit()
    assert is_free(tmp_path / "good")
    trainer = Trainer(build(tmp_path / "bad"))
    trainer.engine.module[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        trainer.fit()
    assert is_free(tmp_path / "bad")


def test_a_run_in_a_folder_that_is_in_use_changes_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("pipemega.storage.locks.HEARTBEAT_SECONDS", 0.2)
    (tmp_path / "metrics.jsonl").write_text("of the first run\n")
    take_over(tmp_path)
    folder_locks.release_all()
    lock = (tmp_path / LOCK_FILE).read_bytes()
    trainer = Trainer(build(tmp_path, mesh={"device": "cpu", "timeout_seconds": 0.5}))
    with pytest.raises(FolderLockedError, match="process 4711 on node7"):
        trainer.fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", LOCK_FILE]
    assert (tmp_path / "metrics.jsonl").read_text() == "of the first run\n"
    assert (tmp_path / LOCK_FILE).read_bytes() == lock


def test_a_folder_given_to_save_checkpoint_is_locked_until_the_process_ends(tmp_path):
    engine = build()
    engine.train_batch()
    engine.save_checkpoint(tmp_path / "mine")
    assert not is_free(tmp_path / "mine")
    folder_locks.release_all()
    assert is_free(tmp_path / "mine")


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "async"])
def test_a_run_that_lost_its_folder_changes_no_checkpoint_there(tmp_path, background):
    engine = build(tmp_path, checkpoint={"async": background})
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    engine.finish_saving()
    take_over(tmp_path)
    (tmp_path / ".global_step1.saving").mkdir()  # of the other run
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FolderLockedError, match=r"another run took .* over at 20.*process 4711"):
        engine.save_checkpoint(tmp_path, "again")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_step_after_a_lost_heartbeat_ends_the_run(tmp_path):
    engine = build(tmp_path)
    engine.train_batch()
    take_over(tmp_path)
    (lock,) = folder_locks._held.values()
    lock.beat()
    with pytest.raises(FolderLockedError, match="This run writes nothing there any more"):
        engine.train_batch()


def train_two_steps(*arguments, **options):
    engine = build(*arguments, **options)
    while engine.global_steps < 2:
        engine.train_batch()
    engine.close()
    return engine


def test_a_run_that_would_replace_the_checkpoints_of_another_is_refused(tmp_path):
    train_two_steps(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        train_two_steps(tmp_path)
    assert str(refused.value) == (
        f"checkpoint.save ({tmp_path}) has global_step2 of an earlier run, and this run does not "
        "continue it: set training.resume to 'auto' to continue it, choose another "
        "checkpoint.save to keep it, or set checkpoint.overwrite to true to replace it"
    )
    assert refused.value.on_every_rank
    assert is_free(tmp_path)
    train_two_steps(tmp_path, checkpoint={"overwrite": True})


@pytest.mark.parametrize("how", ["auto", "load", "load_checkpoint"])
def test_a_run_that_continues_a_checkpoint_of_its_folder_is_not_refused(tmp_path, how):
    train_two_steps(tmp_path)
    training = {"train_steps": 3, "resume": "auto" if how == "auto" else False}
    load = {"load": str(tmp_path)} if how == "load" else {}
    engine = build(tmp_path, training=training, checkpoint=load)
    if how == "load_checkpoint":
        engine.load_checkpoint(tmp_path)
    engine.train_batch()
    engine.close()
    assert engine.global_steps == 3


def test_only_the_parameters_of_a_folder_do_not_continue_its_run(tmp_path):
    train_two_steps(tmp_path)
    engine = build(tmp_path, checkpoint={"load": str(tmp_path), "load_module_only": True})
    with pytest.raises(CheckpointError, match="has global_step2 of an earlier run"):
        engine.train_batch()


def test_an_identity_names_user_and_host():
    who = replace(ProcessIdentity.current(), host="node7", pid=4711, user="alice", job="c/12")
    assert who.describe() == "process 4711 on node7 (user alice, Slurm job 12)"

"""Each run has its own folder; a restart finds its own; the link `latest` is only ever a link."""

import json
import logging
import re
from pathlib import Path

import pytest

from pipemega.config import load
from pipemega.distributed.mesh import Mesh
from pipemega.engine.run import run_folder
from pipemega.engine.run.run_folder import RunFolder
from pipemega.errors import CheckpointError, ConfigError, FolderLockedError
from pipemega.storage.locks import FolderLocks

LOG = logging.getLogger("pipemega.test")
TIME = r"\d{8}-\d{6}"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
    for name in (*names, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    # Each test has its own locks.
    monkeypatch.setattr(run_folder, "folder_locks", FolderLocks())
    yield
    run_folder.folder_locks.release_all()


def config_of(source=None, **sections):
    return load(source or {"train_batch_size": 1, "mesh": {"device": "cpu"}, **sections})


def start(config):
    return RunFolder(config, Mesh.single(), LOG).open()


def run_once(config):
    folder = RunFolder(config, Mesh.single(), LOG)
    path = folder.open()
    assert folder.open() == path
    folder.close()
    return path


def test_each_run_without_a_folder_gets_one_of_its_own_and_latest_leads_to_it(caplog):
    Path("mine.json").write_text('{"train_batch_size": 1}')
    caplog.set_level("INFO")
    folders = [start(config_of("mine.json")) for _ in range(3)]
    assert len(set(folders)) == 3
    assert re.fullmatch(rf"runs/mine-{TIME}", str(folders[0]))
    assert all(re.fullmatch(rf"runs/mine-{TIME}(-\d)?", str(folder)) for folder in folders)
    assert Path("runs/latest").resolve() == folders[2].resolve()
    assert [record.message for record in caplog.records] == [
        f"run folder: {folder} (also runs/latest)" for folder in folders
    ]
    assert load(folders[0] / "config.json") == config_of("mine.json")
    assert {path.name for path in folders[0].iterdir()} == {"config.json", "run.json", "run.lock"}


def test_a_config_without_a_file_and_one_with_overrides_have_a_name():
    assert config_of().name == "run"
    assert load('{"train_batch_size": 1}').name == "run"
    Path("mine.v2.json").write_text('{"train_batch_size": 1}')
    config = load(Path("mine.v2.json"), ["seed=3"])
    assert (config.name, load(config, ["seed=4"]).name) == ("mine.v2", "mine.v2")
    assert config == load({"train_batch_size": 1, "seed": 3})


def test_the_folder_of_checkpoints_is_the_run_folder(caplog):
    caplog.set_level("INFO")
    folder = start(config_of(checkpoint={"save": "a/mine"}))
    assert folder == Path("a/mine")
    assert caplog.messages == ["run folder: a/mine"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "run.lock"]
    assert not Path("runs").exists()


def test_a_run_that_saves_to_a_url_keeps_its_records_in_a_local_folder_and_locks_both():
    config = config_of(checkpoint={"save": "memory://bucket/mine"})
    assert start(config) == Path("runs/mine")
    run_folder.folder_locks = FolderLocks()
    with pytest.raises(FolderLockedError, match="another run uses memory://bucket/mine"):
        start(config)
    run_folder.folder_locks.release_all()


def test_a_second_run_of_the_same_name_is_refused_unless_it_may_overwrite():
    named = config_of(training={"run_name": "mine"})
    assert run_once(named) == Path("runs/mine")
    with pytest.raises(ConfigError, match="'mine' is that of an earlier run") as e:
        run_once(named)
    assert "(started 20" in str(e.value)
    assert "choose another name, or set checkpoint.overwrite to true" in str(e.value)
    config = config_of(training={"run_name": "mine"}, checkpoint={"overwrite": True})
    assert run_once(config) == Path("runs/mine")


@pytest.mark.parametrize("name", ["a/b", ".a", "latest", "a b", ""])
def test_a_run_name_must_be_the_name_of_a_folder(name):
    with pytest.raises(ConfigError, match=r"training.run_name"):
        config_of(training={"run_name": name})


@pytest.mark.parametrize("name", [None, "mine"])
def test_ranks_that_torchrun_restarts_find_their_folder_again(monkeypatch, name):
    config = config_of(training={"run_name": name})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = run_once(config)
    started = json.loads((first / "run.json").read_text())["started"]
    other = run_once(config_of())  # of the same launcher, but no restart
    assert other != first
    other.rename("elsewhere")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_once(config) == first
    assert json.loads((first / "run.json").read_text())["started"] == started


def test_a_job_that_slurm_requeues_finds_its_folder_again(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = run_once(config_of())
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert run_once(config_of()) != first
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_once(config_of()) == first


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_latest_that_is_no_link_stays_as_it_is(kind, caplog):
    """runs/latest may be the file `latest` of checkpoints, or the folder of an old version."""
    Path("runs").mkdir()
    latest = Path("runs/latest")
    latest.mkdir() if kind == "folder" else latest.write_text("global_step5\n")
    caplog.set_level("INFO")
    folder = start(config_of())
    assert not latest.is_symlink()
    assert "runs/latest is not a link, and stays as it is" in caplog.text
    assert caplog.messages[-1] == f"run folder: {folder}"


def test_a_file_system_without_links_gets_no_link(monkeypatch, caplog):
    def no_links(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    caplog.set_level("DEBUG", logger=LOG.name)
    folder = start(config_of())
    assert [path.name for path in Path("runs").iterdir()] == [folder.name]
    assert "no link runs/latest: [Errno 1] Operation not permitted" in caplog.text


def test_a_link_to_a_deleted_run_is_replaced():
    run_once(config_of()).rename("elsewhere")
    folder = start(config_of())
    assert Path("runs/latest").resolve() == folder.resolve()


def test_a_folder_that_cannot_be_written_is_named():
    Path("file").touch()
    with pytest.raises(CheckpointError, match=r"the run folder file/mine .*: Not a directory"):
        start(config_of(checkpoint={"save": "file/mine"}))

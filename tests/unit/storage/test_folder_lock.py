"""One run per folder: who holds the lock, when it is taken over, and how the loser ends."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pipemega.errors import FolderLockedError
from pipemega.storage import locks as folder_lock
from pipemega.storage.filesystem import LocalStorage, storage_at
from pipemega.storage.locks import LOCK_FILE, FolderLocks, LockOptions, ProcessIdentity

ALICE = "process 4711 on node7 (user alice), since 2026-11-22T04:01:50+00:00"
TAKE_OVER = LockOptions(take_over=True)


class Clock:
    """A clock that `sleep` moves; calls `on_sleep` each time."""

    def __init__(self, on_sleep=lambda: None):
        self.now, self.on_sleep = 0.0, on_sleep

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def locks():
    clock = Clock()
    made = FolderLocks(clock, clock.sleep)
    made.clock = clock
    yield made
    made.release_all()


def leave_lock(folder, **changes):
    """Write the lock of another process; by default of another host."""
    process = replace(
        ProcessIdentity.current(), **{"host": "node7", "pid": 4711, "user": "alice", **changes}
    )
    facts = {**process.to_dict(), "since": "2026-11-22T04:01:50+00:00", "token": "x", "beats": 0}
    storage_at(folder).write(LOCK_FILE, json.dumps(facts).encode())


SCRIPT = """
import sys, time
from pipemega.storage.filesystem import LocalStorage
from pipemega.storage.locks import folder_locks
folder_locks.lock(LocalStorage(sys.argv[1]))
print("locked", flush=True)
{end}
"""


def start_holder(folder, end="time.sleep(60)"):
    """Start a process that locks a folder; return it when it holds the lock."""
    command = [sys.executable, "-c", SCRIPT.format(end=end), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, locks, caplog):
    storage = LocalStorage(tmp_path / "runs/mine")
    with start_holder(storage.root) as holder:
        try:
            with pytest.raises(FolderLockedError) as refused:
                locks.lock(storage)
        finally:
            holder.send_signal(signal.SIGKILL)
        holder.wait()
    text = str(refused.value)
    who = replace(ProcessIdentity.current(), pid=holder.pid).describe()
    assert text.startswith(f"another run uses {storage.root}: {who}, since 20")
    assert "last heartbeat" in text
    assert "Wait until it has ended, or choose another folder (checkpoint.save)" in text
    assert f"set checkpoint.take_over to true ({storage.root}/run.lock is its lock)" in text
    locks.lock(storage)
    assert locks.clock.now == 0.0  # at once
    assert f"taking over {storage.root} from {who}" in caplog.text
    assert "this process has ended" in caplog.text


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "1 / 0"])
def test_the_lock_is_released_when_the_process_ends_and_after_errors(tmp_path, end):
    with start_holder(tmp_path, end) as holder:
        holder.wait(timeout=10)  # the heartbeat thread does not keep it alive
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_was_taken_over_is_told_who_and_writes_no_more(tmp_path, locks):
    storage, other = LocalStorage(tmp_path), FolderLocks()
    locks.lock(storage)
    other.lock(storage, TAKE_OVER)
    with pytest.raises(FolderLockedError) as lost:
        locks.verify(storage)
    who = ProcessIdentity.current().describe()
    assert str(lost.value).startswith(f"another run took {tmp_path} over at 20")
    assert f": {who}. This run writes nothing there any more; its earlier " in str(lost.value)
    with pytest.raises(FolderLockedError):
        locks.lock(storage, TAKE_OVER)
    with pytest.raises(FolderLockedError):
        locks.verify_heartbeats()
    locks.release(storage)
    other.verify(storage)
    other.release(storage)
    assert list(tmp_path.iterdir()) == []


def test_a_silent_holder_on_another_host_is_taken_over_after_two_minutes(tmp_path, locks, caplog):
    leave_lock(tmp_path)
    caplog.set_level("INFO")
    locks.lock(LocalStorage(tmp_path))
    assert 120 <= locks.clock.now <= 121
    held = f"{ALICE}, last heartbeat N s ago"
    waiting, taking = [re.sub(r"\d+ s ago", "N s ago", r.message) for r in caplog.records]
    assert waiting == f"{tmp_path} was locked by {held}: waiting up to 120 s for its heartbeat"
    assert taking == f"taking over {tmp_path} from {held}: no heartbeat for 120 s"


@pytest.mark.parametrize("folder", ["local", "memory://locked"])
def test_a_heartbeat_of_another_host_is_noticed_at_once(folder, tmp_path):
    storage = storage_at(tmp_path if folder == "local" else f"{folder}/{tmp_path.name}")

    def beat():
        if clock.now == 10.0:
            text = storage.read(LOCK_FILE).replace(b'"beats": 0', b'"beats": 1')
            os.utime(tmp_path / LOCK_FILE) if folder == "local" else storage.refresh(
                LOCK_FILE, text
            )

    clock = Clock(beat)
    leave_lock(storage.full_path())
    with pytest.raises(FolderLockedError, match=re.escape(ALICE)):
        FolderLocks(clock, clock.sleep).lock(storage)
    assert 10 <= clock.now <= 11


def test_the_wait_for_a_heartbeat_ends_before_other_ranks_time_out(tmp_path, locks):
    leave_lock(tmp_path)
    with pytest.raises(FolderLockedError, match="another run uses"):
        locks.lock(LocalStorage(tmp_path), LockOptions(wait_seconds=5.0))
    assert locks.clock.now <= 6


def test_the_user_can_take_a_lock_over_at_once(tmp_path, locks, caplog):
    leave_lock(tmp_path)
    locks.lock(LocalStorage(tmp_path), TAKE_OVER)
    assert locks.clock.now == 0.0
    assert "checkpoint.take_over is true" in caplog.text


def test_a_requeued_job_takes_over_its_own_lock_at_once(tmp_path, locks, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    leave_lock(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    locks.lock(LocalStorage(tmp_path))
    assert locks.clock.now == 0.0


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"no json", b"\xff"])
def test_an_unreadable_lock_is_taken_over_without_a_heartbeat(content, tmp_path, locks, caplog):
    """With mesh.timeout_seconds 20, the lock that a killed process had only begun to write was
    refused: "another run uses it: an unknown process"."""
    (tmp_path / LOCK_FILE).write_bytes(content)
    locks.lock(LocalStorage(tmp_path), LockOptions(wait_seconds=16.0))
    assert 15 <= locks.clock.now <= 16
    assert "its lock is incomplete, and had no heartbeat for 15 s" in caplog.text


def test_an_unreadable_lock_with_a_heartbeat_is_refused(tmp_path, locks):
    path = tmp_path / LOCK_FILE
    path.write_bytes(b"no json")
    locks.clock.on_sleep = lambda: os.utime(path, (locks.clock.now, locks.clock.now))
    with pytest.raises(FolderLockedError, match="an unknown process"):
        locks.lock(LocalStorage(tmp_path))


def test_a_folder_of_this_process_can_be_locked_again_by_any_path(tmp_path, locks):
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    locks.lock(LocalStorage(tmp_path / "mine"))
    locks.lock(LocalStorage(tmp_path / "link"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [LOCK_FILE]


def test_a_relative_folder_stays_locked_after_a_change_of_the_working_directory(
    tmp_path, locks, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    locks.lock(LocalStorage("mine"))
    (lock,) = locks._held.values()
    (tmp_path / "other/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other")
    lock.beat()
    assert not list((tmp_path / "other/mine").iterdir())
    locks.release_all()
    assert not list((tmp_path / "mine").iterdir())


def test_a_deleted_lock_file_is_written_again(tmp_path, locks):
    storage = LocalStorage(tmp_path)
    locks.lock(storage)
    (tmp_path / LOCK_FILE).unlink()
    locks.verify(storage)
    assert (tmp_path / LOCK_FILE).exists()


def test_a_heartbeat_changes_the_time_stamp_and_notices_a_loss(tmp_path, locks, monkeypatch):
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.02)
    storage = LocalStorage(tmp_path)
    locks.lock(storage)
    before = storage.version(LOCK_FILE)
    wait_until(lambda: storage.version(LOCK_FILE) != before)
    leave_lock(tmp_path)
    (lock,) = locks._held.values()
    wait_until(lambda: lock.lost_to is not None)
    with pytest.raises(FolderLockedError, match="process 4711 on node7"):
        locks.verify_heartbeats()


def wait_until(condition, seconds=10.0):
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("not in time")


def test_a_heartbeat_survives_errors_of_the_file_server(tmp_path, locks, monkeypatch):
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.02)
    storage = LocalStorage(tmp_path)
    locks.lock(storage)
    failures = []

    def fail(*_):
        failures.append(1)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read", fail)
        wait_until(lambda: len(failures) > 2)
    before = storage.version(LOCK_FILE)
    wait_until(lambda: storage.version(LOCK_FILE) != before)


def test_a_forked_process_neither_holds_nor_releases_the_lock_of_its_parent(tmp_path, locks):
    storage = LocalStorage(tmp_path)
    locks.lock(storage)
    key, lock = locks._held.popitem()
    locks._held[key[0] + 1, key[1]] = lock  # as a child sees it
    with pytest.raises(FolderLockedError, match=f"process {os.getpid()} on"):
        locks.lock(storage)
    locks.release_all()
    assert (tmp_path / LOCK_FILE).exists()
    locks._held[key] = lock


def test_a_lock_that_was_replaced_meanwhile_is_not_removed(tmp_path):
    """Two processes see a silent lock; the slower one must not remove that of the faster one."""
    storage = LocalStorage(tmp_path)
    storage.write(LOCK_FILE, b"new")
    assert not storage.delete_if(LOCK_FILE, b"old")
    assert storage.read(LOCK_FILE) == b"new"
    assert storage.delete_if(LOCK_FILE, b"new")
    assert not storage.delete_if(LOCK_FILE, b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_replaced_is_restored_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    storage = LocalStorage(tmp_path)
    storage.write(LOCK_FILE, b"new")
    assert not storage.delete_if(LOCK_FILE, b"old")
    assert storage.read(LOCK_FILE) == b"new"
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("conditional_writes", [True, False])
def test_a_url_is_locked_too(tmp_path, locks, monkeypatch, conditional_writes):
    storage, other = storage_at(f"memory://locks/{tmp_path.name}"), FolderLocks()
    if not conditional_writes:
        open_file = storage._files.open

        def refuse_x(path, mode="rb", **options):
            if "x" in mode:
                raise ValueError(mode)
            return open_file(path, mode, **options)

        monkeypatch.setattr(storage._files, "open", refuse_x)
    locks.lock(storage)
    locks.lock(storage)
    with pytest.raises(FolderLockedError, match="another run uses memory://locks/"):
        other.lock(storage)
    other.lock(storage, TAKE_OVER)
    with pytest.raises(FolderLockedError, match="another run took memory://locks/"):
        locks.verify(storage)
    other.release(storage)
    assert storage.listdir() == []


def test_no_second_lock_is_made_at_the_same_moment(tmp_path):
    storage, results = LocalStorage(tmp_path), []
    barrier = threading.Barrier(8)

    def compete():
        locks = FolderLocks()
        barrier.wait()
        try:
            locks.lock(storage)
            results.append(locks)
        except FolderLockedError:
            results.append(None)

    leave_lock(tmp_path, host=ProcessIdentity.current().host, pid=2**22 + 1)  # ended
    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holders = [locks for locks in results if locks is not None]
    assert len(results) == 8
    assert len(holders) == 1
    holders[0].verify(storage)
    holders[0].release_all()
    gc.collect()
    assert list(Path(tmp_path).iterdir()) == []

"""Whole files or none, and one builder however many need the result."""

import json
import multiprocessing
import os
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipemega.errors import DataError
from pipemega.storage import build_once as file_cache
from pipemega.storage.build_once import (
    atomic_path,
    build_once,
    cached_arrays,
    digest_of,
    notice_if_slow,
    user_cache_folder,
    writable_folder,
)
from pipemega.storage.filesystem import LocalStorage
from pipemega.storage.locks import HeartbeatLock, ProcessIdentity


def write_half(path):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise ValueError("in the middle")


def test_a_file_is_renamed_when_it_is_complete(tmp_path):
    path = tmp_path / "folder" / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("content")
        assert not path.exists()
    assert path.read_text() == "content"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_an_exception_while_writing_keeps_only_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError, match="in the middle"):
        write_half(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def _killed_in_the_middle(path):
    with atomic_path(Path(path)) as temporary:
        temporary.write_text("half")
        os.kill(os.getpid(), 9)


def test_a_kill_while_writing_leaves_no_file_under_the_final_name(tmp_path):
    path = tmp_path / "file"
    process = multiprocessing.get_context("spawn").Process(
        target=_killed_in_the_middle, args=(str(path),)
    )
    process.start()
    process.join()
    assert process.exitcode == -9
    assert not path.exists()


def test_a_failed_write_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(DataError, match=r"cannot write .*file: No space left on device"),
        atomic_path(tmp_path / "file") as temporary,
    ):
        temporary.write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "pipemega"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_cache_folder() == Path("/somewhere/.cache/pipemega")


def test_the_second_folder_is_used_if_the_first_is_not_writable(tmp_path):
    (tmp_path / "file").touch()
    assert writable_folder(tmp_path / "a", tmp_path / "b") == tmp_path / "a"
    assert writable_folder(tmp_path / "file" / "a", tmp_path / "b") == tmp_path / "b"
    with pytest.raises(DataError, match=r"no folder for cached files .*file/a.*file/b"):
        writable_folder(tmp_path / "file" / "a", tmp_path / "file" / "b")


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_only_slow_work_is_reported(monkeypatch):
    monkeypatch.setattr(file_cache, "NOTICE_SECONDS", 0.05)
    said = []
    with notice_if_slow("building", said.append):
        pass
    assert said == []
    with notice_if_slow("building", said.append):
        time.sleep(0.15)
    assert said == ["building"]


def _build_slowly(folder, results):
    """In a process: the index, and a mark for each time that it was built."""

    def build():
        time.sleep(0.3)
        (Path(folder) / f"built-by-{os.getpid()}").touch()
        return {"numbers": np.arange(5)}

    arrays = cached_arrays(Path(folder), "Test", {"x": 1}, ["numbers"], build, what="the numbers")
    results.put(arrays["numbers"].tolist())


def test_several_processes_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_build_slowly, args=(str(tmp_path), results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=30) for _ in processes] == [[0, 1, 2, 3, 4]] * 3
    for process in processes:
        process.join()
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert not list(tmp_path.glob("*.lock"))
    assert not list(tmp_path.glob(".*"))


def test_several_threads_build_once_and_waiting_ones_name_the_builder(tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "NOTICE_SECONDS", 0.05)
    built, said = [], []

    def build():
        time.sleep(0.3)
        built.append(1)
        return 7

    def work():
        return build_once(
            tmp_path / "lock",
            find=lambda: 7 if built else None,
            build=build,
            what="seven",
            say=said.append,
        )

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert (
        said == [f"waiting for process {os.getpid()} on {socket.gethostname()} to build seven"] * 2
    )


def test_another_rank_of_the_run_is_named_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "NOTICE_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    with subprocess.Popen(["sleep", "60"]) as other:
        identity = replace(ProcessIdentity.current(), pid=other.pid, start_ticks=0)
        # What is a child here is a sibling, as under torchrun.
        monkeypatch.setattr(os, "getppid", os.getpid)
        (tmp_path / "lock").write_text(json.dumps(identity.to_dict()))
        find = lambda: 7 if said else None  # noqa: E731
        build_once(tmp_path / "lock", find=find, build=int, what="seven", say=said.append)
        other.kill()
    name = f"process {other.pid} on {socket.gethostname()}"
    assert said == [f"waiting for another rank of this run ({name}) to build seven"]


def test_an_error_of_the_builder_releases_the_lock(tmp_path):
    def fail():
        raise DataError("bad input")

    for _ in range(2):
        with pytest.raises(DataError, match="bad input"):
            build_once(tmp_path / "lock", find=lambda: None, build=fail, what="it")
    assert list(tmp_path.iterdir()) == []


def leave_lock(path, **facts):
    holder = {**ProcessIdentity.current().to_dict(), "start_ticks": 0, "token": "x", **facts}
    path.write_text(json.dumps(holder))


def lock_of(path):
    return HeartbeatLock(LocalStorage(path.parent), path.name, 0.05)


def build_seven(lock, **options):
    return build_once(lock, find=lambda: None, build=lambda: 7, what="seven", **options)


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=time.time)
    process.start()
    process.join()
    leave_lock(tmp_path / "lock", pid=process.pid)
    assert build_seven(tmp_path / "lock", deadline_seconds=20) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_host_without_heartbeat_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "SILENCE_SECONDS", 0.2)
    leave_lock(tmp_path / "lock", host="elsewhere", pid=1)
    assert build_seven(tmp_path / "lock", deadline_seconds=20) == 7


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json"])
def test_a_lock_without_valid_content_is_taken_over(text, tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "SILENCE_SECONDS", 0.1)
    (tmp_path / "lock").write_text(text)
    assert build_seven(tmp_path / "lock", deadline_seconds=20) == 7


def test_a_lock_with_heartbeat_is_waited_for_until_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "SILENCE_SECONDS", 0.3)
    lock = lock_of(tmp_path / "lock")
    assert lock.acquire()
    assert not lock_of(tmp_path / "lock").acquire()
    with pytest.raises(
        DataError, match=rf"process {os.getpid()} on .* has been building seven .* remove .*lock"
    ):
        build_seven(tmp_path / "lock", deadline_seconds=0.8)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_first_holder_does_not_release_a_lock_that_was_taken_over(tmp_path):
    lock = lock_of(tmp_path / "lock")
    assert lock.acquire()
    leave_lock(tmp_path / "lock", pid=1)
    lock.release()
    assert (tmp_path / "lock").exists()

"""A process that has ended is recognised, and one out of sight is never said to have ended."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pipemega.storage.locks import ProcessIdentity


def test_this_process_runs_and_is_restored_from_its_json():
    now = ProcessIdentity.current()
    assert now.is_running_here()
    assert not now.has_ended()
    assert ProcessIdentity.from_dict({**now.to_dict(), "token": "x"}) == now


@pytest.mark.parametrize(
    "values", [{}, {"host": "a"}, {"host": 1, "pid": 2}, {"host": "a", "pid": "2"}]
)
def test_incomplete_values_are_refused(values):
    with pytest.raises(ValueError, match="not the identity of a process"):
        ProcessIdentity.from_dict(values)


def test_a_process_that_has_ended_is_recognised_before_and_after_its_parent_notices():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        identity = replace(ProcessIdentity.current(), pid=child.pid, start_ticks=0)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert identity.has_ended()  # a zombie
        child.wait()
        assert identity.has_ended()


def test_a_sibling_is_another_running_process_of_the_same_parent():
    here = ProcessIdentity.current()
    code = (
        "import sys; from dataclasses import replace;"
        "from pipemega.storage.locks import ProcessIdentity;"
        "now = ProcessIdentity.current();"
        "print([replace(now, pid=int(p), start_ticks=0).is_sibling() for p in sys.argv[1:]])"
    )
    with subprocess.Popen(["sleep", "60"]) as sibling:
        pids = [str(sibling.pid), str(os.getpid())]
        try:
            done = subprocess.run([sys.executable, "-c", code, *pids], capture_output=True)
        finally:
            sibling.kill()
        assert done.stdout.decode().strip() == "[True, False]", done.stderr
    assert not here.is_sibling(), "the process itself is none"


def test_another_process_with_the_same_pid_is_not_the_holder():
    now = ProcessIdentity.current()
    assert now.start_ticks > 0
    assert replace(now, start_ticks=now.start_ticks - 1).has_ended()


@pytest.mark.parametrize("change", [{"host": "b"}, {"boot": "b"}, {"namespace": "b"}])
def test_a_process_out_of_sight_is_never_said_to_have_ended(change):
    other = replace(ProcessIdentity.current(), pid=2**22 + 1, **change)
    assert not other.has_ended()
    assert not other.is_running_here()


@pytest.mark.parametrize(
    ("job", "requeues", "ended"), [("7", "1", True), ("7", "0", False), ("8", "1", False)]
)
def test_a_job_that_slurm_has_requeued_has_ended_its_processes(monkeypatch, job, requeues, ended):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    before = replace(ProcessIdentity.current(), host="elsewhere")
    assert before.describe().endswith("on elsewhere (user " + before.user + ", Slurm job 7)")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", requeues)
    assert before.has_ended() == ended

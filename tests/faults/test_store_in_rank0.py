"""Ranks that a shell script has started: rank 0 has the store, and no launcher ends the others."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.fault_injection import Fault
from tests.faults.launch_runs import run
from tests.faults.training import Job

TIMEOUT = 3.0


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_an_error_is_printed_once_and_without_stacks_of_the_store(rank: int, scratch: Path) -> None:
    """Rank 0 ended first, with the store: another rank printed the error again, and torch printed
    the C++ stack of each call of the store, 48 to 145 lines."""
    folder = scratch / "run"
    folder.mkdir()
    fault = Fault("raise", "layer forward", rank, 3)
    job = Job(str(folder), "pipeline x zero", fault=fault, timeout=TIMEOUT)
    ended = run(job, store_in_rank0=True)
    assert ended.codes == [1, 1, 1, 1], str(ended)
    assert ended.forced == [], str(ended)
    assert len(ended.printed) == 1, str(ended)
    assert ended.error_lines < 40, str(ended)


@pytest.mark.sweep
@pytest.mark.parametrize("step", [1, 3])
def test_ranks_end_if_rank_0_is_suspended_and_another_one_is_killed(
    step: int, scratch: Path
) -> None:
    """In 1 of 8 runs a rank waited for rank 0 in a call with the timeout of the start-up, and its
    watchdog for an answer of the store."""
    folder = scratch / "run"
    folder.mkdir()
    job = Job(str(folder), "pipeline x zero", timeout=TIMEOUT)
    done: list[bool] = []

    def suspend_and_kill(pids: list[int]) -> None:
        log = folder / "log0"
        if not done and log.exists() and f'"step": {step}' in log.read_text():
            done.append(True)
            os.kill(pids[0], signal.SIGSTOP)
            os.kill(pids[3], signal.SIGKILL)

    ended = run(job, store_in_rank0=True, limit=60.0, watch=suspend_and_kill)
    assert ended.codes == [-9, 1, 1, -9], str(ended)
    assert ended.forced == [0], str(ended)  # the suspended one
    assert any("the store of the process group" in message for message in ended.printed)

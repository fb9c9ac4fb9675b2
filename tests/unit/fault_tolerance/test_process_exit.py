"""The end of a process after an error: code, output, files, and threads inside of torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pipemega.errors import ConfigError, PeerError, Stopped
from pipemega.fault_tolerance import final_report
from pipemega.fault_tolerance.failure_store import (
    FailureReport,
    FailureStore,
    SigtermWatch,
    ignore_sigterm,
)
from pipemega.fault_tolerance.run import exit_code

ROOT = Path(__file__).parents[3]

# A thread polls a store, as the threads that report a failure do.
SCRIPT = """
import atexit, sys, threading
import torch.distributed as dist
from pipemega.fault_tolerance.run import skip_teardown

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def poll():
    while True:
        store.add("key", 1)

for _ in range(4):
    threading.Thread(target=poll, daemon=True).start()
atexit.register(lambda: print("exit function", flush=True))
file = open(sys.argv[1], "w")
file.write("buffered")
try:
    skip_teardown(7)
    sys.exit(7)
finally:
    print("finally")
"""


def test_a_process_with_threads_in_the_store_exits_with_its_code_and_loses_nothing(
    tmp_path: Path,
) -> None:
    """C++ aborted the process when a call returned during the interpreter's teardown."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "file")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stdout == "finally\nexit function\n"
    assert done.stderr == ""
    assert (tmp_path / "file").read_text() == "buffered"


RANK_OF_A_COMMAND = """
import argparse, threading
import torch.distributed as dist
from pipemega.cli.run_options import launched

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def poll():
    while True:
        store.add("key", 1)

for _ in range(4):
    threading.Thread(target=poll, daemon=True).start()
with launched(argparse.Namespace(verbose=False)):
    print("result")
"""


def test_a_rank_of_evaluate_exits_with_0_although_a_thread_is_in_a_call_of_torch() -> None:
    """A rank was aborted after the result, and torchrun reported an error."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RANK": "0",
        "WORLD_SIZE": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", RANK_OF_A_COMMAND],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "result\n", "")


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of four, on one node."""
    values = {"RUN_ID": "run", "RESTART_COUNT": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    for name, value in {
        "RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


KILLED = FailureReport(None, "no response from rank 1", missing=(1,), summary="rank 1 disappeared")
FAILED = FailureReport(1, "ValueError: injected error")
OWN = FailureReport(2, "ValueError: injected error")


def watch(received: bool) -> SigtermWatch:
    found = SigtermWatch(lambda: False, print)
    found.received = received
    return found


@pytest.mark.usefixtures("under_torchrun")
@pytest.mark.parametrize(
    ("error", "cause", "sigterm", "code"),
    [
        (PeerError("lost"), KILLED, True, 0),
        (PeerError("failed first"), FAILED, True, 0),
        (PeerError("lost"), KILLED, False, 1),
        (ValueError("injected error"), OWN, True, 1),
        (ConfigError("on all ranks"), None, True, 0),
        # All ranks may have been stopped before one of them failed.
        (Stopped("stopped by SIGTERM"), None, True, 1),
        (KeyboardInterrupt(), FAILED, True, 130),
        (SystemExit(3), OWN, True, 3),
    ],
)
def test_a_rank_exits_with_0_only_if_torchrun_has_stopped_it_after_the_failure_of_another(
    error: BaseException, cause: FailureReport | None, sigterm: bool, code: int
) -> None:
    assert exit_code(error, error, cause, watch(sigterm)) == code


def test_without_torchrun_each_rank_exits_with_1() -> None:
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    assert exit_code(PeerError("lost"), PeerError("lost"), KILLED, watch(True)) == 1


@pytest.mark.usefixtures("under_torchrun")
@pytest.mark.parametrize(
    ("cause", "rank"),
    [
        (None, 0),
        (FAILED, 1),
        (KILLED, 0),
        (FailureReport(None, "no response", missing=(0, 1), summary="ranks disappeared"), 2),
    ],
)
def test_the_failed_rank_prints_or_else_the_lowest_rank_that_is_left(
    cause: FailureReport | None, rank: int
) -> None:
    assert final_report.printing_rank(cause) == rank


def test_one_rank_prints_also_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [final_report._claim_on_node("printed") for _ in range(3)] == [True, False, False]
    assert final_report._claim_on_node("another message")
    # A file that an earlier launch with the same process id has left.
    monkeypatch.setattr(final_report, "_STARTED", float("inf"))
    assert final_report._claim_on_node("printed")


def test_ranks_that_fail_with_one_message_before_the_mesh_exists_find_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def store_of(rank: int, message: str) -> FailureStore:
        monkeypatch.setenv("RANK", str(rank))
        return FailureStore.before_mesh(message, 5.0)

    first, second, other = store_of(0, "no file"), store_of(1, "no file"), store_of(1, "no GPU")
    assert not second.is_printed()
    assert first.claim_printing()
    assert second.is_printed()
    assert not second.claim_printing()
    assert other.claim_printing()


def test_the_error_file_of_torchrun_gets_the_error_message_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    final_report.print_error("Traceback\n  line\nerror: rank 1: injected error\n  and a table")
    assert '"message": "error: rank 1: injected error"' in (tmp_path / "error.json").read_text()
    assert capsys.readouterr().err.endswith("injected error\n  and a table\n")


def test_sigterm_ends_a_process_without_pipemega_run() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ignore_sigterm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

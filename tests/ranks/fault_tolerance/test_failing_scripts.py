"""Scripts under torchrun with a fault: exit code, error messages, remaining processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipemega.checkpoint import newest
from tests.ranks.error_logs import find_logs, read_entries

ROOT = Path(__file__).parents[3]

_TORCHRUN_TRACEBACK = (
    r"^Traceback .*\n(?:  .*\n)+(?=torch\.distributed\.elastic\..*ChildFailedError)"
)

# {fault} runs when the third micro-batch enters layer 1, which only rank 1 has.
SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch
from torch import nn
import pipemega
from pipemega import LayerSpec, PipelineModule

class Layer(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.fault()
        return super().forward(x)

    def fault(self):
        pass

class Faulty(Layer):
    def fault(self):
        {fault}

def batches():
    while True:
        yield torch.ones(2, 4), torch.ones(2, 4)

with pipemega.run():
    rank = int(os.environ["RANK"])
    {before}
    net = PipelineModule(
        [LayerSpec(Layer, 4, 4), LayerSpec(Faulty, 4, 4)], loss_fn=nn.functional.mse_loss
    )
    engine, *_ = pipemega.initialize(net, sys.argv[1])
    for step in range(2):
        engine.train_batch(batches())
        {between_steps}
print("rank", rank, "is done", flush=True)
"""

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "mesh": {"pipeline": 2, "device": "cpu", "timeout_seconds": 60},
}


class Ended(NamedTuple):
    code: int
    errors: str
    seconds: float

    details: dict[int, str]

    @property
    def printed(self) -> str:
        """Return the error message on the terminal; exactly one rank must print one."""
        (found,) = re.findall(r"^error: (.*(?:\n  .*)*)", self.errors, re.MULTILINE)
        return str(found)

    @property
    def num_lines(self) -> int:
        """Lines on stderr, without those of the logger and without torchrun's own traceback.

        The length of a traceback depends on the version of Python.
        """
        errors = re.sub(_TORCHRUN_TRACEBACK, "", self.errors, flags=re.MULTILINE)
        return sum(not line.startswith("[pipemega]") for line in errors.splitlines())

    @property
    def root_cause(self) -> str:
        """The last part of torchrun's output: the rank that failed first by torchrun's clock."""
        assert self.errors.rstrip().endswith("=====")
        return self.errors.rsplit("Root Cause (first observed failure):", 1)[1]


class Scripts:
    """Runs a variant of SCRIPT on two ranks, and checks that no process remains."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = f"pipemega-test-{uuid.uuid4().hex}"

    def run(
        self,
        *,
        fault: str = "pass",
        before: str = "pass",
        between_steps: str = "pass",
        config: object = CONFIG,
        ranks: int = 2,
    ) -> Ended:
        command = self._write(fault, between_steps, config, before)
        launcher = [
            "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={_port()}"
        ]  # fmt: skip
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *launcher, *command],
            env=_environment() | {"TMPDIR": str(self._folder)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        seconds = time.monotonic() - started
        return Ended(done.returncode, done.stderr, seconds, self._details())

    def run_without_torchrun(
        self, *, fault: str = "pass", before: str = "pass", between_steps: str = "pass"
    ) -> list[Ended]:
        """Run with the store in rank 0, as under mpirun; return how each rank ended."""
        command = self._write(fault, between_steps, CONFIG, before)
        started = time.monotonic()
        world = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": "2",
            "TMPDIR": str(self._folder),
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, *command],
                env=_environment() | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        seconds = time.monotonic() - started
        details = self._details()
        codes = [rank.returncode for rank in ranks]
        return [Ended(c, e, seconds, details) for c, e in zip(codes, errors, strict=True)]

    def _details(self) -> dict[int, str]:
        """Return what each rank has written to the log."""
        return read_entries("".join(path.read_text() for path in find_logs(self._folder)))

    def _write(self, fault: str, between: str, config: object, before: str = "pass") -> list[str]:
        script, settings = self._folder / "script.py", self._folder / "config.json"
        script.write_text(SCRIPT.format(fault=fault, between_steps=between, before=before))
        settings.write_text(config if isinstance(config, str) else json.dumps(config))
        return [str(script), str(settings), self._token]

    def left(self) -> list[int]:
        """Return the processes that still run a script of this test."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self._token.encode() in entry.read_bytes():
                    found.append(int(entry.parent.name))
            except OSError:
                continue  # it ended meanwhile
        return found


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    scripts = Scripts(tmp_path)
    yield scripts
    left = scripts.left()
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes that did not end"


@pytest.mark.sweep
def test_the_rank_with_an_error_in_a_layer_prints_it_and_the_other_logs_it(
    scripts: Scripts,
) -> None:
    ended = scripts.run(fault='raise ValueError("injected error")')
    cause = (
        "forward of micro-batch 2 at stage 1 (F2@1): layers.1 (Faulty) failed: "
        "ValueError: injected error"
    )
    assert ended.code == 1
    assert ended.printed.startswith(f"rank 1: {cause}; no checkpoint yet; details of every rank: /")
    assert ended.printed.endswith("errors.log")
    assert ended.details[1].startswith(f"{cause}\n")
    assert ended.details[0].startswith(f"rank 1 failed first: {cause}\n  (rank 0 was stopped")
    assert ended.errors.count('raise ValueError("injected error")') == 1
    # The last lines on the terminal.
    assert cause in ended.root_cause
    assert "<NO_OTHER_FAILURES>" in ended.errors
    assert ended.num_lines <= 40


def test_one_line_names_a_killed_rank_and_torchrun_its_signal(scripts: Scripts) -> None:
    ended = scripts.run(fault="os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.code == 1
    assert re.fullmatch(
        r"rank 1 \(pid \d+ on \S+\) disappeared in step 1; no checkpoint yet; start again with the "
        r"same command; details of every rank: /\S+errors.log",
        ended.printed,
    )
    assert "no response from rank 1: killed, crashed, hanging" in ended.details[0]
    assert "at stage 0" in ended.details[0]
    assert "Signal 9 (SIGKILL)" in ended.root_cause
    assert ended.num_lines <= 23


@pytest.mark.sweep
def test_no_rank_of_four_aborts_after_a_kill_and_stderr_stays_short(scripts: Scripts) -> None:
    """A thread was in a call of the store when Python ended: C++ aborted the process."""
    config = {**CONFIG, "mesh": {**CONFIG["mesh"], "data": 2}}  # type: ignore[dict-item]
    for _ in range(8):
        ended = scripts.run(
            fault="if rank == 3: os.kill(os.getpid(), signal.SIGKILL)", config=config, ranks=4
        )
        assert ended.code == 1
        assert ended.printed.startswith("rank 3 (pid ")
        assert "terminate called" not in ended.errors
        assert "SIGABRT" not in ended.errors
        assert "Signal 9 (SIGKILL)" in ended.root_cause
        assert ended.num_lines <= 23
        assert sorted(ended.details) == [0, 1, 2]


@pytest.mark.sweep
def test_a_rank_that_hangs_in_torch_is_named_after_the_timeout_and_ended(
    scripts: Scripts,
) -> None:
    store = "torch.distributed.distributed_c10d._get_default_store()"
    ended = scripts.run(
        fault=f'{store}.wait(["never written"], timedelta(minutes=9))',
        config={**CONFIG, "mesh": {"pipeline": 2, "device": "cpu", "timeout_seconds": 5}},
    )
    assert ended.code == 1
    assert re.match(
        r"rank 1 \(pid \d+ on \S+\) did not respond within mesh.timeout_seconds in step 1; it is "
        r"at F2@1, in fault: script.py, line \d+ in fault: .*never written.*; details of every",
        ended.printed,
    )
    first, *lines = ended.details[0].splitlines()
    assert first.startswith("rank 1 is alive but did not respond within mesh.timeout_seconds")
    assert "mesh.timeout_seconds (5 s)" in first
    assert lines[0] == "  rank 1 is at F2@1, in fault"
    assert re.match(r"      script.py, line \d+ in fault: .*never written", lines[1])
    # The rank cannot run Python code; its watchdog has ended it.
    assert ended.details[1].startswith(first)
    assert "did not respond within mesh.timeout_seconds" in ended.root_cause


@pytest.mark.sweep
def test_an_error_in_the_script_on_one_rank_ends_the_other(scripts: Scripts) -> None:
    ended = scripts.run(between_steps="1 / 0 if rank == 0 else None")
    assert ended.code == 1
    assert ended.printed.startswith("rank 0: ZeroDivisionError: division by zero; ")
    assert ended.details[1].startswith(
        "rank 0 failed first: the script: ZeroDivisionError: division by zero"
    )
    assert ended.errors.count("1 / 0 if rank == 0") == 1


def test_a_script_that_ends_during_a_background_save_completes_the_checkpoint(
    scripts: Scripts, tmp_path: Path
) -> None:
    save = f"engine.save_checkpoint({str(tmp_path / 'saved')!r})"
    config = {**CONFIG, "mesh": {"device": "cpu"}, "checkpoint": {"async": True}}
    ended = scripts.run(between_steps=save, config=config, ranks=1)
    assert ended.code == 0
    assert newest(tmp_path / "saved") == "global_step2"


@pytest.mark.sweep
def test_ctrl_c_on_one_rank_ends_both_without_a_traceback(scripts: Scripts) -> None:
    ended = scripts.run(fault="os.kill(os.getpid(), signal.SIGINT); time.sleep(1)")
    assert ended.code == 1
    assert ended.printed.startswith("rank 1: KeyboardInterrupt; ")
    assert ended.details[0].startswith("rank 1 failed first: train_batch: KeyboardInterrupt")
    assert "Traceback" not in ended.errors.split("torch/distributed")[0]


@pytest.mark.sweep
def test_one_rank_reports_a_config_that_no_rank_can_read(scripts: Scripts) -> None:
    ended = scripts.run(config='{"train_batch_size": 8,,}')
    assert ended.code == 1
    assert ended.printed.startswith("rank 0: ")
    assert "config.json is not JSON: line 1" in ended.printed
    assert not ended.details
    assert ended.num_lines <= 23
    assert "Traceback" not in ended.errors.split("torch/distributed")[0]


@pytest.mark.sweep
def test_a_config_that_only_rank_1_cannot_read_is_reported_by_rank_1(scripts: Scripts) -> None:
    ended = scripts.run(before="sys.argv[1] += 'x' if rank == 1 else ''")
    assert ended.code == 1
    assert ended.errors.count("config.jsonx") >= 1
    assert re.search(r"^error: rank 1: .*config.jsonx", ended.errors, re.MULTILINE)


# The abort of a communicator that never returns.
STUCK_ABORT = (
    "from pipemega.distributed import process_groups as groups; groups.ABORT_SECONDS = 0.5; "
    'stuck = lambda self: print("stuck abort", file=sys.stderr, flush=True) or time.sleep(600); '
    'groups._backends = lambda: [type("Stuck", (), {"abort": stuck})()]'
)


@pytest.mark.sweep
def test_without_torchrun_the_rank_with_the_store_exits_after_all_have_read_it(
    scripts: Scripts,
) -> None:
    """Also if the abort of a communicator is stuck."""
    first, second = scripts.run_without_torchrun(
        fault='raise ValueError("injected error")', before=STUCK_ABORT
    )
    assert first.seconds < 50.0
    assert "stuck abort" in first.errors
    assert "stuck abort" in second.errors
    assert (first.code, second.code) == (1, 1)
    assert "error: " not in first.errors
    assert first.details[0].startswith("rank 1 failed first: forward of micro-batch 2 at stage 1")
    assert "layers.1 (Faulty) failed: ValueError: injected error" in second.printed


def test_without_torchrun_the_loss_of_the_store_ends_the_other_ranks(scripts: Scripts) -> None:
    first, second = scripts.run_without_torchrun(
        between_steps="os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else None"
    )
    assert first.code == -signal.SIGKILL
    assert second.code == 1
    assert second.printed.startswith(
        "rank 1: train_batch: all_reduce of 2 int64 over all ranks 0, 1"
    )
    assert "the store of the process group, in rank 0 or in torchrun, is gone" in second.printed


@pytest.mark.sweep
def test_four_ranks_end_with_the_error_of_the_failed_rank(scripts: Scripts) -> None:
    config = {**CONFIG, "mesh": {**CONFIG["mesh"], "data": 2}}  # type: ignore[dict-item]
    ended = scripts.run(fault='raise ValueError("injected error")', config=config, ranks=4)
    assert ended.code == 1
    assert "ValueError: injected error" in ended.root_cause


KILLER = (
    "type('Killer', (torch.utils.data.Dataset,), {'__len__': lambda self: 4, "
    "'__getitem__': lambda self, i: os.kill(os.getpid(), signal.SIGKILL)})()"
)


@pytest.mark.sweep
def test_all_ranks_report_a_killed_dataloader_worker(scripts: Scripts) -> None:
    ended = scripts.run(
        between_steps=f"rank == 1 and [*torch.utils.data.DataLoader({KILLER}, num_workers=1)]"
    )
    assert ended.code == 1
    assert ended.printed.startswith("rank 1: RuntimeError: DataLoader worker (pid")
    assert ended.details[0].startswith(
        "rank 1 failed first: the script: RuntimeError: DataLoader worker (pid"
    )


@pytest.mark.sweep
def test_a_crash_in_c_shows_the_python_line(scripts: Scripts) -> None:
    ended = scripts.run(fault="os.kill(os.getpid(), signal.SIGBUS)")
    assert ended.code == 1
    assert ended.printed.startswith("rank 1 (pid ")
    assert "no response from rank 1" in ended.details[0]
    assert "Fatal Python error: Bus error" in ended.errors
    assert re.search(r"script.py\", line \d+ in fault", ended.errors)

"""Real scripts under torchrun in which something goes wrong: exit code, last words, leftovers."""

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

ROOT = Path(__file__).parents[2]

# {fault} runs where the third micro-batch enters layer 1, which only rank 1 holds.
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

    def of_rank(self, rank: int) -> str:
        """The message of a rank; it must be one."""
        (found,) = re.findall(rf"^error: rank {rank}: (.*(?:\n  .*)*)", self.errors, re.MULTILINE)
        return str(found)

    @property
    def root_cause(self) -> str:
        """What torchrun shows at the end of all, of the rank that failed first by its watch."""
        assert self.errors.rstrip().endswith("=====")
        return self.errors.rsplit("Root Cause (first observed failure):", 1)[1]


class Scripts:
    """Runs a variant of SCRIPT on two ranks, and makes sure that nothing of it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = f"pipemega-test-{uuid.uuid4().hex}"

    def run(
        self,
        *,
        fault: str = "pass",
        between_steps: str = "pass",
        config: object = CONFIG,
        ranks: int = 2,
    ) -> Ended:
        command = self._write(fault, between_steps, config)
        launcher = [
            "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={_port()}"
        ]  # fmt: skip
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *launcher, *command],
            env=_environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return Ended(done.returncode, done.stderr, time.monotonic() - started)

    def run_without_torchrun(
        self, *, fault: str = "pass", between_steps: str = "pass"
    ) -> list[Ended]:
        """The same with the store in rank 0, as under mpirun; how each rank ended."""
        command = self._write(fault, between_steps, CONFIG)
        started = time.monotonic()
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": "2"}
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
        return [Ended(r.returncode, e, seconds) for r, e in zip(ranks, errors, strict=True)]

    def _write(self, fault: str, between: str, config: object) -> list[str]:
        script, settings = self._folder / "script.py", self._folder / "config.json"
        script.write_text(SCRIPT.format(fault=fault, between_steps=between))
        settings.write_text(config if isinstance(config, str) else json.dumps(config))
        return [str(script), str(settings), self._token]

    def left(self) -> list[int]:
        """The processes that still run a script of this test."""
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


def test_an_error_in_a_layer_is_told_by_both_ranks_with_the_trace_of_the_layer_once(
    scripts: Scripts,
) -> None:
    ended = scripts.run(fault='raise ValueError("a spark flew")')
    cause = (
        "forward of micro-batch 2 at stage 1 (F2@1): layers.1 (Faulty) failed: "
        "ValueError: a spark flew"
    )
    assert ended.code == 1
    assert ended.of_rank(1) == cause
    assert ended.of_rank(0).startswith(f"rank 1 failed first: {cause}\n  (rank 0 was stopped")
    assert ended.errors.count('raise ValueError("a spark flew")') == 1
    # What the eye falls on.
    assert cause in ended.root_cause


def test_a_killed_rank_is_named_by_the_others(scripts: Scripts) -> None:
    ended = scripts.run(fault="os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.code == 1
    assert "no sign of life from rank 1: killed, crashed, hanging" in ended.of_rank(0)
    assert "at stage 0" in ended.of_rank(0)
    assert "Signal 9 (SIGKILL)" in ended.root_cause


def test_a_rank_that_hangs_in_torch_is_missed_after_the_deadline_and_ended(
    scripts: Scripts,
) -> None:
    store = "torch.distributed.distributed_c10d._get_default_store()"
    ended = scripts.run(
        fault=f'{store}.wait(["never written"], timedelta(minutes=9))',
        config={**CONFIG, "mesh": {"pipeline": 2, "device": "cpu", "timeout_seconds": 5}},
    )
    assert ended.code == 1
    first, *lines = ended.of_rank(0).splitlines()
    assert first.startswith("rank 1 did not come within mesh.timeout_seconds, and is alive")
    assert "mesh.timeout_seconds (5 s)" in first
    assert lines[0] == "  rank 1 stands at F2@1, in fault"
    assert re.match(r"      script.py, line \d+ in fault: .*never written", lines[1])
    # It could not be told; its own thread has ended it.
    assert ended.of_rank(1).startswith(first)
    assert first in ended.root_cause


def test_an_error_of_the_script_itself_on_one_rank_reaches_the_other(scripts: Scripts) -> None:
    ended = scripts.run(between_steps="1 / 0 if rank == 0 else None")
    assert ended.code == 1
    assert ended.of_rank(0) == "ZeroDivisionError: division by zero"
    assert ended.of_rank(1).startswith(
        "rank 0 failed first: the script: ZeroDivisionError: division by zero"
    )
    assert ended.errors.count("1 / 0 if rank == 0") == 1


def test_a_script_that_ends_while_its_checkpoint_is_written_leaves_it_whole(
    scripts: Scripts, tmp_path: Path
) -> None:
    save = f"engine.save_checkpoint({str(tmp_path / 'saved')!r})"
    ended = scripts.run(between_steps=save, config={**CONFIG, "checkpoint": {"async": True}})
    assert ended.code == 0
    assert newest(tmp_path / "saved") == "global_step2"


def test_ctrl_c_on_one_rank_ends_both_without_a_trace(scripts: Scripts) -> None:
    ended = scripts.run(fault="os.kill(os.getpid(), signal.SIGINT); time.sleep(1)")
    assert ended.code == 1
    assert ended.of_rank(1) == "KeyboardInterrupt"
    assert ended.of_rank(0).startswith("rank 1 failed first: train_batch: KeyboardInterrupt")
    assert "Traceback" not in ended.errors.split("torch/distributed")[0]


def test_a_config_that_cannot_be_read_is_told_by_every_rank(scripts: Scripts) -> None:
    ended = scripts.run(config='{"train_batch_size": 8,,}')
    assert ended.code == 1
    assert "config.json is not JSON: line 1" in ended.of_rank(0)
    assert ended.of_rank(0) == ended.of_rank(1)
    assert "Traceback" not in ended.errors.split("torch/distributed")[0]


def test_without_torchrun_the_rank_that_holds_the_store_stays_until_all_have_read_it(
    scripts: Scripts,
) -> None:
    first, second = scripts.run_without_torchrun(fault='raise ValueError("a spark flew")')
    assert (first.code, second.code) == (1, 1)
    assert first.of_rank(0).startswith("rank 1 failed first: forward of micro-batch 2 at stage 1")
    assert "layers.1 (Faulty) failed: ValueError: a spark flew" in second.of_rank(1)


def test_without_torchrun_the_loss_of_the_store_ends_the_others(scripts: Scripts) -> None:
    first, second = scripts.run_without_torchrun(
        between_steps="os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else None"
    )
    assert first.code == -signal.SIGKILL
    assert second.code == 1
    assert second.of_rank(1).startswith("train_batch: all_reduce of 1 int64 over all ranks 0, 1")
    assert "the store of the ranks, which is in rank 0 unless torchrun has it, is gone" in (
        second.of_rank(1)
    )


@pytest.mark.sweep
def test_four_ranks_end_with_the_cause_of_the_one_that_failed(scripts: Scripts) -> None:
    config = {**CONFIG, "mesh": {**CONFIG["mesh"], "data": 2}}  # type: ignore[dict-item]
    ended = scripts.run(fault='raise ValueError("a spark flew")', config=config, ranks=4)
    assert ended.code == 1
    assert "ValueError: a spark flew" in ended.root_cause


KILLER = (
    "type('Killer', (torch.utils.data.Dataset,), {'__len__': lambda self: 4, "
    "'__getitem__': lambda self, i: os.kill(os.getpid(), signal.SIGKILL)})()"
)


@pytest.mark.sweep
def test_a_worker_process_of_a_dataloader_that_is_killed_is_told_by_all(scripts: Scripts) -> None:
    ended = scripts.run(
        between_steps=f"rank == 1 and [*torch.utils.data.DataLoader({KILLER}, num_workers=1)]"
    )
    assert ended.code == 1
    assert ended.of_rank(1).startswith("RuntimeError: DataLoader worker (pid")
    assert ended.of_rank(0).startswith(
        "rank 1 failed first: the script: RuntimeError: DataLoader worker (pid"
    )


@pytest.mark.sweep
def test_a_crash_in_c_shows_the_line_that_led_to_it(scripts: Scripts) -> None:
    ended = scripts.run(fault="os.kill(os.getpid(), signal.SIGBUS)")
    assert ended.code == 1
    assert "no sign of life from rank 1" in ended.of_rank(0)
    assert "Fatal Python error: Bus error" in ended.errors
    assert re.search(r"script.py\", line \d+ in fault", ended.errors)

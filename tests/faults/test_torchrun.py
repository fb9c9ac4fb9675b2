"""Faults under torchrun itself, which restarts the ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.fault_injection import Fault
from tests.faults.fault_trials import EventLogs, FaultFreeRuns, Outcome
from tests.faults.table import ResultTable
from tests.faults.training import INTERVAL, Job

ROOT = Path(__file__).parents[2]

Case = tuple[str, str, int, int]  # action, place, rank, step


@pytest.mark.sweep
def test_ranks_that_torchrun_restarts_resume_from_the_newest_checkpoint(
    scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(case: Case) -> Outcome:
        action, place, rank, step = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        job = Job(str(folder), fault=Fault(action, place, rank, step))
        (folder / "job.json").write_text(job.to_json())
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node=2", "--max-restarts=1",
                str(ROOT / "tests/faults/training.py"), str(folder / "job.json"),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        logs = EventLogs(job)
        assert len(logs.started_at) == 2, done.stderr
        assert logs.losses == fault_free.of(Job(job.folder)).losses
        assert logs.digests == fault_free.of(Job(job.folder)).digests
        assert logs.started_at[-1] == step - step % INTERVAL
        return Outcome(logs.repeated, None)

    cases = [("kill", "optimizer", 0, 5), ("kill", "layer backward", 1, 4), ("raise", "loss", 1, 3)]
    results.check_all(
        "torchrun --max-restarts, with a kill or an exception", cases, check, at_once=1
    )

"""The same under torchrun itself: it starts the ranks again, and they go on by themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.plant import Fault
from tests.faults.story import Books, Outcome, Undisturbed
from tests.faults.table import Ledger
from tests.faults.training import INTERVAL, Job

ROOT = Path(__file__).parents[2]

Case = tuple[str, str, int, int]  # action, room, rank, step


@pytest.mark.sweep
def test_torchrun_starts_the_ranks_again_and_they_go_on_from_the_newest_checkpoint(
    scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(case: Case) -> Outcome:
        action, room, rank, step = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        job = Job(str(folder), fault=Fault(action, room, rank, step))
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
        books = Books(job)
        assert len(books.began) == 2, done.stderr
        assert books.losses == undisturbed.of(Job(job.folder)).losses
        assert books.digests == undisturbed.of(Job(job.folder)).digests
        assert books.began[-1] == step - step % INTERVAL
        return Outcome(books.repeated, None)

    cases = [("kill", "optimizer", 0, 5), ("kill", "layer backward", 1, 4), ("raise", "loss", 1, 3)]
    ledger.each("torchrun --max-restarts, with a kill or an exception", cases, check, at_once=1)

"""A full disk ends all ranks with one error; the run resumes when there is space."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fault_trials import FaultFreeRuns, Outcome, run_with_fault
from tests.faults.launch_runs import Ended
from tests.faults.table import ResultTable
from tests.faults.training import Job


def mount(disk: Path, size: int, *options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={size}"]), "tmpfs"]
    return not subprocess.run([*command, str(disk)], capture_output=True, check=False).returncode


@pytest.fixture
def disk(scratch: Path) -> Iterator[Path]:
    """A small tmpfs; mounting it needs root."""
    disk = scratch / "disk"
    disk.mkdir()
    if not mount(disk, 2**20):
        pytest.skip("mounting a tmpfs is not permitted here; tests/ranks limits file sizes instead")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def size_of(folder: Path) -> int:
    pages = (-(-path.stat().st_size // 4096) + 1 for path in folder.rglob("*"))
    return 4096 * sum(pages)


@pytest.mark.parametrize(
    "shares",
    [[0.5], pytest.param([0.01, 0.2, 0.4, 0.6, 0.8], marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_full_disk_ends_all_ranks_and_the_run_resumes_when_there_is_space(
    shares: list[float], disk: Path, scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    """Full within the third checkpoint, while the two earlier ones are kept."""
    fault_free.of(Job(str(scratch)))
    one = size_of(fault_free.folder / "0/run/global_step8")

    def check(share: float) -> Outcome:
        folder, saves = scratch / str(share), disk / str(share)
        folder.mkdir()
        for old in disk.iterdir():
            subprocess.run(["rm", "-r", str(old)], check=True)
        assert mount(disk, int(one * (2 + share)), "remount")

        def full(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)
            (message,) = ended.printed
            assert message.startswith("error: rank 0: could not save checkpoint 'global_step6'")
            assert "No space left on device" in message, str(ended)
            assert "the earlier checkpoints are unchanged" in message, str(ended)

        job = Job(str(folder), saves=str(saves))
        return run_with_fault(
            job,
            fault_free,
            full,
            between=lambda: mount(disk, 2**24, "remount") and None,
            must_happen=False,
        )

    results.check_all("a full disk", shares, check, at_once=1)

"""The disk is full: one clear error on every rank, and the run goes on when there is room."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.launch import Ended
from tests.faults.story import Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import Job


def mount(disk: Path, size: int, *options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={size}"]), "tmpfs"]
    return not subprocess.run([*command, str(disk)], capture_output=True, check=False).returncode


@pytest.fixture
def disk(scratch: Path) -> Iterator[Path]:
    """A small disk, as root can make one."""
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
def test_a_full_disk_ends_all_ranks_and_the_run_goes_on_when_there_is_room(
    shares: list[float], disk: Path, scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    """Full at any part of a third checkpoint, while the two before it are kept."""
    undisturbed.of(Job(str(scratch)))
    one = size_of(undisturbed.folder / "0/run/global_step8")

    def check(share: float) -> Outcome:
        folder, saves = scratch / str(share), disk / str(share)
        folder.mkdir()
        for old in disk.iterdir():
            subprocess.run(["rm", "-r", str(old)], check=True)
        assert mount(disk, int(one * (2 + share)), "remount")

        def full(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)
            for rank in range(2):
                words = ended.last_words(rank)
                assert words.startswith("could not save checkpoint 'global_step6'"), str(ended)
                assert "No space left on device" in words, str(ended)
                assert "the checkpoints before it are whole" in words, str(ended)

        job = Job(str(folder), saves=str(saves))
        return suffer(
            job,
            undisturbed,
            full,
            between=lambda: mount(disk, 2**24, "remount") and None,
            must_strike=False,
        )

    ledger.each("a disk that is full", shares, check, at_once=1)

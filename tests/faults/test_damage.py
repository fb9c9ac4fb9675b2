"""If a file of the newest checkpoint is damaged or missing, the previous one is loaded."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import launch_runs
from tests.faults.fault_trials import EventLogs, FaultFreeRuns, Outcome
from tests.faults.table import ResultTable
from tests.faults.training import INTERVAL, STEPS, Job


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncate": truncate,
    "flip": flip,
    "delete": delete,
}
POINTER = "latest"

Case = tuple[str, str, int]  # file, damage, seed


def files_of(checkpoint: Path) -> list[str]:
    found = (path for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path.relative_to(checkpoint).as_posix() for path in found)


@pytest.mark.parametrize(
    "seeds", [0, pytest.param(3, marks=pytest.mark.sweep)], ids=["some", "all"]
)
def test_after_damage_to_the_newest_checkpoint_the_previous_one_is_loaded(
    seeds: int, scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    wanted = fault_free.of(Job(str(scratch)))
    whole = fault_free.folder / "0"
    files = files_of(whole / f"run/global_step{STEPS}")
    cases = [(file, damage, seed) for file in files for damage in DAMAGES for seed in range(seeds)]
    if not seeds:
        cases = [(file, "flip", at) for at, file in enumerate(files)]

    def check(case: Case) -> Outcome:
        file, damage, seed = case
        folder = scratch / f"{file.replace('/', '-')}-{damage}-{seed}"
        shutil.copytree(whole, folder)
        job = Job(str(folder))
        rng = random.Random(f"{case}")
        DAMAGES[damage](job.saved_in / f"global_step{STEPS}" / file, rng)
        ended = launch_runs.run(job)
        assert (ended.codes, ended.left) == ([0, 0], []), str(ended)
        assert f"global_step{STEPS}" in ended.texts[0], str(ended)
        assert "WARNING" in ended.texts[0], str(ended)
        logs = EventLogs(job)
        assert logs.started_at[-1] == STEPS - INTERVAL, str(ended)
        assert logs.losses == wanted.losses
        assert logs.digests == wanted.digests
        return Outcome(logs.repeated, None)

    results.check_all(
        "a file of the newest checkpoint is truncated, changed or deleted", cases, check
    )


@pytest.mark.parametrize("damage", [*DAMAGES])
def test_a_run_resumes_after_damage_to_the_pointer(
    damage: str, scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    wanted = fault_free.of(Job(str(scratch)))

    def check(damage: str) -> Outcome:
        folder = scratch / damage
        shutil.copytree(fault_free.folder / "0", folder)
        job = Job(str(folder))
        DAMAGES[damage](job.saved_in / POINTER, random.Random(damage))
        ended = launch_runs.run(job)
        assert (ended.codes, ended.left) == ([0, 0], []), str(ended)
        logs = EventLogs(job)
        assert logs.losses == wanted.losses
        assert logs.digests == wanted.digests
        return Outcome(logs.repeated, None)

    results.check_all("the pointer to the newest checkpoint is damaged", [damage], check)

"""kill -9 of any rank at any time: the others end and name it, and the run resumes exactly."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault_injection import Fault
from tests.faults.fault_trials import FaultFreeRuns, Outcome, run_with_fault
from tests.faults.launch_runs import Ended
from tests.faults.table import ResultTable
from tests.faults.training import INTERVAL, MESHES, STEPS, Job

WHEN = {
    "start": "kill -9 of a rank while the run starts",
    "step": "kill -9 of a rank, at any moment of a step",
    "save": "kill -9 of a rank, at any moment of a save",
}


def random_kill(when: str, seed: int, folder: Path, meshes: list[str]) -> Job:
    """Return a job whose rank, place and time of the kill follow from the seed."""
    rng = random.Random(f"{when} {seed}")
    folder.mkdir()
    job = Job(str(folder), rng.choice(meshes))
    steps = {"start": [0], "step": range(STEPS), "save": range(INTERVAL, STEPS + 1, INTERVAL)}
    fault = Fault(
        "kill",
        when,
        rank=rng.randrange(job.world_size),
        step=rng.choice(steps[when]),
        fraction=rng.uniform(0.0, 0.8 if when == "start" else 1.1),
    )
    background = {"checkpoint": {"async": rng.random() < 0.5}}
    return Job(job.folder, job.mesh, background, fault=fault)


def killed(place: str, victim: int) -> Callable[[Ended], None]:
    """Return a check that all ranks that had not ended before name the killed rank."""

    def check(ended: Ended) -> None:
        if ended.codes[victim] != -9:
            return  # it had ended before
        for rank, code in enumerate(ended.codes):
            if rank == victim or code == 0:
                continue
            if place == "start":
                # The process group and the signal handler may not exist yet.
                assert code in (1, -15), str(ended)
            else:
                assert code == 1, str(ended)
                assert f"no response from rank {victim}" in ended.details[rank], str(ended)
        if place != "start" and set(ended.codes) != {-9, 0}:
            assert re.match(
                rf"error: rank {victim} \(pid \d+ on \S+\) disappeared (in|after) step \d.*; "
                r"(newest checkpoint: global_step\d|no checkpoint yet); "
                r"start again with the same command; details of every rank: .*errors.log",
                ended.printed[0],
            ), str(ended)

    return check


def run_kill(job: Job, fault_free: FaultFreeRuns) -> Outcome | None:
    assert job.fault is not None
    assert job.fault.rank is not None
    check = killed(job.fault.place, job.fault.rank)
    outcome = run_with_fault(job, fault_free, check, must_happen=False)
    # If the run had ended before the time of the kill, nothing was tested.
    return outcome if outcome.seconds is not None else None


QUICK = [("save", range(2))]
LONG = [("start", range(7)), ("step", range(25)), ("save", range(2, 25))]


@pytest.mark.parametrize(
    ("when", "seeds", "meshes"),
    [
        *((when, seeds, ["pipeline", "zero"]) for when, seeds in QUICK),
        *(pytest.param(w, s, list(MESHES), marks=pytest.mark.sweep) for w, s in LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_resumes_exactly_after_a_kill_at_any_time(
    when: str,
    seeds: Any,
    meshes: list[str],
    scratch: Path,
    results: ResultTable,
    fault_free: FaultFreeRuns,
) -> None:
    def check(seed: int) -> Outcome | None:
        return run_kill(random_kill(when, seed, scratch / str(seed), meshes), fault_free)

    results.check_all(WHEN[when], seeds, check)


# After this many calls of a function in the third save, which ends with deleting the first one.
QUICK_POINTS = [("fsync", 1, 1), ("rename", 1, 0)]
POINTS = [
    *((name, skip, 0) for name, most in
      {"mkdir": 2, "fsync": 14, "rename": 3, "unlink": 6, "rmdir": 2}.items()
      for skip in range(most)),
    *(("fsync", skip, 1) for skip in range(3)),
]  # fmt: skip


@pytest.mark.parametrize(
    "points", [QUICK_POINTS, pytest.param(POINTS, marks=pytest.mark.sweep)], ids=["some", "all"]
)
def test_a_run_resumes_exactly_after_a_kill_before_any_file_system_call_of_a_save(
    points: list[tuple[str, int, int]],
    scratch: Path,
    results: ResultTable,
    fault_free: FaultFreeRuns,
) -> None:
    """While files are written or deleted, before each rename, before the pointer is written."""

    def check(point: tuple[str, int, int]) -> Outcome | None:
        name, skip, rank = point
        folder = scratch / f"{name} {skip} {rank}"
        folder.mkdir()
        fault = Fault("kill", f"disk: {name}", rank, step=6, skip=skip)
        background = {"checkpoint": {"async": skip % 2 == 1}}
        return run_kill(Job(str(folder), changes=background, fault=fault), fault_free)

    results.check_all("kill -9 before a single file system call of a save", points, check)

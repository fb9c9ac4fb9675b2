"""kill -9 of any rank at any moment: the others end and name it, and the run goes on exactly."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launch import Ended
from tests.faults.plant import Fault
from tests.faults.story import Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import INTERVAL, MESHES, STEPS, Job

WHEN = {
    "start": "kill -9 of a rank while the run starts",
    "step": "kill -9 of a rank, at any moment of a step",
    "save": "kill -9 of a rank, at any moment of a save",
}


def random_kill(when: str, seed: int, folder: Path, meshes: list[str]) -> Job:
    """Whom, where and when: all from the seed."""
    chance = random.Random(f"{when} {seed}")
    folder.mkdir()
    job = Job(str(folder), chance.choice(meshes))
    steps = {"start": [0], "step": range(STEPS), "save": range(INTERVAL, STEPS + 1, INTERVAL)}
    fault = Fault(
        "kill",
        when,
        rank=chance.randrange(job.world_size),
        step=chance.choice(steps[when]),
        fraction=chance.uniform(0.0, 0.8 if when == "start" else 1.1),
    )
    background = {"checkpoint": {"async": chance.random() < 0.5}}
    return Job(job.folder, job.mesh, background, fault=fault)


def killed(room: str, victim: int) -> Callable[[Ended], None]:
    """The killed rank is named by all that did not come to their end before."""

    def check(ended: Ended) -> None:
        if ended.codes[victim] != -9:
            return  # it had ended before
        for rank, code in enumerate(ended.codes):
            if rank == victim or code == 0:
                continue
            words = ended.last_words(rank)
            if room == "start":
                # Not all have met yet, nor come as far as to heed a signal.
                assert (code, bool(words)) in ((1, True), (-15, False)), str(ended)
            else:
                assert code == 1, str(ended)
                assert f"no sign of life from rank {victim}" in words, str(ended)

    return check


def survive(job: Job, undisturbed: Undisturbed) -> Outcome | None:
    assert job.fault is not None
    assert job.fault.rank is not None
    check = killed(job.fault.room, job.fault.rank)
    outcome = suffer(job, undisturbed, check, must_strike=False)
    # All had been done before the time came: nothing was tried.
    return outcome if outcome.seconds is not None else None


QUICK = [("start", range(1)), ("step", range(2)), ("save", range(2))]
LONG = [("start", range(1, 7)), ("step", range(2, 25)), ("save", range(2, 25))]


@pytest.mark.parametrize(
    ("when", "seeds", "meshes"),
    [
        *((when, seeds, ["pipeline", "zero"]) for when, seeds in QUICK),
        *(pytest.param(w, s, list(MESHES), marks=pytest.mark.sweep) for w, s in LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_goes_on_exactly_after_a_kill_at_any_moment(
    when: str,
    seeds: Any,
    meshes: list[str],
    scratch: Path,
    ledger: Ledger,
    undisturbed: Undisturbed,
) -> None:
    def check(seed: int) -> Outcome | None:
        return survive(random_kill(when, seed, scratch / str(seed), meshes), undisturbed)

    ledger.each(WHEN[when], seeds, check)


# Before so many calls of one kind, in the third save, after which the first one is deleted.
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
def test_a_run_goes_on_exactly_after_a_kill_before_any_call_to_the_disk_in_a_save(
    points: list[tuple[str, int, int]], scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    """While files are written, before each rename, before the pointer, while old ones go."""

    def check(point: tuple[str, int, int]) -> Outcome | None:
        name, skip, rank = point
        folder = scratch / f"{name} {skip} {rank}"
        folder.mkdir()
        fault = Fault("kill", f"disk: {name}", rank, step=6, skip=skip)
        background = {"checkpoint": {"async": skip % 2 == 1}}
        return survive(Job(str(folder), changes=background, fault=fault), undisturbed)

    ledger.each("kill -9 before a single call to the disk in a save", points, check)

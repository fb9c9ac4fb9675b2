"""Files of the newest checkpoint are cut, changed by a bit, or gone: the one before it is taken."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import launch
from tests.faults.story import Books, Outcome, Undisturbed
from tests.faults.table import Ledger
from tests.faults.training import INTERVAL, STEPS, Job


def cut(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    data[at] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def delete(file: Path, chance: random.Random) -> None:
    file.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": cut,
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
def test_damage_to_any_file_of_the_newest_checkpoint_costs_the_steps_since_the_one_before(
    seeds: int, scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    wanted = undisturbed.of(Job(str(scratch)))
    whole = undisturbed.folder / "0"
    files = files_of(whole / f"run/global_step{STEPS}")
    cases = [(file, damage, seed) for file in files for damage in DAMAGES for seed in range(seeds)]
    if not seeds:
        cases = [(file, "flip", at) for at, file in enumerate(files)]

    def check(case: Case) -> Outcome:
        file, damage, seed = case
        folder = scratch / f"{file.replace('/', '-')}-{damage}-{seed}"
        shutil.copytree(whole, folder)
        job = Job(str(folder))
        chance = random.Random(f"{case}")
        DAMAGES[damage](job.saved_in / f"global_step{STEPS}" / file, chance)
        ended = launch.run(job)
        assert (ended.codes, ended.left) == ([0, 0], []), str(ended)
        assert f"global_step{STEPS}" in ended.texts[0], str(ended)
        assert "WARNING" in ended.texts[0], str(ended)
        books = Books(job)
        assert books.began[-1] == STEPS - INTERVAL, str(ended)
        assert books.losses == wanted.losses
        assert books.digests == wanted.digests
        return Outcome(books.repeated, None)

    ledger.each("a file of the newest checkpoint is cut, changed or deleted", cases, check)


@pytest.mark.parametrize("damage", [*DAMAGES])
def test_damage_to_the_pointer_costs_nothing_or_two_saves_at_most(
    damage: str, scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    wanted = undisturbed.of(Job(str(scratch)))

    def check(damage: str) -> Outcome:
        folder = scratch / damage
        shutil.copytree(undisturbed.folder / "0", folder)
        job = Job(str(folder))
        DAMAGES[damage](job.saved_in / POINTER, random.Random(damage))
        ended = launch.run(job)
        assert (ended.codes, ended.left) == ([0, 0], []), str(ended)
        books = Books(job)
        assert books.losses == wanted.losses
        assert books.digests == wanted.digests
        return Outcome(books.repeated, None)

    ledger.each("the pointer to the newest checkpoint is damaged", [damage], check)

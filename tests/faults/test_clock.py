"""The time of day jumps: nobody cares."""

import ast
import os
import random
from pathlib import Path

from tests.faults.plant import Fault
from tests.faults.story import Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import Job

HOUSE = Path(__file__).parents[2] / "pipemega"


def test_a_clock_that_jumps_changes_neither_the_run_nor_which_checkpoint_is_the_newest(
    scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    """By hours, both ways, at every look, on each rank by others; and the times of all files."""

    def age_at_random() -> None:
        chance = random.Random(0)
        for path in sorted((scratch / "run").rglob("*")):
            when = chance.uniform(1e9, 2e9)
            os.utime(path, (when, when))

    def check(step: int) -> Outcome:
        fault = Fault("raise", "optimizer", 1, step)
        job = Job(str(scratch), fault=fault, jumping_clock=True)
        return suffer(job, undisturbed, between=age_at_random)

    ledger.each("a clock that jumps by hours, and an exception", [7], check)


# When something was, for people to read.
SHOWN = {"checkpoint/store.py", "cli/checkpoint.py", "launch.py"}


def test_no_deadline_and_no_order_hangs_on_the_time_of_day() -> None:
    """The house asks only clocks that go forward."""
    of_day = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    found = [
        f"{path.relative_to(HOUSE)}:{node.lineno}"
        for path in sorted(HOUSE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in of_day
        and path.relative_to(HOUSE).as_posix() not in SHOWN
    ]
    assert found == []

"""Jumps of the time of day have no effect."""

import ast
import os
import random
from pathlib import Path

import pytest

from tests.faults.fault_injection import Fault
from tests.faults.fault_trials import FaultFreeRuns, Outcome, run_with_fault
from tests.faults.table import ResultTable
from tests.faults.training import Job

PACKAGE = Path(__file__).parents[2] / "pipemega"


@pytest.mark.sweep
def test_clock_jumps_change_neither_the_run_nor_the_choice_of_the_newest_checkpoint(
    scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    """By hours in both directions, differently on each rank; file times are random, too."""

    def set_random_times() -> None:
        rng = random.Random(0)
        for path in sorted((scratch / "run").rglob("*")):
            when = rng.uniform(1e9, 2e9)
            os.utime(path, (when, when))

    def check(step: int) -> Outcome:
        fault = Fault("raise", "optimizer", 1, step)
        job = Job(str(scratch), fault=fault, jumping_clock=True)
        return run_with_fault(job, fault_free, between=set_random_times)

    results.check_all("a clock that jumps by hours, and an exception", [7], check)


# These only show times to the user. wandb_sink numbers the points of a wandb run by time.
SHOWN = {
    "checkpoint/save_load.py",
    "cli/checkpoint.py",
    "engine/run/run_folder.py",
    "fault_tolerance/final_report.py",
    "monitor/wandb_sink.py",
    "storage/locks.py",
}


def test_no_timeout_and_no_order_depends_on_the_time_of_day() -> None:
    """The package uses monotonic clocks only."""
    of_day = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in of_day
        and path.relative_to(PACKAGE).as_posix() not in SHOWN
    ]
    assert found == []

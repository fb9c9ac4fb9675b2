"""A rank that hangs outside of the plan's instructions: all ranks end after the timeout.

Hangs in each kind of instruction: tests/ranks/fault_tolerance/test_deadlock_report.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault_injection import Fault
from tests.faults.fault_trials import FaultFreeRuns, Outcome, run_with_fault
from tests.faults.launch_runs import Ended
from tests.faults.table import ResultTable
from tests.faults.training import Job

TIMEOUT = 3.0

Case = tuple[str, str, str, int]  # mesh, action, place, rank

SOME: list[Case] = [
    ("zero", "hang", "gradient reduction", 1),
    ("pipeline", "hang in C", "checkpoint writer", 1),
]
PLACES = [
    "layer forward",
    "gradient reduction",
    "all-reduce of the step",
    "gathering of parameters",
    "optimizer",
    "data set",
    "collate",
    "checkpoint writer",
]


def changes(case: Case) -> dict[str, Any]:
    """The point-to-point waits for a tied parameter use the timeout that is set at start-up."""
    tied = case[0] == "pipeline" and case[2] == "gradient reduction"
    return {"mesh": {"timeout_seconds": 10}} if tied else {}


ALL: list[Case] = [
    *(
        (mesh, "hang", place, (at + offset) % 2)
        for offset, mesh in enumerate(("pipeline", "zero"))
        for at, place in enumerate(PLACES)
    ),
    ("pipeline", "hang", "monitor sink", 0),
    ("tensor", "hang", "layer backward", 1),
    ("pipeline", "hang in C", "checkpoint writer", 0),
    *(("pipeline", "hang in C", place, 0) for place in ("optimizer", "all-reduce of the step")),
    *(("zero", "freeze", place, 1) for place in ("optimizer", "data set", "checkpoint writer")),
]


@pytest.mark.sweep
@pytest.mark.parametrize("action", ["hang", "hang in C"])
def test_a_hanging_background_writer_ends_all_ranks_at_the_next_save(
    action: str, scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(rank: int) -> Outcome:
        folder = scratch / str(rank)
        folder.mkdir()
        job = Job(
            str(folder),
            changes={"checkpoint": {"async": True}},
            fault=Fault(action, "checkpoint writer", rank, step=4),
            timeout=TIMEOUT,
        )

        def ended_by_all(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)

        return run_with_fault(job, fault_free, ended_by_all)

    results.check_all(
        f"a background writer of checkpoints that hangs (timeout {TIMEOUT:g} s)", [0, 1], check
    )


@pytest.mark.parametrize(
    "where",
    [SOME, pytest.param([c for c in ALL if c not in SOME], marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_hanging_rank_is_named_after_the_timeout_and_the_run_resumes_exactly(
    where: list[Case], scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(case: Case) -> Outcome:
        mesh, action, place, rank = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        step = 4 if place == "checkpoint writer" else 3
        fault = Fault(action, place, rank, step)
        job = Job(str(folder), mesh, changes(case), fault, timeout=TIMEOUT)

        def named(ended: Ended) -> None:
            assert ended.codes[1 - rank] == 1, str(ended)
            message = ended.details[1 - rank]
            if action == "freeze":
                assert f"no response from rank {rank}: killed, crashed" in message, str(ended)
            else:
                # The watchdog of the hanging rank has published its location.
                alive = f"rank {rank} is alive but did not respond within mesh.timeout_seconds"
                assert alive in message, str(ended)
                assert f"  rank {rank} is " in message, str(ended)
            assert ended.codes[rank] == (-9 if action == "freeze" else 1), str(ended)

        frozen = (rank,) if action == "freeze" else ()
        return run_with_fault(job, fault_free, named, frozen=frozen)

    results.check_all(f"a rank that hangs (timeout {TIMEOUT:g} s)", where, check)

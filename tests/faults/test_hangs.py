"""A rank that does not go on, outside the plan's instructions: all end after the deadline.

Hangs in each kind of instruction: tests/ranks/test_standstill.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.launch import Ended
from tests.faults.plant import Fault
from tests.faults.story import Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import Job

DEADLINE = 3.0

Case = tuple[str, str, str, int]  # mesh, action, room, rank

SOME: list[Case] = [
    ("zero", "hang", "gradient reduction", 1),
    ("pipeline", "hang in C", "checkpoint writer", 1),
]
ROOMS = [
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
    """Waits for a tied parameter are those between two ranks, whose deadline is there from the
    start."""
    tied = case[0] == "pipeline" and case[2] == "gradient reduction"
    return {"mesh": {"timeout_seconds": 10}} if tied else {}


ALL: list[Case] = [
    *(
        (mesh, "hang", room, (at + place) % 2)
        for place, mesh in enumerate(("pipeline", "zero"))
        for at, room in enumerate(ROOMS)
    ),
    ("pipeline", "hang", "monitor sink", 0),
    ("tensor", "hang", "layer backward", 1),
    ("pipeline", "hang in C", "checkpoint writer", 0),
    *(("pipeline", "hang in C", room, 0) for room in ("optimizer", "all-reduce of the step")),
    *(("zero", "freeze", room, 1) for room in ("optimizer", "data set", "checkpoint writer")),
]


@pytest.mark.sweep
@pytest.mark.parametrize("action", ["hang", "hang in C"])
def test_a_writer_in_the_background_that_hangs_is_missed_at_the_next_save(
    action: str, scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(rank: int) -> Outcome:
        folder = scratch / str(rank)
        folder.mkdir()
        job = Job(
            str(folder),
            changes={"checkpoint": {"async": True}},
            fault=Fault(action, "checkpoint writer", rank, step=4),
            deadline=DEADLINE,
        )

        def ended_by_all(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)

        return suffer(job, undisturbed, ended_by_all)

    ledger.each(f"a writer in the background that hangs (deadline {DEADLINE:g} s)", [0, 1], check)


@pytest.mark.parametrize(
    "where",
    [SOME, pytest.param([c for c in ALL if c not in SOME], marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_rank_that_hangs_is_missed_after_the_deadline_and_the_run_goes_on_exactly(
    where: list[Case], scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(case: Case) -> Outcome:
        mesh, action, room, rank = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        step = 4 if room == "checkpoint writer" else 3
        fault = Fault(action, room, rank, step)
        job = Job(str(folder), mesh, changes(case), fault, deadline=DEADLINE)

        def missed(ended: Ended) -> None:
            assert ended.codes[1 - rank] == 1, str(ended)
            words = ended.last_words(1 - rank)
            if action == "freeze":
                assert f"no sign of life from rank {rank}: killed, crashed" in words, str(ended)
            else:
                # A thread of the rank that hangs answers for it.
                assert f"rank {rank} did not come within mesh.timeout_seconds" in words, str(ended)
                assert f"rank {rank} stands " in words, str(ended)
            assert ended.codes[rank] == (-9 if action == "freeze" else 1), str(ended)

        frozen = (rank,) if action == "freeze" else ()
        return suffer(job, undisturbed, missed, frozen=frozen)

    ledger.each(f"a rank that hangs (deadline {DEADLINE:g} s)", where, check)

"""A cluster takes the machine away: the step is finished, the run saved, and nothing is lost."""

from pathlib import Path

import pytest

from tests.faults.launch import Ended
from tests.faults.plant import Fault
from tests.faults.story import Books, Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import Job

Case = tuple[str, str, int | None, int]  # mesh, signal, rank or all, after how many steps

SOME: list[Case] = [("pipeline", "SIGTERM", None, 3), ("zero", "SIGUSR1", 1, 4)]
ALL: list[Case] = [
    (mesh, name, rank, step)
    for name in ("SIGTERM", "SIGUSR1", "SIGINT")
    for mesh, rank, step in (
        ("pipeline", None, 0),
        ("pipeline", 0, 4),
        ("zero", None, 3),
        ("zero", 1, 5),
        ("tensor", 1, 3),
    )
]


@pytest.mark.parametrize(
    "where",
    [SOME, pytest.param([c for c in ALL if c not in SOME], marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_signal_ends_the_run_in_order_and_loses_no_step(
    where: list[Case], scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(case: Case) -> Outcome:
        mesh, name, rank, step = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        job = Job(str(folder), mesh, fault=Fault(name, "step", rank, step, fraction=0.5))

        def in_order(ended: Ended) -> None:
            assert ended.codes == [0, 0], str(ended)
            books = Books(job)
            assert books.saved == books.done > step, str(ended)
            assert "saved" in ended.texts[0], str(ended)

        outcome = suffer(job, undisturbed, in_order)
        assert outcome.lost == 0
        return outcome

    ledger.each("SIGTERM, SIGUSR1 or Ctrl-C", where, check)

"""A cluster takes the machine away: the step is finished, the run saved, and nothing is lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import launch
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


def test_a_signal_in_the_second_life_of_a_run_is_not_taken_for_the_failure_of_the_first(
    scratch: Path, undisturbed: Undisturbed
) -> None:
    """The store of torchrun still holds why the first one ended; it used to be read, and exit 1."""
    store = launch.store_for_ranks()
    job = Job(str(scratch), fault=Fault("raise", "optimizer", 1, 3))
    assert launch.run(job, store).codes == [1, 1]
    ended = launch.run(replace(job, fault=Fault("SIGTERM", "step", None, 4, fraction=0.5)), store)
    assert ended.codes == [0, 0], str(ended)
    assert "stopped (SIGTERM on all ranks) after step 5" in ended.texts[0], str(ended)
    assert launch.run(replace(job, fault=None), store).codes == [0, 0]
    assert Books(job).losses == undisturbed.of(job).losses

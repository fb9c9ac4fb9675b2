"""Preemption: after a signal the step is finished and saved, and nothing is lost."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import launch_runs
from tests.faults.fault_injection import Fault
from tests.faults.fault_trials import EventLogs, FaultFreeRuns, Outcome, run_with_fault
from tests.faults.launch_runs import Ended
from tests.faults.table import ResultTable
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
def test_after_a_signal_the_run_saves_and_exits_with_0_and_loses_no_step(
    where: list[Case], scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(case: Case) -> Outcome:
        mesh, name, rank, step = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        job = Job(str(folder), mesh, fault=Fault(name, "step", rank, step, fraction=0.5))

        def saved_at_end(ended: Ended) -> None:
            assert ended.codes == [0, 0], str(ended)
            logs = EventLogs(job)
            assert logs.saved == logs.done > step, str(ended)
            assert "saved" in ended.texts[0], str(ended)

        outcome = run_with_fault(job, fault_free, saved_at_end)
        assert outcome.lost == 0
        return outcome

    results.check_all("SIGTERM, SIGUSR1 or Ctrl-C", where, check)


def test_a_signal_after_a_restart_is_not_taken_for_the_earlier_failure(
    scratch: Path, fault_free: FaultFreeRuns
) -> None:
    """torchrun's store still contains the failure of the first incarnation."""
    store = launch_runs.store_for_ranks()
    job = Job(str(scratch), fault=Fault("raise", "optimizer", 1, 3))
    assert launch_runs.run(job, store).codes == [1, 1]
    ended = launch_runs.run(
        replace(job, fault=Fault("SIGTERM", "step", None, 4, fraction=0.5)), store
    )
    assert ended.codes == [0, 0], str(ended)
    # On a busy machine the signal may come in the step after, and reach one rank first.
    assert re.search(
        r"stopped \(SIGTERM on (all ranks|rank [01])\) after step [567]", ended.texts[0]
    ), str(ended)
    assert launch_runs.run(replace(job, fault=None), store).codes == [0, 0]
    assert EventLogs(job).losses == fault_free.of(job).losses

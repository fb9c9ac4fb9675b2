"""A wandb that fails, hangs or is slow does not change the run."""

from pathlib import Path

import pytest

from tests.faults.fault_injection import Fault
from tests.faults.fault_trials import END_SECONDS, FaultFreeRuns, Outcome, run_with_fault
from tests.faults.launch_runs import Ended
from tests.faults.table import ResultTable
from tests.faults.training import Job

Case = tuple[str, str]  # action, method

SOME: list[Case] = [("raise", "log"), ("nap", "log")]
ALL: list[Case] = [
    *((action, method) for action in ("raise", "nap") for method in ("init", "login", "finish")),
    ("hang", "log"),
]
# At its end a run waits this long for its monitors: a quarter of mesh.timeout_seconds. A longer
# wait would let the other ranks time out.
CLOSING = 15.0


@pytest.mark.parametrize(
    "where",
    [SOME, pytest.param(ALL, marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_broken_wandb_does_not_stop_the_run(
    where: list[Case], scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(case: Case) -> Outcome:
        action, method = case
        folder = scratch / "-".join(case)
        folder.mkdir()

        def has_warning(ended: Ended) -> None:
            assert ended.codes == [0, 0], str(ended)
            if action == "raise":
                assert "wandb" in ended.texts[0], str(ended)
                assert "injected error" in ended.texts[0], str(ended)

        job = Job(
            str(folder),
            changes={"wandb": {"enabled": True}},
            fault=Fault(action, f"wandb: {method}"),
        )
        return run_with_fault(
            job, fault_free, has_warning, end_seconds=END_SECONDS + CLOSING * (action == "hang")
        )

    results.check_all("wandb that raises or hangs: the run continues", where, check)

"""wandb fails, or is slow, wherever it is called: the run trains on to the same end."""

from pathlib import Path

import pytest

from tests.faults.launch import Ended
from tests.faults.plant import Fault
from tests.faults.story import SOON, Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import Job

Case = tuple[str, str]  # action, method

SOME: list[Case] = [("raise", "log"), ("nap", "log")]
ALL: list[Case] = [
    *((action, method) for action in ("raise", "nap") for method in ("init", "login", "finish")),
    ("hang", "log"),
]
# A run that is over waits so long for what a monitor still has to write: a quarter of what ranks
# wait for each other. It used to be as long as that, and all ranks but the first gave up.
CLOSING = 15.0


@pytest.mark.parametrize(
    "where",
    [SOME, pytest.param(ALL, marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_wandb_stops_no_run(
    where: list[Case], scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(case: Case) -> Outcome:
        action, method = case
        folder = scratch / "-".join(case)
        folder.mkdir()

        def said_so(ended: Ended) -> None:
            assert ended.codes == [0, 0], str(ended)
            if action == "raise":
                assert "wandb" in ended.texts[0], str(ended)
                assert "a spark flew" in ended.texts[0], str(ended)

        job = Job(
            str(folder),
            changes={"wandb": {"enabled": True}},
            fault=Fault(action, f"wandb: {method}"),
        )
        return suffer(job, undisturbed, said_so, soon=SOON + CLOSING * (action == "hang"))

    ledger.each("wandb that raises, or hangs: the run goes on", where, check)

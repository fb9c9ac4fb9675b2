"""An exception in any component ends all ranks with its cause, except in a monitor."""

from pathlib import Path

import pytest

from tests.faults.fault_injection import INJECTED, PLACES, Fault
from tests.faults.fault_trials import FaultFreeRuns, Outcome, run_with_fault
from tests.faults.launch_runs import Ended
from tests.faults.table import ResultTable
from tests.faults.training import Job
from tests.sampling import some

# Only rank 0 has monitors; only the last stage has the loss.
ONLY_ON = {"monitor sink": (0,), "loss": (1,)}
STEP_OF = {"checkpoint writer": 4}

Case = tuple[str, str, int]  # mesh, place, rank


def cases(meshes: list[str]) -> list[Case]:
    return [
        (mesh, place, rank)
        for mesh in meshes
        for place in PLACES
        for rank in (0, 1)
        if mesh != "pipeline" or rank in ONLY_ON.get(place, (0, 1))
        if place != "monitor sink" or rank == 0
    ]


# A component of each kind.
SOME: list[Case] = [
    ("pipeline", "layer forward", 0),
    ("pipeline", "loss", 1),
    ("pipeline", "data set", 1),
    ("pipeline", "all-reduce of the step", 0),
    ("pipeline", "optimizer", 1),
    ("pipeline", "monitor sink", 0),
    ("pipeline", "checkpoint writer", 0),
]


@pytest.mark.parametrize(
    "where",
    [
        SOME,
        pytest.param(
            [case for case in cases(["pipeline", "zero"]) if case not in SOME],
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["some", "all"],
)
def test_an_exception_in_any_component_is_reported_by_all_ranks_and_the_run_resumes_exactly(
    where: list[Case], scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(case: Case) -> Outcome:
        mesh, place, rank = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        fault = Fault("raise", place, rank, STEP_OF.get(place, 3))

        def ended_with_the_cause(ended: Ended) -> None:
            if place == "monitor sink":
                assert ended.codes == [0, 0], str(ended)
                assert "is off for the rest of this run, which continues" in ended.texts[0]
                return
            assert ended.codes == [1, 1], str(ended)
            assert ended.printed[0].startswith(f"error: rank {rank}: "), str(ended)
            assert INJECTED in ended.printed[0], str(ended)
            assert INJECTED in ended.details[rank], str(ended)
            other = ended.details[1 - rank]
            assert other.startswith(f"rank {rank} failed first: "), str(ended)
            assert INJECTED in other.splitlines()[0], str(ended)

        return run_with_fault(Job(str(folder), mesh, fault=fault), fault_free, ended_with_the_cause)

    ends_run = [case for case in where if case[1] != "monitor sink"]
    results.check_all("an exception in a component", ends_run, check)
    results.check_all(
        "an exception in a monitor: the run continues",
        [case for case in where if case not in ends_run],
        check,
    )


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_an_exception_in_the_background_writer_ends_all_ranks_at_the_next_save(
    rank: int, scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(rank: int) -> Outcome:
        job = Job(
            str(scratch),
            changes={"checkpoint": {"async": True}},
            fault=Fault("raise", "checkpoint writer", rank, step=4),
        )

        def reported_by_all(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)
            assert INJECTED in ended.texts[rank], str(ended)
            assert f"rank {rank}" in ended.details[1 - rank].splitlines()[0], str(ended)

        return run_with_fault(job, fault_free, reported_by_all)

    results.check_all("an exception in the background writer of checkpoints", [rank], check)


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_a_failed_write_ends_all_ranks_with_the_same_error(
    rank: int, scratch: Path, results: ResultTable, fault_free: FaultFreeRuns
) -> None:
    def check(rank: int) -> Outcome:
        fault = Fault("refuse", "checkpoint writer", rank, step=4)

        def reported_by_all(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)
            (message,) = ended.printed
            assert message.startswith("error: rank 0: could not save checkpoint 'global_step4'")
            assert f"rank {rank}: Input/output error" in message, str(ended)
            assert "the earlier checkpoints are unchanged" in message

        return run_with_fault(Job(str(scratch), fault=fault), fault_free, reported_by_all)

    results.check_all("a disk on which a write fails", [rank], check)

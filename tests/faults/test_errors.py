"""An exception in any room, on any rank, ends all with its cause; one in a monitor ends nothing."""

from pathlib import Path

import pytest

from tests.faults.launch import Ended
from tests.faults.plant import ROOMS, SPARK, Fault
from tests.faults.story import Outcome, Undisturbed, suffer
from tests.faults.table import Ledger
from tests.faults.training import Job

# Rank 0 alone has monitors; the loss is where the last stage is.
ONLY_ON = {"monitor sink": (0,), "loss": (1,)}
STEP_OF = {"checkpoint writer": 4}

Case = tuple[str, str, int]  # mesh, room, rank


def cases(meshes: list[str]) -> list[Case]:
    return [
        (mesh, room, rank)
        for mesh in meshes
        for room in ROOMS
        for rank in (0, 1)
        if mesh != "pipeline" or rank in ONLY_ON.get(room, (0, 1))
        if room != "monitor sink" or rank == 0
    ]


# Each room once.
SOME: list[Case] = [
    ("pipeline", room, ONLY_ON.get(room, (at % 2,))[0]) for at, room in enumerate(ROOMS)
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
def test_an_exception_in_any_room_is_told_by_all_and_the_run_goes_on_exactly(
    where: list[Case], scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(case: Case) -> Outcome:
        mesh, room, rank = case
        folder = scratch / "-".join(map(str, case))
        folder.mkdir()
        fault = Fault("raise", room, rank, STEP_OF.get(room, 3))

        def ended_with_the_cause(ended: Ended) -> None:
            if room == "monitor sink":
                assert ended.codes == [0, 0], str(ended)
                assert "is off for the rest of this run, which goes on" in ended.texts[0]
                return
            assert ended.codes == [1, 1], str(ended)
            assert SPARK in ended.last_words(rank), str(ended)
            other = ended.last_words(1 - rank)
            assert other.startswith(f"rank {rank} failed first: "), str(ended)
            assert SPARK in other, str(ended)

        return suffer(Job(str(folder), mesh, fault=fault), undisturbed, ended_with_the_cause)

    rooms = [case for case in where if case[1] != "monitor sink"]
    ledger.each("an exception in a room", rooms, check)
    ledger.each(
        "an exception in a monitor: the run goes on",
        [case for case in where if case not in rooms],
        check,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_a_writer_in_the_background_ends_all_at_the_next_save(
    rank: int, scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(rank: int) -> Outcome:
        job = Job(
            str(scratch),
            changes={"checkpoint": {"async": True}},
            fault=Fault("raise", "checkpoint writer", rank, step=4),
        )

        def told(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)
            assert SPARK in ended.texts[rank], str(ended)
            assert f"rank {rank}" in ended.last_words(1 - rank), str(ended)

        return suffer(job, undisturbed, told)

    ledger.each("an exception in a writer in the background", [rank], check)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_refuses_ends_all_ranks_alike(
    rank: int, scratch: Path, ledger: Ledger, undisturbed: Undisturbed
) -> None:
    def check(rank: int) -> Outcome:
        fault = Fault("refuse", "checkpoint writer", rank, step=4)

        def said_by_all(ended: Ended) -> None:
            assert ended.codes == [1, 1], str(ended)
            for words in (ended.last_words(0), ended.last_words(1)):
                assert words.startswith("could not save checkpoint 'global_step4'"), str(ended)
                assert f"rank {rank}: Input/output error" in words, str(ended)
                assert "the checkpoints before it are whole" in words

        return suffer(Job(str(scratch), fault=fault), undisturbed, said_by_all)

    ledger.each("a disk that refuses a write", [rank], check)

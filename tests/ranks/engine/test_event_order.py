"""Training does the same things in the same order on each rank as in the stored lists.

A list in `tests/golden/events` has one line for each event of a run of `event_runs.py`; for what is
recorded see `event_recorder.py`. After an intended change of the order write the lists again, and
read their differences before the commit:

    PIPEMEGA_WRITE_EVENTS=1 pytest -m "sweep or not sweep" tests/ranks/engine/test_event_order.py
    git diff tests/golden/events
"""

import difflib
import os
from pathlib import Path

import pytest

from tests.ranks.engine.event_runs import RUNS, run
from tests.ranks.pool import RankPool

STORED = Path(__file__).parents[2] / "golden/events"
WRITES = os.environ.get("PIPEMEGA_WRITE_EVENTS") == "1"


def in_one_file(ranks: list[list[str]]) -> str:
    """Return the lists of all ranks; equal ones are stored once."""
    parts = []
    for events in dict.fromkeys(map(tuple, ranks)):
        names = [str(rank) for rank, found in enumerate(ranks) if tuple(found) == events]
        parts.append("\n".join([f"== rank {', '.join(names)}", *events, ""]))
    return "\n".join(parts)


def first_difference(name: str, stored: str, found: str) -> str:
    """Return where the events differ, with the rank and the lines around it."""
    old, new = stored.splitlines(), found.splitlines()
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    at = min(len(old), len(new)) if same is None else same
    rank = next(line for line in reversed(new[: at + 1]) if line.startswith("== "))
    old_line, new_line = (lines[at] if at < len(lines) else "the end" for lines in (old, new))
    diff = difflib.unified_diff(old, new, "stored", "found", lineterm="", n=4)
    return "\n".join(
        [
            f"run {name!r}, {rank[3:]}: line {at + 1} is {new_line.strip()!r}, "
            f"and was {old_line.strip()!r}",
            *list(diff)[:80],
        ]
    )


@pytest.mark.parametrize(
    "name",
    # Each fourth run by default, to save time.
    [pytest.param(n, marks=pytest.mark.sweep if i % 4 else ()) for i, n in enumerate(RUNS)],
)
def test_the_events_of_a_training_have_the_stored_order(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    found = in_one_file(pool.run(RUNS[name].world_size, run, name, str(tmp_path)))
    file = STORED / f"{name}.txt"
    if WRITES:
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    stored = file.read_text() if file.exists() else ""
    assert found == stored, first_difference(name, stored, found)


def test_every_stored_list_has_a_run() -> None:
    assert {file.stem for file in STORED.glob("*.txt")} == set(RUNS)


def test_a_difference_names_the_run_the_rank_and_the_first_line() -> None:
    stored = in_one_file([["a", "b"], ["c", "d"]])
    message = first_difference("a run", stored, in_one_file([["a", "b"], ["c", "e"]]))
    assert message.startswith("run 'a run', rank 1: line 7 is 'e', and was 'd'\n")

"""The user's own loop on two pipeline ranks does what a Trainer does."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.training import long_runs
from tests.ranks.training.long_runs import FORWARD, config, sample
from tests.ranks.training.test_long_runs import equal
from tests.sampling import some

# Fields that contain measured times or memory; work_seconds_* are measured, too.
MEASURED = {"step_seconds", "samples_per_second", "tokens_per_second", "peak_gib", "extra"}


def records(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [*result["rows"], *result["events"]]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def states_of(folder: Path) -> dict[str, Any]:
    """Return what the checkpoints say of the run, without measured times."""
    states = {}
    for file in sorted(folder.glob("global_step*/state.json")):
        state = json.loads(file.read_text())
        del state["run"]["seconds"]
        keys = ("run", "loader", "consumed_samples", "optimizer_step")
        states[file.parent.name] = {key: state[key] for key in keys}
    return states


@pytest.mark.parametrize("sync", some(["fenced", "post_validate"], 1))
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_own_loop_and_trainer_have_equal_records_checkpoints_and_parameters(
    pool: RankPool, tmp_path: Path, policy: str, sync: str
) -> None:
    def settings(folder: str) -> dict[str, Any]:
        return config(
            str(tmp_path / folder),
            mesh={"pipeline": 2},
            pipeline={"optimizer_sync": sync, "optimizer_sync_after": 2},
            training={"on_nonfinite": {"policy": policy}, "check_replicas_every": 4},
        )

    marks = {sample(5, 2): FORWARD + 1}
    trainer = pool.run(2, long_runs.fit, settings("trainer"), marks)
    loop = pool.run(2, long_runs.loop, settings("loop"), marks)
    for one, other in zip(loop, trainer, strict=True):
        assert equal(one, other)
        assert one["history"] == other["history"]
    assert records(loop[0]) == records(trainer[0])
    assert len(records(loop[0])) == 8 + 1, "eight steps and an event"
    assert states_of(tmp_path / "loop") == states_of(tmp_path / "trainer")


def test_a_loop_that_a_signal_stops_on_one_rank_resumes_bitwise_equal(
    pool: RankPool, tmp_path: Path
) -> None:
    def settings(folder: str) -> dict[str, Any]:
        training = {"resume": "auto"}
        return config(str(tmp_path / folder), mesh={"pipeline": 2}, training=training)

    whole = pool.run(2, long_runs.loop, settings("whole"))
    first = pool.run(2, long_runs.loop, settings("parts"), None, (1, 5))
    assert [(r["stopped"], r["steps"]) for r in first] == [("SIGUSR1 on rank 1", 5)] * 2
    assert (tmp_path / "parts/global_step5").is_dir()
    second = pool.run(2, long_runs.loop, settings("parts"))
    for result, expected in zip(second, whole, strict=True):
        assert (result["stopped"], result["history"]["resumes"]) == ("", 1)
        assert equal(result, expected)
        assert result["losses"] == expected["losses"]

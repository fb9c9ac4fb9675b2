"""A run in samples whose batch grows: records, rollbacks, resume and length, in one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipemega.errors import ConfigError
from pipemega.training import Trainer
from tests.ranks.training.long_runs import FORWARD, WIDTH, build, config, results_of

# Steps of 2, 2, 4, 6, 8, 8 ... samples.
RAMP_UP = {"rampup_batch_size": [2, 2, 12], "train_steps": None, "train_samples": 38}


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def fit(folder: str, marks: dict[int, int] | None = None, **training: Any) -> dict[str, Any]:
    settings = config(folder, training={**RAMP_UP, **training}, checkpoint={"interval": 1})
    trainer = Trainer(build(settings, marks))
    trainer.fit()
    return results_of(trainer.engine, "", trainer.stopped)


def sizes(folder: str) -> list[float]:
    rows = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [row["extra"]["batch_size"] for row in rows if row["kind"] == "train"]


def test_the_run_ends_before_the_step_that_exceeds_its_samples_and_records_each_size() -> None:
    result = fit("run")
    assert (result["steps"], result["consumed"]) == (7, 38)
    assert sizes("run") == [2, 2, 4, 6, 8, 8, 8]
    assert fit("other", train_samples=37)["consumed"] == 30


def test_the_console_line_has_the_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    engine = build(config(training=RAMP_UP, steps_per_print=3))
    while not engine.is_complete:
        engine.train_batch()
    engine.close()
    lines = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["step 3/7", "consumed samples 8", "batch size 4"],
        ["step 6/7", "consumed samples 30", "batch size 8"],
        ["step 7/7", "consumed samples 38", "batch size 8"],
    ]


def test_a_whole_batch_of_another_size_is_refused_with_the_size_of_this_step() -> None:
    engine = build(config(training=RAMP_UP))
    batch = (torch.zeros(8, WIDTH), torch.zeros(8, 1)), torch.zeros(8, WIDTH)
    with pytest.raises(ConfigError) as error:
        engine.train_batch(batch=batch)
    assert str(error.value) == (
        "batch has 8 samples along dim 0, and needs the samples of this step / mesh.data (2 / 1 = "
        "2), the samples of one data rank: give it 2; training.rampup_batch_size determines the "
        "samples of a step from engine.consumed_samples"
    )


def test_the_flops_profile_is_that_of_the_batch_of_its_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = {"enabled": True, "profile_step": 3, "detailed": False}
    engine = build(config(training=RAMP_UP, flops_profiler=profiler))
    for _ in range(3):
        engine.train_batch()
    assert "; 2 micro-batches of 2 samples" in capsys.readouterr().out


ROLLBACK = {"on_nonfinite": {"policy": "rollback"}}
# In the fourth step, of the samples 8 to 13.
MARKS = {10: FORWARD + 2}


def test_a_discarded_batch_counts_for_the_size_of_the_next_steps_but_not_for_the_length() -> None:
    result = fit("run", MARKS, **ROLLBACK)
    assert result["history"]["rollbacks"] == 1
    assert sizes("run") == [2, 2, 4, 8, 8, 8]
    assert (result["steps"], result["consumed"]) == (6, 38)
    assert result["rows"][-1]["consumed_samples"] == 32


def test_a_run_with_a_discarded_batch_resumes_with_the_same_bits() -> None:
    whole = fit("whole", MARKS, **ROLLBACK)
    resume = {"resume": "auto", **ROLLBACK}
    first = fit("parts", MARKS, exit_interval=4, **resume)
    assert (first["steps"], first["stopped"]) == (4, "training.exit_interval is 4")
    last = fit("parts", MARKS, exit_interval=4, **resume)
    assert (last["steps"], last["stopped"]) == (6, "")
    assert last["losses"] == whole["losses"]
    for name, value in whole["parameters"].items():
        np.testing.assert_array_equal(last["parameters"][name], value)

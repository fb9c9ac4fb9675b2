"""kill -9 within an epoch: the run continues on another mesh as if it had not been killed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.epoch_training import EPOCHS, KILL_AT, STEPS_PER_EPOCH
from tests.faults.launch_runs import run
from tests.faults.training import Job


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def complete(folder: Path, mesh: str) -> Any:
    folder.mkdir(exist_ok=True)
    ended = run(Job(str(folder), mesh, epochs="complete"))
    assert set(ended.codes) == {0}, str(ended)
    return results(folder)


def assert_close(got: Any, want: Any, where: str = "") -> None:
    """Compare trees of results: numbers to 1e-10, everything else exactly."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_close(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_close(g, w, f"{where}[{index}]")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-10, abs=1e-10), where
    else:
        assert got == want, where


@pytest.mark.sweep
@pytest.mark.parametrize(("first", "second"), [("pipeline x zero", "tensor")])
def test_a_run_killed_within_an_epoch_continues_on_another_mesh(
    tmp_path: Path, first: str, second: str
) -> None:
    want = complete(tmp_path / "uninterrupted", "one")
    assert want["counters"] == [EPOCHS, EPOCHS * STEPS_PER_EPOCH, EPOCHS * 40]
    folder = tmp_path / "killed"
    folder.mkdir()
    job = Job(str(folder), first, epochs="killed")
    killed = run(job)
    assert killed.codes[1] == -9, str(killed)
    assert "no response from rank 1" in str(killed)
    assert KILL_AT % STEPS_PER_EPOCH, "within an epoch"
    ended = run(replace(job, mesh=second, epochs="complete"))
    assert set(ended.codes) == {0}, str(ended)
    assert "at step 6" in ended.texts[0], str(ended)
    got = results(folder)
    assert got["states"]["History"]["epochs"] == [4, 8, 12]
    assert len(got["rates"]) == EPOCHS * STEPS_PER_EPOCH
    assert_close(got, want)

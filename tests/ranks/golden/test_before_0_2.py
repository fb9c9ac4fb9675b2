"""Checkpoints, caches and a script of the version before 0.2: the current code continues them.

`tests/golden/before_0_2` was written by `tests/golden/make_before_0_2.py`.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.make_before_0_2 import TUNED_STEPS, user_lines
from tests.ranks.checkpoint.test_stored_checkpoint import files_of
from tests.ranks.golden import before_0_2_runs as runs
from tests.ranks.pool import RankPool

STORED = Path(__file__).parents[2] / "golden/before_0_2"
# In fp32 the kernels of other processors round differently.
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the stored files, so that a test cannot change them."""
    copy = tmp_path / "before_0_2"
    shutil.copytree(STORED, copy)
    return copy


def stored(name: str, file: str) -> Any:
    return json.loads((STORED / name / file).read_text())


@pytest.mark.parametrize("name", runs.RUNS)
def test_a_run_continues_with_the_losses_that_followed_its_checkpoint(
    pool: RankPool, folder: Path, name: str
) -> None:
    if name == "hf_llama":
        pytest.importorskip("transformers", reason="a model of transformers")
    run, before = runs.RUNS[name], files_of(folder)
    wanted = pytest.approx(stored(name, "next_losses.json"), rel=TOLERANCES[run.dtype])
    for losses in pool.run(run.world_size, runs.run, str(folder), name, False):
        assert losses == wanted
    after = files_of(folder)
    assert {file: after.get(file) for file in before} == before, "a stored file was written again"
    added = [file for file in after if file not in before and "run.lock" not in file]
    assert all(file.startswith("trainer/resumed/") for file in added), added


def test_stored_configs_are_those_of_the_runs() -> None:
    for name, config in runs.CONFIGS.items():
        assert stored(name, "config.json") == config


def test_measured_costs_of_schedule_auto_are_used_in_the_next_run(
    pool: RankPool, folder: Path
) -> None:
    before = files_of(folder)
    machine = stored("auto_pipeline2", "machine.json")
    steps = TUNED_STEPS // 2
    logged, losses = pool.run(2, runs.auto_schedule, str(folder), machine, steps)[0]
    assert any("from cached costs" in line for line in logged), logged
    assert losses == pytest.approx(stored("auto_pipeline2", "next_losses.json")[:steps], rel=1e-9)
    assert files_of(folder) == before


def test_the_script_of_a_user_prints_what_it_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    script = folder / "user_script"
    assert user_lines(script) == (script / "expected.txt").read_text().splitlines()

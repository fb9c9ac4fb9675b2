"""docs/coming_from.md: the script of a pipeline, and the same script as a command."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pipemega.compat.deepspeed.virtual_modules import install_as_deepspeed
from tests.ranks.pool import RankPool

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(block("py"))
    (tmp_path / "ds_config.json").write_text(block("json"))
    return tmp_path


def run_script(folder: str, num_stages: int) -> tuple[float, int]:
    """Run the script on this rank; return its loss, and the number of its parameters."""
    os.chdir(folder)
    before, modules = sys.argv, dict(sys.modules)
    config = ["--deepspeed_config", "ds_config.json"]
    sys.argv = ["train.py", *config, "--pipeline-parallel-size", str(num_stages)]
    install_as_deepspeed()
    try:
        found = runpy.run_path("train.py", run_name="__main__")
    finally:
        sys.argv = before
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            if name not in modules:
                del sys.modules[name]
    return found["loss"].item(), sum(p.numel() for p in found["net"].parameters())


def test_the_script_of_the_page_learns_on_two_stages_and_two_data_ranks(
    pool: RankPool, folder: Path
) -> None:
    results = pool.run(4, run_script, str(folder), 2)
    losses = {loss for loss, _ in results}
    assert len(losses) == 1
    assert losses.pop() < 0.5
    # The stages have different layers.
    assert results[0][1] != results[2][1]
    assert (folder / "checkpoints" / "global_step20").is_dir()


def test_the_command_of_the_page_changes_the_stage_and_runs_the_script(folder: Path) -> None:
    (line,) = re.findall(r"^torchrun .* (-m pipemega\.compat\.deepspeed --set .*)$", PAGE, re.M)
    config = folder / "ds_config.json"
    config.write_text(config.read_text().replace('"stage": 1', '"stage": 2'))
    command = [sys.executable, *line.split(), "--pipeline-parallel-size", "1", "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss \d\.\d+, learning rate \[0\.0", done.stdout)
    assert json.loads(block("json"))["train_batch_size"] == 32

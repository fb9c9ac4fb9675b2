"""Several ranks with one GPU each, over NCCL, compared with one CPU rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.training_runs import settings, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
MODEL = {"hidden_dropout": 0.0}


def launch(config: dict[str, Any], num_ranks: int, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "-m", "tests.gpu.several_gpus_run"]
    result = subprocess.run(
        [*command, json.dumps(config), str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    metrics: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return metrics


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("shapes", ["cached", "exchanged"])
def test_a_pipeline_over_nccl_gives_the_losses_of_one_rank(
    schedule: str, shapes: str, tmp_path: Path
) -> None:
    check({"pipeline": 2}, tmp_path, pipeline={"schedule": schedule, "shapes": shapes})


@pytest.mark.parametrize(
    "mesh", [{"data": 2}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}]
)
def test_data_and_tensor_ranks_over_nccl_give_the_losses_of_one_rank(
    mesh: dict[str, Any], tmp_path: Path
) -> None:
    check(mesh, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize("mesh", [{"pipeline": 4}, {"pipeline": 2, "tensor": 2}])
def test_four_ranks_over_nccl_give_the_losses_of_one_rank(
    mesh: dict[str, Any], tmp_path: Path
) -> None:
    check(mesh, tmp_path, num_ranks=4)


def check(mesh: dict[str, Any], tmp_path: Path, num_ranks: int = 2, **changes: Any) -> None:
    config = settings(mesh={**mesh, "device": DEVICE}, model=MODEL, **changes)
    actual = launch(config, num_ranks, tmp_path / "result.json")
    expected = train(settings(mesh={"device": "cpu"}, model=MODEL, **changes), "float32")
    for key in actual:
        assert actual[key] == pytest.approx(expected[key], rel=5e-4), key

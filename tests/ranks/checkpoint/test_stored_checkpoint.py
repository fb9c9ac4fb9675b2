"""Config, checkpoint and data cache that commit 2371ce9 wrote: the current code loads them."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pipemega
from pipemega.training.pretrain import load_datasets
from tests.ranks.pool import RankPool

STORED = Path(__file__).parents[2] / "golden/run_2371ce9"
FP64, BF16 = ("fp64_pipeline2", "float64"), ("bf16_zero1_data2", "float32")


@contextmanager
def working_folder(folder: str, dtype: str) -> Iterator[None]:
    """The paths in the stored config are relative to the folder of the run."""
    before = os.getcwd()
    os.chdir(folder)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        os.chdir(before)


def build(name: str, changes: list[str]) -> Any:
    config = pipemega.load_config(f"{name}/config.json", ["training.progress=false", *changes])
    mesh = pipemega.build_mesh(config)
    data = load_datasets(config, mesh)
    engine, *_ = pipemega.initialize(
        pipemega.build_model(config, mesh, data.vocab_size), config, data.train, mesh=mesh
    )
    return engine


def resume(folder: str, name: str, dtype: str, changes: list[str]) -> dict[str, Any]:
    """Load the stored checkpoint; return its client state and the following steps."""
    with working_folder(folder, dtype):
        engine = build(name, changes)
        _, client = engine.load_checkpoint(f"{name}/checkpoints")
        counters = (engine.global_steps, engine.consumed_samples)
        return {"client": client, "counters": counters, "next": train(engine, 3)}


def start(folder: str, name: str, dtype: str, changes: list[str]) -> list[float]:
    """The losses of the first steps, without a checkpoint."""
    with working_folder(folder, dtype):
        return [step["loss"] for step in train(build(name, changes), 3)]


def train(engine: Any, steps: int) -> list[dict[str, float]]:
    seen = []
    for _ in range(steps):
        loss, last = engine.train_batch(), engine.last_step
        seen.append(
            {
                "loss": loss,
                "grad_norm": last.grad_norm,
                "lr": last.learning_rate,
                "loss_scale": last.loss_scale,
            }
        )
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the stored run, so that a failing test cannot change it."""
    copy = tmp_path / "run"
    shutil.copytree(STORED, copy)
    return copy


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of each file: a rewritten file differs, even with the same content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stored_steps(name: str) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((STORED / name / "next_losses.json").read_text())
    return steps


def assert_same_steps(found: list[dict[str, float]], name: str, tolerance: float) -> None:
    for step, expected in zip(found, stored_steps(name)["next"], strict=True):
        assert step == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    ("world_size", "run", "changes", "tolerance"),
    [
        pytest.param(2, FP64, [], 1e-10, id="fp64-same-mesh"),
        pytest.param(2, FP64, ["mesh.pipeline=1"], 1e-10, id="fp64-data2"),
        pytest.param(1, FP64, ["mesh.pipeline=1"], 1e-10, id="fp64-one-rank"),
        # bf16 is exact on the machine that wrote the run; kernels of other CPUs round differently.
        pytest.param(2, BF16, [], 1e-4, id="bf16-same-mesh"),
        pytest.param(1, BF16, ["mesh.data=1"], 1e-4, id="bf16-one-rank"),
    ],
)
def test_a_stored_checkpoint_gives_the_losses_that_followed_when_it_was_written(
    pool: RankPool,
    folder: Path,
    world_size: int,
    run: tuple[str, str],
    changes: list[str],
    tolerance: float,
) -> None:
    before = files_of(folder)
    name, dtype = run
    for rank in pool.run(world_size, resume, str(folder), name, dtype, changes):
        assert rank["counters"] == (3, 24)
        assert rank["client"]["best"] == 1.5
        assert rank["client"]["table"].tolist() == [0, 1, 2]
        assert_same_steps(rank["next"], name, tolerance)
    assert files_of(folder) == before, "a file of the stored run or of its data cache changed"


def test_a_stored_config_and_its_data_give_the_losses_of_the_first_steps(
    pool: RankPool, folder: Path
) -> None:
    before = files_of(folder)
    name, dtype = FP64
    losses = pool.run(1, start, str(folder), name, dtype, ["mesh.pipeline=1"])[0]
    assert losses == pytest.approx(stored_steps(name)["before"], rel=1e-10)
    assert files_of(folder) == before

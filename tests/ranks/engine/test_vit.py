"""A ViT on every mesh and schedule trains like the ViT in one process (the oracle)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.engine import vit_runs
from tests.ranks.engine.test_matrix import (
    MESHES,
    SCHEDULES,
    SPLIT,
    TWO_STAGES_PER_RANK,
    assert_bitwise,
    largest_difference,
)
from tests.ranks.engine.vit_runs import settings
from tests.ranks.pool import RankPool
from tests.sampling import some_cases

Mesh = tuple[int, int, int]
Oracle = Callable[[str, bool], dict[str, Any]]

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean of the patches": {"model": {"pool": "mean", "init": "jax"}},
    "sequence parallel": {"mesh": {"sequence_parallel": True}},
    "sequence parallel, mean of the patches": {
        "mesh": {"sequence_parallel": True},
        "model": {"pool": "mean", "recompute": "selective"},
    },
    "recompute full": {"model": {"recompute": "full"}, "mesh": {"sequence_parallel": True}},
    "declared shapes": {
        "pipeline": {"shapes": "declared"},
        "mesh": {"sequence_parallel": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500},
    },
    "compiled": {"compile": {"enabled": True, "backend": "aot_eager"}},
}


def config_of(mesh: Mesh, schedule: str, choice: str) -> dict[str, Any]:
    data, tensor, pipeline = mesh
    config = settings(**CHOICES[choice])
    config["mesh"] = {"data": data, "tensor": tensor, "pipeline": pipeline} | config.get("mesh", {})
    config["pipeline"] = {"schedule": schedule} | config.get("pipeline", {})
    return config


@pytest.fixture(scope="module")
def oracle(pool: RankPool) -> Oracle:
    """Train the unsharded model in one process, for each kind of model and labels."""

    @cache
    def run(soft: bool, model: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
        ((result,),) = pool.run(1, vit_runs.train_all, [settings(model=dict(model))], soft)
        return result  # type: ignore[no-any-return]

    def of_choice(choice: str, soft: bool) -> dict[str, Any]:
        model = CHOICES[choice].get("model", {})
        return run(soft, tuple((key, value) for key, value in model.items() if key != "recompute"))

    return of_choice


def assert_like_one_process(
    pool: RankPool,
    oracle: Oracle,
    mesh: Mesh,
    schedules: tuple[str, ...],
    choice: str,
    soft: bool = False,
) -> None:
    """Train under each schedule: all have the same bits, and 1e-10 to one process."""
    want = oracle(choice, soft)
    configs = [config_of(mesh, schedule, choice) for schedule in schedules]
    data, tensor, pipeline = mesh
    by_rank = pool.run(data * tensor * pipeline, vit_runs.train_all, configs, soft, timeout=300.0)
    results = by_rank[0]
    assert_bitwise(results, norm="zero_optimization" not in configs[0])
    for other in by_rank[1:]:
        assert [r["loss"] for r in other] == [r["loss"] for r in results]
    got = results[0]
    for key in ("loss", "norm", "eval"):
        assert got[key] == pytest.approx(want[key], rel=1e-10), key
    for mine, theirs in zip(got["gradients"], want["gradients"], strict=True):
        assert largest_difference(mine, theirs) < 1e-10
    assert largest_difference(got["parameters"], want["parameters"]) < 1e-10


@pytest.mark.parametrize(
    ("mesh", "schedules", "choice"),
    some_cases(
        [
            ((2, 1, 1), ("1f1b",), "plain"),
            ((1, 1, 2), ("1f1b", "zb-h1", "interleaved", "zb-v"), "plain"),
            ((1, 2, 2), ("1f1b", "zb-v"), "plain"),
            ((1, 4, 1), ("1f1b",), "sequence parallel"),
            ((1, 2, 2), ("zb-v",), "sequence parallel, mean of the patches"),
        ],
        1,
        4,
    ),
    ids=str,
)
def test_a_vit_trains_like_one_process_and_all_schedules_give_the_same_bits(
    pool: RankPool, oracle: Oracle, mesh: Mesh, schedules: tuple[str, ...], choice: str
) -> None:
    assert_like_one_process(pool, oracle, mesh, schedules, choice)


def test_soft_labels_train_like_one_process(pool: RankPool, oracle: Oracle) -> None:
    assert_like_one_process(pool, oracle, (2, 1, 2), ("zb-h1",), "mean of the patches", soft=True)


def test_a_vit_resumes_on_another_mesh(pool: RankPool, tmp_path: Path) -> None:
    sharded = config_of((1, 2, 2), "zb-h1", "sequence parallel")
    losses = pool.run(4, vit_runs.save, sharded, str(tmp_path))
    resumed = pool.run(2, vit_runs.resume, config_of((2, 1, 1), "1f1b", "plain"), str(tmp_path))
    assert resumed == pytest.approx(losses[:2], rel=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_setting_of_a_vit_on_every_mesh_and_schedule_trains_like_one_process(
    pool: RankPool, oracle: Oracle, mesh: Mesh, choice: str
) -> None:
    if mesh[0] == 3:
        pytest.skip("4 micro-batches are not a multiple of 3 data ranks")
    schedules = SCHEDULES + SPLIT * (mesh[2] > 1) + TWO_STAGES_PER_RANK * (mesh[2] == 2)
    assert_like_one_process(pool, oracle, mesh, schedules, choice)

"""Vocabulary parallelism trains like one process on every mesh, with every schedule and setting."""

from typing import Any

import pytest

from tests.ranks import training_runs
from tests.ranks.engine.test_matrix import (
    CHOICES,
    Oracle,
    assert_bitwise,
    assert_like_the_oracle,
    config_of,
    oracle,
)
from tests.ranks.pool import RankPool

__all__ = ["oracle"]

# Each with the meshes (data, tensor, pipeline) of the default run.
CASES = {
    "plain": [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)],
    "untied": [(1, 1, 3)],
    "sequence parallel": [(1, 2, 2)],
    "label smoothing, z-loss": [(1, 2, 2)],
    "clipped, ZeRO": [(2, 1, 2)],
}


def run_all(pool: RankPool, mesh: tuple[int, int, int], schedules: list[str], choice: str) -> Any:
    """Return the results of rank 0; check that all ranks agree."""
    configs = []
    for schedule in schedules:
        config = config_of(mesh, schedule, choice)
        config["pipeline"]["vocabulary"] = "parallel"
        configs.append((config, CHOICES[choice][1]))
    data, tensor, pipeline = mesh
    by_rank = pool.run(data * tensor * pipeline, training_runs.train_all, configs, timeout=300.0)
    for results in zip(*by_rank, strict=True):
        for other in results[1:]:
            for key in ("loss", "norm", "eval"):
                assert other[key] == results[0][key]
    return by_rank[0]


@pytest.mark.parametrize(
    ("choice", "mesh"), [(c, mesh) for c, meshes in CASES.items() for mesh in meshes], ids=str
)
def test_a_cut_vocabulary_trains_like_one_process_and_all_schedules_give_the_same_bits(
    pool: RankPool, oracle: Oracle, choice: str, mesh: tuple[int, int, int]
) -> None:
    schedules = ["1f1b", "zb-h1"] if mesh[2] > 2 else ["1f1b", "zb-v"]
    results = run_all(pool, mesh, schedules, choice)
    assert_bitwise(results, norm="ZeRO" not in choice)
    assert_like_the_oracle(results[0], oracle(choice), choice)

"""A run whose batch grows trains like a plain loop of torch with Megatron's sizes and rates."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.engine import growing_runs
from tests.ranks.engine.growing_runs import EPOCHS, TRAIN_SAMPLES
from tests.ranks.engine.test_training_data import ranks_of
from tests.ranks.pool import RankPool

RTOL = 1e-10
BY_SAMPLES = {"train_samples": TRAIN_SAMPLES}
BY_EPOCHS = {"epochs": EPOCHS}
POST_VALIDATED = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}


@pytest.fixture(scope="module")
def torch_loop(pool: RankPool) -> Any:
    @cache
    def run(kind: str, unit: str) -> dict[str, Any]:
        length = BY_SAMPLES if unit == "train_samples" else BY_EPOCHS
        found: dict[str, Any] = pool.run(1, growing_runs.reference, kind, length)[0]
        return found

    return run


def assert_like_torch(result: dict[str, Any], expected: dict[str, Any], done: int = 0) -> None:
    """Compare a run that continued after `done` steps."""
    np.testing.assert_allclose(result["steps"], expected["steps"][done:], rtol=RTOL)
    assert (result["count"], result["samples"]) == (len(expected["steps"]), expected["samples"])
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(result["parameters"][name], value, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "length", "mesh", "changes"),
    [
        ("map-style", BY_SAMPLES, {}, {}),
        ("map-style", BY_SAMPLES, {"pipeline": 2, "data": 2},
         {"pipeline": {"schedule": "zb-v"}, "zero_optimization": {"stage": 1}}),
        ("iterable", BY_SAMPLES, {"pipeline": 3},
         {"pipeline": {"schedule": "zb-h1", **POST_VALIDATED}}),
        ("iterator", BY_SAMPLES, {"pipeline": 2, "data": 2}, {}),
        ("batch", BY_SAMPLES, {"pipeline": 3}, {}),
        ("map-style", BY_EPOCHS, {"pipeline": 2, "data": 2}, {}),
        ("iterable", BY_EPOCHS, {"data": 2}, {"zero_optimization": {"stage": 1}}),
        ("DataLoader", BY_EPOCHS, {"pipeline": 3}, {"pipeline": POST_VALIDATED}),
    ],
    ids=str,
)  # fmt: skip
def test_a_growing_batch_trains_like_a_loop_of_torch(
    pool: RankPool, torch_loop: Any, kind: str, length: Any, mesh: dict[str, int], changes: Any
) -> None:
    (unit,) = length
    expected = torch_loop(kind, unit)
    assert {size for _, size, _ in expected["steps"]} >= {4, 8, 12, 16}
    config = {"mesh": mesh} | changes
    for result in pool.run(ranks_of(mesh), growing_runs.train, kind, config, length):
        assert_like_torch(result, expected)
        assert result["total"] == (len(expected["steps"]) if unit == "train_samples" else None)


@pytest.mark.parametrize(
    ("kind", "done"),
    [("map-style", 3), pytest.param("iterable", 5, marks=pytest.mark.sweep)],
)
def test_a_growing_batch_resumes_on_another_mesh_and_with_the_same_bits_on_its_own(
    pool: RankPool, torch_loop: Any, tmp_path: Path, kind: str, done: int
) -> None:
    expected = torch_loop(kind, "train_samples")
    config: dict[str, Any] = {"mesh": {"pipeline": 3}, "pipeline": POST_VALIDATED}
    folder = str(tmp_path)
    whole = pool.run(3, growing_runs.train, kind, config, BY_SAMPLES, folder, done)[0]
    again = pool.run(3, growing_runs.train, kind, config, BY_SAMPLES, folder)[0]
    assert again["steps"] == whole["steps"][done:]
    for name, value in whole["parameters"].items():
        np.testing.assert_array_equal(again["parameters"][name], value)
    config = {"mesh": {"pipeline": 2, "data": 2}}
    for result in pool.run(4, growing_runs.train, kind, config, BY_SAMPLES, folder):
        assert_like_torch(result, expected, done)


def test_the_schedule_of_the_checkpoint_applies_on_another_number_of_data_ranks(
    pool: RankPool, torch_loop: Any, tmp_path: Path
) -> None:
    """The batch equation of the run that saved it has no solution on the new mesh."""
    first: dict[str, Any] = {"gradient_accumulation_steps": 8, "mesh": {"data": 1}}
    pool.run(1, growing_runs.train, "map-style", first, BY_SAMPLES, str(tmp_path), 3)
    second: dict[str, Any] = {
        "mesh": {"data": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.7, "momentum": 0.9}},
        "scheduler": {"type": "constant"},
        "checkpoint": {"load": str(tmp_path), "use_checkpoint_opt_param_scheduler": True},
    }
    for result in pool.run(2, growing_runs.train, "map-style", second, BY_SAMPLES):
        assert_like_torch(result, torch_loop("map-style", "train_samples"), 3)

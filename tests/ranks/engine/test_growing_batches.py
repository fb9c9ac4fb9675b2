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
ZERO = {"zero_optimization": {"stage": 1}}
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


# Steps of 4, 4, 4, 8, 12 and then 16 samples.
ONE, V = ("1f1b", 1, [0, 5, 7]), ("zb-v", 2, [0, 2, 4, 5, 7])
# Before a step of the same size, before the first larger one, and before the next larger ones.
ALL_CUTS = {1: V, 3: ONE, 4: ("zb-v", 2, [0, 1, 4, 5, 7]), 5: ONE, 7: V}
# The same ranks read the inputs and the labels.
SAME_ENDS = {3: ONE, 4: ("zb-h1", 1, [0, 2, 7]), 6: ONE}
FIRST = {"schedule": "1f1b", "partition": [0, 3, 7], "chunks": 1}


def assert_gradients(ranks: list[dict[str, Any]], expected: dict[str, Any], done: int = 0) -> None:
    for step, wanted in enumerate(expected["gradients"][done:]):
        found = {name: value for rank in ranks for name, value in rank["gradients"][step].items()}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "length", "mesh", "changes", "cuts"),
    [
        ("map-style", BY_SAMPLES, {}, {}, ALL_CUTS),
        ("map-style", BY_SAMPLES, {"data": 2}, ZERO, ALL_CUTS),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in [
                ("map-style", BY_EPOCHS, {}, {"pipeline": {"shapes": "exchanged"}}, ALL_CUTS),
                ("map-style", BY_SAMPLES, {}, {"pipeline": POST_VALIDATED}, ALL_CUTS),
                ("batch", BY_SAMPLES, {}, {"pipeline": POST_VALIDATED}, SAME_ENDS),
                ("iterator", BY_SAMPLES, {}, {}, SAME_ENDS),
                ("iterable", BY_EPOCHS, {"data": 2}, {}, SAME_ENDS),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stages_that_move_while_the_batch_grows_train_like_a_loop_of_torch(
    pool: RankPool, torch_loop: Any, kind: str, length: Any, mesh: Any, changes: Any, cuts: Any
) -> None:
    """After a move in a smaller step, the next larger step had the plan of the former stages."""
    (unit,) = length
    expected = torch_loop(kind, unit)
    config = {**changes, "mesh": {"pipeline": 2, **mesh}}
    config["pipeline"] = FIRST | changes.get("pipeline", {})
    world = ranks_of(config["mesh"])
    arguments = kind, config, length, cuts
    ranks = pool.run(world, growing_runs.train_on_moving_stages, *arguments)
    for rank in ranks:
        assert_like_torch(rank, expected)
        assert [rank["bounds"][step] for step in cuts] == [tuple(cut[2]) for cut in cuts.values()]
    if "zero_optimization" not in changes:
        assert_gradients(ranks, expected)


def test_a_checkpoint_after_a_move_resumes_a_growing_batch_with_the_same_bits(
    pool: RankPool, torch_loop: Any, tmp_path: Path
) -> None:
    moved, folder = 4, str(tmp_path)
    expected = torch_loop("map-style", "train_samples")
    config: dict[str, Any] = {"mesh": {"pipeline": 2}, "pipeline": FIRST}
    arguments = "map-style", config, BY_SAMPLES, {moved: V}, folder, moved
    whole = pool.run(2, growing_runs.train_on_moving_stages, *arguments)
    assert_gradients(whole, expected)
    config["pipeline"] = {"schedule": V[0], "chunks": V[1], "partition": V[2]}
    for pipeline in (config["pipeline"], FIRST):
        same_cut = pipeline is not FIRST
        arguments = "map-style", config | {"pipeline": pipeline}, BY_SAMPLES, {}, folder
        again = pool.run(2, growing_runs.train_on_moving_stages, *arguments)
        assert_gradients(again, expected, moved)
        for one, other in zip(again, whole, strict=True):
            assert_like_torch(one, expected, moved)
            assert one["steps"] == other["steps"][moved:]
            for name, value in other["parameters"].items():
                np.testing.assert_array_equal(one["parameters"][name], value)
            if same_cut:
                pairs = zip(one["gradients"], other["gradients"][moved:], strict=True)
                for found, wanted in pairs:
                    assert found.keys() == wanted.keys()
                    assert all((found[name] == wanted[name]).all() for name in wanted)

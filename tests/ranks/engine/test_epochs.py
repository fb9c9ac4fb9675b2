"""Runs in epochs train like a plain loop of torch over the same samples, partial steps included."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.engine import epoch_runs
from tests.ranks.engine.test_training_data import ranks_of
from tests.ranks.pool import RankPool, RanksFailed
from tests.sampling import some_cases

RTOL = 1e-10


@pytest.fixture(scope="module")
def torch_loop(pool: RankPool) -> Any:
    @cache
    def run(*arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = pool.run(1, epoch_runs.reference, *arguments)[0]
        return found

    return run


def assert_like_torch(result: dict[str, Any], expected: dict[str, Any], done: int = 0) -> None:
    """Compare a run that continued after `done` steps."""
    losses = [loss for loss, _ in expected["steps"][done:]]
    np.testing.assert_allclose([step[0] for step in result["steps"]], losses, rtol=RTOL)
    assert [step[1] for step in result["steps"]] == [n for _, n in expected["steps"][done:]]
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(result["parameters"][name], value, rtol=RTOL, atol=1e-12)
    assert result["evaluation"] == pytest.approx(expected["evaluation"], rel=RTOL)


@pytest.mark.parametrize(
    ("kind", "loss", "mesh", "changes"),
    some_cases([
        ("map-style", "mean", {}, {"train_micro_batch_size_per_gpu": 8}),
        ("map-style", "mean", {"data": 2}, {"zero_optimization": {"stage": 1}}),
        ("map-style", "weighted", {"data": 4}, {}),
        ("map-style", "weighted", {"pipeline": 2, "data": 2}, {"pipeline": {"schedule": "zb-v"}}),
        (
            "iterable",
            "mean",
            {"pipeline": 3},
            {"pipeline": {"schedule": "zb-h1", "optimizer_sync": "post_validate",
                          "optimizer_sync_after": 0}},
        ),
        ("iterable", "weighted", {"data": 2}, {"train_micro_batch_size_per_gpu": 4}),
        ("DataLoader", "mean", {"pipeline": 3}, {}),
        ("DataLoader", "mean", {"pipeline": 2, "data": 2}, {}),
    ], 0, 2, 4, 6),
    ids=str,
)  # fmt: skip
def test_epochs_train_like_a_loop_of_torch(
    pool: RankPool, torch_loop: Any, kind: str, loss: str, mesh: dict[str, int], changes: Any
) -> None:
    expected = torch_loop(kind, loss, mesh.get("data", 1))
    for result in pool.run(ranks_of(mesh), epoch_runs.train, kind, {"mesh": mesh} | changes, loss):
        assert_like_torch(result, expected)
        assert [step[2] for step in result["steps"]] == [0, 0, 1, 1, 1, 2]
        assert result["total"] == (None if kind == "iterable" else 6)
        assert result["samples"] == sum(count for _, count in expected["steps"])


@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_the_last_samples_of_an_epoch_can_be_dropped(
    pool: RankPool, torch_loop: Any, kind: str
) -> None:
    config = {"mesh": {"pipeline": 2}, "dataloader_drop_last": True}
    expected = torch_loop(kind, "mean", 1, True)
    for result in pool.run(2, epoch_runs.train, kind, config):
        assert_like_torch(result, expected)
        assert [step[2] for step in result["steps"]] == [0, 1, 1, 2]
        assert result["samples"] == 32


@pytest.mark.parametrize(
    ("kind", "done"),
    some_cases([("map-style", 3), ("map-style", 4), ("iterable", 4), ("DataLoader", 5)], 1, 2),
)
def test_a_run_resumes_in_an_epoch_on_another_mesh_with_another_micro_batch_size(
    pool: RankPool, torch_loop: Any, tmp_path: Path, kind: str, done: int
) -> None:
    expected = torch_loop(kind, "mean", 1)
    config = {"mesh": {"pipeline": 3}}
    pool.run(3, epoch_runs.train, kind, config, "mean", str(tmp_path), done)
    data = 1 if kind == "DataLoader" else 2
    config = {"mesh": {"pipeline": 2, "data": data}, "train_micro_batch_size_per_gpu": 4}
    for result in pool.run(2 * data, epoch_runs.train, kind, config, "mean", str(tmp_path)):
        assert_like_torch(result, expected, done)
        assert result["start"] == done // 3
        assert (result["steps done"], result["samples"]) == (6, 42)


def test_data_that_come_after_the_checkpoint_continue_in_the_epoch(
    pool: RankPool, torch_loop: Any, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    pool.run(2, epoch_runs.train, "map-style", {"mesh": {"pipeline": 2}}, "mean", folder, 4)
    expected = [loss for loss, _ in torch_loop("map-style", "mean", 1)["steps"][4:]]
    for found in pool.run(3, epoch_runs.take_data_later, {"mesh": {"pipeline": 3}}, folder):
        assert found[0] == (1, 6)
        np.testing.assert_allclose(found[1:], expected, rtol=RTOL)


def test_micro_batches_without_samples_do_not_change_running_statistics(pool: RankPool) -> None:
    """A step of 3 samples has micro-batches of 2, 1, 0 and 0 samples; those of 2 rows are used."""
    config = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 12}
    whole = pool.run(1, epoch_runs.running_statistics, config)[0]
    (name,) = [name for name in whole if name.endswith("num_batches_tracked")]
    # 11 samples: 3, 3, 3, 2.
    assert whole[name] == 4
    config |= {"train_batch_size": 24, "mesh": {"pipeline": 2}}
    for result in pool.run(2, epoch_runs.running_statistics, config):
        for name, value in result.items():
            (same,) = [n for n in whole if n.split(".")[-1] == name.split(".")[-1]]
            np.testing.assert_array_equal(value, whole[same])


def test_a_schedule_over_epochs_advances_at_their_ends_and_resumes(
    pool: RankPool, tmp_path: Path
) -> None:
    post = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}
    config = {"mesh": {"pipeline": 2}, "pipeline": post}
    rates = pool.run(2, epoch_runs.rates_by_epoch, config, str(tmp_path), 7)[0]
    assert len(rates) == 12
    assert all(len(set(rates[at : at + 3])) == 1 for at in range(0, 12, 3))
    assert len(set(rates)) == 4
    resumed = pool.run(1, epoch_runs.rates_by_epoch, {}, str(tmp_path))[0]
    assert resumed == pytest.approx(rates[7:], rel=RTOL)


def test_data_ranks_with_epochs_of_different_lengths_are_refused_on_every_rank(
    pool: RankPool,
) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, epoch_runs.uneven_loaders, {"mesh": {"pipeline": 2, "data": 2}})
    assert len(caught.value.errors) == 4
    for text, _ in caught.value.errors.values():
        assert "epoch 0 of DataLoader ends with this step on some data ranks, and not on" in text

"""A Trainer with epochs, metrics and callbacks on several ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import training_runs
from tests.ranks.pool import RankPool
from tests.ranks.training import trainer_runs
from tests.ranks.training.trainer_runs import config
from tests.sampling import some_cases


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the results of two runs to 1e-10."""
    for one, other in zip(found["evaluations"], expected["evaluations"], strict=True):
        assert one[:2] == other[:2]
        assert one.values == pytest.approx(other.values, rel=1e-10)
    assert found["steps"] == expected["steps"]
    assert found["best"] == pytest.approx(expected["best"], rel=1e-10)
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    some_cases(
        [
            # The last stage is on rank 0.
            ({"pipeline": 2}, {"pipeline": {"schedule": "zb-v"}}),
            # A step is validated in the next one.
            ({"data": 2, "pipeline": 2}, {"pipeline": {"optimizer_sync": "post_validate"}}),
            ({"data": 4}, {"train_micro_batch_size_per_gpu": 1}),
        ],
        1,
    ),
    ids=str,
)
def test_epochs_metrics_and_callbacks_are_those_of_one_process(
    pool: RankPool, tmp_path: Path, mesh: dict[str, int], changes: dict[str, Any]
) -> None:
    """The data ranks have unequal numbers of samples at the end of an epoch and of a set."""
    expected = trainer_runs.results(config(tmp_path / "one"))
    settings = config(tmp_path / "many", mesh=mesh, **changes)
    ranks = np.prod(list(mesh.values()))
    for found in pool.run(int(ranks), trainer_runs.results, settings):
        close(found, expected)


def test_a_run_that_ends_in_an_epoch_resumes_on_another_mesh(
    pool: RankPool, tmp_path: Path
) -> None:
    expected = trainer_runs.results(config(tmp_path / "whole"))

    def settings(mesh: dict[str, int]) -> dict[str, Any]:
        return config(tmp_path / "parts", mesh=mesh, training={"resume": "auto"})

    for first in pool.run(2, trainer_runs.results_until, settings({"pipeline": 2}), 5):
        # Rank 0 alone asks for the stop.
        assert (first["stopped"], first["steps"][:2]) == ("enough steps", (6, 1))
    for found in pool.run(2, trainer_runs.results, settings({"data": 2})):
        close(found, expected)
        assert found["stopped"] == ""


@pytest.mark.parametrize(
    ("mesh", "vocabulary"),
    [
        ({"tensor": 2}, "stage"),
        ({"tensor": 2, "pipeline": 2}, "stage"),
        ({"tensor": 2, "pipeline": 2}, "parallel"),
    ],
    ids=str,
)
def test_metrics_of_a_sharded_vocabulary_are_those_of_one_process(
    pool: RankPool, tmp_path: Path, mesh: dict[str, int], vocabulary: str
) -> None:
    """The 50 words are padded to 56 on one rank, and to 64 on two."""

    def settings(**changes: Any) -> dict[str, Any]:
        folder = tmp_path / ("many" if changes else "one")
        run = {"training": {"eval_steps": 1}, "checkpoint": {"save": str(folder)}}
        without = {"optimizer": None, "scheduler": None}
        return {**training_runs.settings(**changes), **without, **run}

    expected = trainer_runs.gpt_metrics(settings())
    ranks = np.prod(list(mesh.values()))
    cut = settings(mesh=mesh, pipeline={"vocabulary": vocabulary})
    for found in pool.run(int(ranks), trainer_runs.gpt_metrics, cut):
        assert found == pytest.approx(expected, rel=1e-10)
    assert 0 < expected["top10"] < expected["top30"] < 1


def test_metrics_of_torchmetrics_are_reduced_over_the_data_axis_only(
    pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    expected = trainer_runs.torchmetrics_values(config(tmp_path / "one"))
    settings = config(tmp_path / "many", mesh={"data": 2, "pipeline": 2})
    for found in pool.run(4, trainer_runs.torchmetrics_values, settings):
        assert found == pytest.approx(expected, rel=1e-6)
        assert found["top1"] == pytest.approx(found["own"], rel=1e-6)


def test_lists_of_torchmetrics_need_samples_on_each_data_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    """torchmetrics gathers nothing from an empty list, so the other data rank would wait."""
    settings = config(tmp_path / "run", mesh={"data": 2})
    for text in pool.run(2, trainer_runs.list_metric_of_few_samples, settings):
        assert "metric 'curve' keeps lists of all outputs, and data rank 1 of 2 has no" in text


@pytest.mark.parametrize(("point", "rank"), [("after_step", 1), ("after_evaluation", 0)])
def test_a_callback_that_fails_on_one_rank_ends_all_ranks_with_its_name(
    pool: RankPool, tmp_path: Path, point: str, rank: int
) -> None:
    settings = config(tmp_path / "run", mesh={"pipeline": 2})
    message = f"callback 'Broken' failed in {point}: ValueError: out of ideas"
    errors = pool.run(2, trainer_runs.failing, settings, rank, point)
    assert errors[rank] == f"PipelineError: {message}"
    assert errors[1 - rank].startswith(f"PeerError: rank {rank} failed first: {message}")


def test_a_callback_that_cannot_load_its_state_on_one_rank_ends_all_ranks(
    pool: RankPool, tmp_path: Path
) -> None:
    """The other rank began the next step, and waited there."""
    settings = config(tmp_path / "run", mesh={"pipeline": 2}, training={"resume": "auto"})
    errors = pool.run(2, trainer_runs.failing_load, settings, 0)
    message = "callback 'kept' failed in load_state_dict: ValueError: out of ideas"
    assert errors[0] == f"PipelineError: {message}"
    assert errors[1].startswith(f"PeerError: rank 0 failed first: {message}")


@pytest.mark.parametrize("point", ["before_save", "after_evaluation"])
def test_a_callback_that_fails_after_fit_ends_all_ranks_with_its_name(
    pool: RankPool, tmp_path: Path, point: str
) -> None:
    """The other rank waited for mesh.timeout_seconds."""
    settings = config(tmp_path / "run", mesh={"data": 2})
    first, second = pool.run(2, trainer_runs.failing_after_fit, settings, point)
    message = f"callback 'Broken' failed in {point}: ValueError: out of ideas"
    assert second == f"PipelineError: {message}"
    assert first.startswith(f"PeerError: rank 1 failed first: {message}")


def test_metrics_over_slices_of_several_blocks_are_refused(pool: RankPool, tmp_path: Path) -> None:
    """The metric saw the slices of one rank only."""
    settings = config(tmp_path / "run", mesh={"tensor": 2})
    for error in pool.run(2, trainer_runs.metrics_of_blocks, settings):
        assert "a ColumnParallelLinear of 2 blocks, returns the slices of one tensor rank" in error
        assert "set gather_output=True" in error


def test_all_ranks_get_the_same_values_of_metrics(pool: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path / "run", mesh={"tensor": 2})
    first, second = pool.run(2, trainer_runs.metric_of_ranks, settings)
    assert first == second


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("callbacks", "different callbacks with state: rank 0 has mine, rank 1 has none"),
        ("metrics", "different metrics: rank 0 has top1, top2, rank 1 has none"),
        ("sets", "different validation sets: rank 0 has easy, rank 1 has hard"),
    ],
)
def test_different_parts_of_the_ranks_are_refused(
    pool: RankPool, tmp_path: Path, what: str, message: str
) -> None:
    """A callback of rank 0 only made the resumed run wait for a rank that had failed."""
    settings = config(tmp_path / "run", mesh={"data": 2})
    for error in pool.run(2, trainer_runs.different_parts, settings, what):
        assert error == f"the ranks have {message}: give every rank the same ones"


def test_a_metric_that_fails_on_one_rank_ends_all_ranks_with_its_name(
    pool: RankPool, tmp_path: Path
) -> None:
    settings = config(tmp_path / "run", mesh={"data": 2})
    errors = pool.run(2, trainer_runs.failing_metric, settings, 1)
    message = "metric 'mine' failed: ValueError: cannot add this up"
    assert message in errors[1]
    assert errors[0].startswith("PeerError: rank 1 failed first: ")
    assert message in errors[0]


def test_a_missing_callback_is_the_same_error_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    settings = config(tmp_path / "run", mesh={"pipeline": 2}, training={"resume": "auto"})
    first, second = pool.run(2, trainer_runs.without_callback, settings)
    assert first == second
    assert first.startswith("the checkpoint has the state of the callback 'mine'")

"""Stages at work: what may cross them, ties, shapes, evaluation, memory."""

from typing import Any

import numpy
import pytest

from tests.ranks import small_models
from tests.ranks.pool import RankPool


def assert_like_one_process(pool: RankPool, model: str, ranks: int, **config: Any) -> None:
    (want,) = pool.run(1, call, small_models.train, model)
    for got in pool.run(ranks, call, small_models.train, model, config):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)
        assert set(got["parameters"]) == set(want["parameters"])
        for name, value in want["parameters"].items():
            numpy.testing.assert_allclose(got["parameters"][name], value, rtol=0, atol=1e-12)


def call(function: Any, *args: Any) -> Any:
    """`function(*args)`, where a mapping at the end is its keyword arguments."""
    keywords = args[-1] if args and isinstance(args[-1], dict) else {}
    return function(*[a for a in args if a is not keywords], **keywords)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_any_tree_of_tensors_and_constants_may_cross_a_boundary(
    pool: RankPool, ranks: int, schedule: str
) -> None:
    assert_like_one_process(
        pool, "tree_model", ranks, mesh={"pipeline": ranks}, pipeline={"schedule": schedule}
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_layers_tied_on_several_stages_stay_one_parameter(pool: RankPool, ranks: int) -> None:
    assert_like_one_process(pool, "tied_thrice", ranks, mesh={"pipeline": ranks})


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_there_may_be_fewer_microbatches_than_stages_or_any_other_number(
    pool: RankPool, schedule: str, count: int
) -> None:
    config = {"gradient_accumulation_steps": count}
    (want,) = pool.run(1, call, small_models.train, "plain", config)
    config |= {"mesh": {"pipeline": 4}, "pipeline": {"schedule": schedule}}
    for got in pool.run(4, call, small_models.train, "plain", config):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)


def test_frozen_parameters_stay_as_they_are(pool: RankPool) -> None:
    assert_like_one_process(pool, "partly_frozen", 3, mesh={"pipeline": 3})


def test_modules_that_differ_between_ranks_take_the_first_ranks_values(pool: RankPool) -> None:
    results = pool.run(2, call, small_models.train, "built_by_the_user", 1, {"mesh": {"data": 2}})
    for name, value in results[0]["parameters"].items():
        numpy.testing.assert_array_equal(results[1]["parameters"][name], value)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_of_any_size_may_come_between_training_steps(pool: RankPool, ranks: int) -> None:
    (want,) = pool.run(1, call, small_models.train_and_evaluate)
    results = pool.run(ranks, call, small_models.train_and_evaluate, {"mesh": {"pipeline": ranks}})
    for rank, got in enumerate(results):
        assert got["losses"] == got["without"], "evaluation changes no training step"
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        assert got["evaluations"] == pytest.approx(want["evaluations"], rel=1e-12)
        assert got["shapes"] == ([(3, 2, 6)] * 3 if rank == ranks - 1 else None)


def test_lengths_may_change_from_one_microbatch_to_the_next_when_headers_are_exchanged(
    pool: RankPool,
) -> None:
    (want,) = pool.run(1, call, small_models.changing_lengths)
    config = {"mesh": {"pipeline": 3}, "pipeline": {"shapes": "exchanged"}}
    for got in pool.run(3, call, small_models.changing_lengths, config):
        assert got == pytest.approx(want, rel=1e-12)


def test_shapes_may_be_declared_by_the_model(pool: RankPool) -> None:
    (want,) = pool.run(1, call, small_models.declared)
    for got in pool.run(3, call, small_models.declared, {"mesh": {"pipeline": 3}}):
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_users_random_numbers_are_left_alone(pool: RankPool, ranks: int) -> None:
    for with_steps, without in pool.run(
        ranks, call, small_models.user_streams, {"mesh": {"pipeline": ranks}}
    ):
        assert with_steps == without


def test_the_cut_by_measured_time_puts_the_slow_layers_apart(pool: RankPool) -> None:
    bounds = pool.run(2, call, small_models.bounds_by_time, {"mesh": {"pipeline": 2}})
    assert bounds[0] == bounds[1]
    # Eight quick layers come before four slow ones: no even cut, which would be at 6.
    assert 8 < bounds[0][1] < 12


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 4)])
def test_a_rank_keeps_as_many_microbatches_as_its_schedule_says_and_no_sent_output(
    pool: RankPool, schedule: str, most: int
) -> None:
    (first, outlives), _ = pool.run(2, small_models.kept_between, schedule)
    assert first == most
    assert not outlives

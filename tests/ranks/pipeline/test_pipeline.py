"""Pipeline execution: messages, tied parameters, shapes, evaluation, memory."""

from typing import Any

import numpy
import pytest

from tests.ranks import message_runs, small_models
from tests.ranks.pool import RankPool, RanksFailed
from tests.sampling import some


def assert_equals_one_process(pool: RankPool, model: str, ranks: int, **config: Any) -> None:
    (expected,) = pool.run(1, call, small_models.train, model)
    for result in pool.run(ranks, call, small_models.train, model, config):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert set(result["parameters"]) == set(expected["parameters"])
        for name, value in expected["parameters"].items():
            numpy.testing.assert_allclose(result["parameters"][name], value, rtol=0, atol=1e-12)


def call(function: Any, *args: Any) -> Any:
    """Call `function(*args)`; a dict as last argument holds the keyword arguments."""
    keywords = args[-1] if args and isinstance(args[-1], dict) else {}
    return function(*[a for a in args if a is not keywords], **keywords)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_messages_between_stages_may_be_any_tree_of_tensors_and_constants(
    pool: RankPool, ranks: int, schedule: str
) -> None:
    assert_equals_one_process(
        pool, "tree_model", ranks, mesh={"pipeline": ranks}, pipeline={"schedule": schedule}
    )


def test_two_inputs_of_a_stage_may_have_the_same_gradient(pool: RankPool) -> None:
    config = {"mesh": {"pipeline": 2}, "pipeline": {"partition": [0, 2, 4]}}
    assert_equals_one_process(pool, "sum_of_two", 2, **config)


@pytest.mark.parametrize("cut", [2, 3])
def test_messages_have_the_values_of_lazy_conjugates(pool: RankPool, cut: int) -> None:
    """The memory of z.conj() has the values of z, and W of a complex layer lost a conjugate."""
    config = {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "zb-h1", "partition": [0, cut, 5]}}
    assert_equals_one_process(pool, "conjugated", 2, **config)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parameters_tied_across_stages_stay_equal(pool: RankPool, ranks: int) -> None:
    assert_equals_one_process(pool, "tied_thrice", ranks, mesh={"pipeline": ranks})


@pytest.mark.parametrize("schedule", some(["sequential", "gpipe", "1f1b"], 1, 2))
@pytest.mark.parametrize("count", some([1, 2, 3, 5], 0, 3))
def test_any_number_of_microbatches_gives_the_loss_of_one_process(
    pool: RankPool, schedule: str, count: int
) -> None:
    config = {"gradient_accumulation_steps": count}
    (expected,) = pool.run(1, call, small_models.train, "plain", config)
    config |= {"mesh": {"pipeline": 4}, "pipeline": {"schedule": schedule}}
    for result in pool.run(4, call, small_models.train, "plain", config):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-12)


def test_frozen_parameters_do_not_change(pool: RankPool) -> None:
    assert_equals_one_process(pool, "partly_frozen", 3, mesh={"pipeline": 3})


def test_modules_built_by_the_user_get_the_values_of_the_first_rank(pool: RankPool) -> None:
    results = pool.run(2, call, small_models.train, "built_by_the_user", 1, {"mesh": {"data": 2}})
    for name, value in results[0]["parameters"].items():
        numpy.testing.assert_array_equal(results[1]["parameters"][name], value)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_of_any_size_does_not_change_training(pool: RankPool, ranks: int) -> None:
    (expected,) = pool.run(1, call, small_models.train_and_evaluate)
    results = pool.run(ranks, call, small_models.train_and_evaluate, {"mesh": {"pipeline": ranks}})
    for rank, result in enumerate(results):
        assert result["losses"] == result["without"], "evaluation must not change training"
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert result["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-12)
        assert result["shapes"] == ([(3, 2, 6)] * 3 if rank == ranks - 1 else None)


def test_exchanged_headers_allow_different_lengths_of_microbatches(
    pool: RankPool,
) -> None:
    (expected,) = pool.run(1, call, small_models.changing_lengths)
    config = {"mesh": {"pipeline": 3}, "pipeline": {"shapes": "exchanged"}}
    for result in pool.run(3, call, small_models.changing_lengths, config):
        assert result == pytest.approx(expected, rel=1e-12)


def test_declared_shapes_train_evaluate_and_infer_like_one_process(pool: RankPool) -> None:
    """The first eval_batch failed: without gradients the messages differed from the declaration."""
    (expected,) = pool.run(1, call, small_models.declared)
    results = pool.run(3, call, small_models.declared, {"mesh": {"pipeline": 3}})
    for losses, _ in results:
        assert losses == pytest.approx(expected[0], rel=1e-12)
    assert results[-1][1] == pytest.approx(expected[1], rel=1e-12)


def test_a_wrong_declaration_names_stage_tensor_and_both_shapes(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, call, small_models.declared, 4, {"mesh": {"pipeline": 2}})
    for message, _ in failed.value.errors.values():
        assert "the output of stage 0 at micro-batch 0 is not what the model declares" in message
        assert (
            "the input of stage 1: output is declared as float64 [4, 2, 6] with gradient and is "
            "float64 [3, 2, 6] with gradient; correct PipelineModule(..., boundary=...), or set "
            "pipeline.shapes to 'cached'"
        ) in message


def test_a_layer_that_changes_an_output_after_it_was_sent_is_an_error(pool: RankPool) -> None:
    """The next stage received the value of a later micro-batch, depending on the timing."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, small_models.changes_sent_output, True)
    for message, _ in failed.value.errors.values():
        assert "the activation of micro-batch 0 of stage 0 was changed in place" in message
        assert "return a new tensor in each call, or a clone()" in message


def test_several_tensors_are_sent_with_their_values_at_that_time(pool: RankPool) -> None:
    """They are copied into one buffer, so a later change in place is allowed."""
    assert pool.run(2, small_models.changes_sent_output, False)[1] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_does_not_change_the_users_rng_state(pool: RankPool, ranks: int) -> None:
    for with_steps, without in pool.run(
        ranks, call, small_models.user_streams, {"mesh": {"pipeline": ranks}}
    ):
        assert with_steps == without


def test_partition_by_profile_balances_measured_times(pool: RankPool) -> None:
    bounds = pool.run(2, call, small_models.bounds_by_time, {"mesh": {"pipeline": 2}})
    assert bounds[0] == bounds[1]
    # Eight fast layers, then four slow ones: an even partition would split at 6.
    assert 8 < bounds[0][1] < 12


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 4)])
def test_a_rank_keeps_the_microbatches_of_its_schedule_and_no_sent_output(
    pool: RankPool, schedule: str, most: int
) -> None:
    (first, outlives), _ = pool.run(2, small_models.kept_between, schedule)
    assert first == most
    assert not outlives


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"pipeline": 4}], ids=str)
def test_messages_without_tags_give_the_same_steps(pool: RankPool, mesh: dict[str, int]) -> None:
    """Every channel between two ranks has its own group, in each of the pipelines of the mesh."""
    config = {"mesh": mesh, "pipeline": {"schedule": "interleaved"}}
    by_tag = pool.run(4, call, small_models.train, "plain", config)
    without_tags = pool.run(4, call, message_runs.train_without_tags, "plain", config)
    for tagged, (result, tags) in zip(by_tag, without_tags, strict=True):
        assert tags == {0}
        assert result["loss"] == tagged["loss"]
        for name, value in tagged["parameters"].items():
            numpy.testing.assert_array_equal(result["parameters"][name], value)


@pytest.mark.parametrize("shapes", ["declared", "cached", "exchanged"])
def test_the_transport_posts_what_the_validation_of_plans_assumes(
    pool: RankPool, shapes: str
) -> None:
    for posted, expected in pool.run(2, message_runs.posted_messages, shapes):
        assert len(posted) > 90
        assert posted == expected

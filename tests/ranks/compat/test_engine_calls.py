"""The calls that scripts make on DeepSpeed's pipeline engine, and what is refused."""

import pytest

from tests.ranks.compat.deepspeed_scripts import CLASSES, MICRO
from tests.ranks.compat.engine_calls import (
    counted_forwards,
    different_samples,
    engine_calls,
    grid_calls,
    other_shapes,
    plan_of_auto,
    refusals,
)
from tests.ranks.pool import RankPool


def test_the_calls_of_scripts_return_what_those_of_deepspeed_return(
    pool: RankPool, tmp_path: object
) -> None:
    first, last = pool.run(2, engine_calls, str(tmp_path))
    assert first["place"] == (0, True, False)
    assert last["place"] == (1, False, True)
    assert first["grid"] == (1, 0, 2, 1)
    assert first["batch"] == (8, MICRO, 4, 4)
    assert first["module"] == (True, 2, True)
    assert first["lr"] == [0.1]
    mean, one, none = first["evaluation"]
    assert none is None
    _, _, losses = last["evaluation"]
    assert mean == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert one == pytest.approx(losses[0], rel=1e-6)
    assert first["outputs"] == [None, None]
    assert last["outputs"] == [(MICRO, CLASSES)] * 2
    assert first["loss"] == last["loss"] == (True, pytest.approx(mean, rel=1e-6))
    assert last["batch_fn"] < mean
    assert first["lr after a step"] == [0.05]
    assert first["steps"] == (3, 24)
    assert first["norm"]
    for found in (first, last):
        assert found["nothing"] == (None, None)
        assert found["saved"] is True
        assert found["path"].endswith("7")
        assert found["client"] == (0.1, [0, 1, 2], "uint32")
        assert found["restored"]
        assert found["steps after loading"] == 3


def test_the_getters_of_a_grid_name_the_groups_of_each_rank(pool: RankPool) -> None:
    *_, last = pool.run(4, grid_calls, 2, 1, 2)  # rank = 2 * stage + data rank
    assert last["pipe"] == (1, 2, [1, 3])
    assert last["data"] == (1, 2, [2, 3])
    assert last["slice"] == (0, 1, [3])
    assert last["model"] == (1, 2, [1, 3])
    assert last["ids"] == (3, 1, 1)
    assert last["data ranks"] == [2, 3]
    _, second, *_ = pool.run(4, grid_calls, 2, 2, 1)  # rank = 2 * stage + tensor rank
    assert second["pipe"] == (0, 2, [1, 3])
    assert second["data"] == (0, 1, [1])
    assert second["slice"] == (1, 2, [0, 1])
    # DeepSpeed: all ranks of one copy of the model.
    assert second["model"] == (1, 4, [0, 1, 2, 3])
    assert second["ids"] == (1, 0, 0)


def test_shapes_may_change_after_reset_activation_shape(pool: RankPool) -> None:
    first, last = pool.run(2, other_shapes)
    assert first == last
    assert first[0] != first[1]


def test_what_does_not_exist_is_refused_at_the_call_on_every_rank(pool: RankPool) -> None:
    first, last = pool.run(2, refusals)
    assert first == last
    expected = [
        "ConfigError: engine(x), forward, backward and step do not exist for a PipelineModule",
        "ConfigError: set_train_batch_size(16): the steps have 8 samples",
        "ConfigError: load_checkpoint(custom_load_fn=...) is not supported",
        "ConfigError: eval_batch(reduce_output='sum'): write 'avg', or None",
        "ConfigError: PipelineModule.compile() is not supported",
        "ConfigError: num_stages (4) must divide the number of ranks (2)",
        "ConfigError: mesh.pipeline is 1 in the config, and the topology of the PipelineModule has "
        "2: remove the key, or change num_stages or topology",
        "ConfigError: pipeline.schedule 'interleaved' has 2 stages per rank, and a PipelineModule",
        "ConfigError: initialize(mpu=...) is not the mpu() of the PipelineModule",
        "ConfigError: parameter group 0 holds a parameter of shape (1,) that is not one of the",
        "ConfigError: engine.micro_batches has been set to 5, and a step has 4 micro-batches: set "
        "gradient_accumulation_steps in the config",
        "AttributeError: the engine has no 'no_sync': train_batch() reduces the gradients once per",
        "AttributeError: the engine has no 'no_such': docs/coming_from.md lists",
    ]
    for message, start in zip(first, expected, strict=True):
        assert message.startswith(start)


def test_only_checkpointable_layers_are_recomputed_and_a_wrong_spec_is_named(
    pool: RankPool,
) -> None:
    ((counts, is_named),) = pool.run(1, counted_forwards)
    assert counts == {"Recomputed": 8, "Kept": 4}
    assert is_named


def test_stages_that_read_other_samples_are_refused(pool: RankPool) -> None:
    """The labels of one sample were trained with the inputs of another, without a word."""
    for error in pool.run(2, different_samples, "labels"):
        assert error.startswith("rank 0 (pipeline rank 0, tensor rank 0) and rank 1 (pipeline rank")
        assert "have read different labels in call 1 of train_batch: 4 of 4 micro-batches" in error
        assert "the same seed for what they shuffle" in error
        assert "data.compare_every" in error
    # DeepSpeed uses the inputs of the first stage only.
    assert pool.run(2, different_samples, "inputs") == ["", ""]


def test_auto_has_the_plan_that_it_has_with_known_shapes(pool: RankPool) -> None:
    assert pool.run(2, plan_of_auto) == [True, True]

"""Long runs: inf and nan, signals, resuming, copies that differ, stragglers, loss spikes."""

import signal
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.ranks import training_runs
from tests.ranks.pool import RankPool
from tests.ranks.training import long_runs
from tests.ranks.training.long_runs import (
    BACKWARD,
    FORWARD,
    GAS,
    LAYERS,
    MICRO,
    WEIGHT,
    config,
    sample,
)
from tests.sampling import some_cases
from tests.unit.storage.test_folder_lock import start_holder

HALF = f"of {MICRO * long_runs.WIDTH} elements"


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two runs ended with the same parameters, bit for bit."""
    left, right = one["parameters"], other["parameters"]
    return left.keys() == right.keys() and all(
        numpy.array_equal(left[name], right[name]) for name in left
    )


# Origin of inf and nan


def layer(position: int) -> str:
    return f"layer {position} 'layers.{position}' (Marked)"


CASES = {
    "forward": (
        {sample(2, 3): FORWARD + 5, sample(2, 1): FORWARD + 2},
        "NonFiniteError: loss is nan at step 2 (gradient norm nan): first in the forward of "
        f"micro-batch 1, stage {{stage2}}, {layer(2)}: output has 3 nan {HALF}, its input was "
        "finite. {ranks} of {ranks} ranks held a gradient with inf or nan",
    ),
    "backward": (
        {sample(1, 2): BACKWARD + 1, sample(1, 3): BACKWARD + 4},
        "in the backward of micro-batch 2, stage {stage1}, "
        f"{layer(1)}: gradient of its input has 1 inf {HALF}, that of its output was finite",
    ),
    "data": (
        {sample(1, 3): long_runs.NAN_INPUT},
        f"micro-batch 3, stage 0, {layer(0)}: its input, which is the data, is not finite",
    ),
    "weight": (
        {sample(1, 2): WEIGHT + 4},
        "in the backward of micro-batch 2, stage {stage4}, the gradient of layers.4.weight: has "
        "1 inf of 16 elements after this micro-batch",
    ),
}


@pytest.mark.parametrize(
    ("pipeline", "chunks"),
    [
        ({"schedule": "1f1b"}, 1),
        ({"schedule": "gpipe", "activation_checkpoint_interval": 2}, 1),
        ({"schedule": "zb-h1"}, 1),
        ({"schedule": "interleaved", "chunks": 2}, 2),
    ],
    ids=["1f1b", "gpipe recomputed", "zb-h1", "interleaved"],
)
def test_the_first_stage_layer_and_microbatch_with_inf_or_nan_are_named(
    pool: RankPool, pipeline: dict[str, Any], chunks: int
) -> None:
    stages = 2 * chunks
    bounds = [LAYERS * s // stages for s in range(stages + 1)]
    settings = config(mesh={"pipeline": 2}, pipeline={**pipeline, "partition": bounds})
    where = {f"stage{p}": max(s for s in range(stages) if bounds[s] <= p) for p in range(LAYERS)}
    messages = pool.run(
        2,
        long_runs.errors_of_training,
        [(settings, marks) for marks, _ in CASES.values()],
    )
    assert messages[0] == messages[1]
    for message, (_, words) in zip(messages[0], CASES.values(), strict=True):
        assert words.format(ranks=2, **where) in message


@pytest.mark.parametrize("zero", [0, 1])
def test_the_data_rank_with_inf_or_nan_is_named(pool: RankPool, zero: int) -> None:
    settings = config(mesh={"pipeline": 2, "data": 2}, zero_optimization={"stage": zero})
    marks = {sample(1, 3, 1, 2): FORWARD + 4, sample(2, 0, 0, 2): FORWARD + 1}
    messages = pool.run(4, long_runs.error_of_training, settings, marks)
    assert len(set(messages)) == 1
    assert f"in the forward of micro-batch 3 (data rank 1), stage 1, {layer(4)}" in messages[0]


def test_a_parameter_that_was_not_finite_before_the_step_is_named(pool: RankPool) -> None:
    mesh = {"pipeline": 2, "tensor": 2}
    messages = pool.run(4, train_with_a_nan_in_a_parameter, training_runs.settings(mesh=mesh))
    assert len(set(messages)) == 1
    assert (
        "in the forward of micro-batch 0, stage 1, layer 4 'layers.4' (Block): output has"
        in (messages[0])
    )
    assert (
        "its input was finite, but its parameter 'mlp.up.weight' has 1 nan of 192" in (messages[0])
    )
    assert "elements before the step, on tensor rank 1" in messages[0]


def train_with_a_nan_in_a_parameter(settings: dict[str, Any]) -> str:
    engine = training_runs.build(settings)
    if engine.mesh.tensor.rank == 1 and "layers.4.mlp.up.weight" in engine.steps.model.parameters:
        engine.steps.model.parameters["layers.4.mlp.up.weight"].data[3, 3] = float("nan")
    with pytest.raises(long_runs.PipemegaError) as caught:
        engine.train_batch(training_runs.data(engine, 0))
    return str(caught.value)


def test_inf_or_nan_that_does_not_recur_in_the_second_run_is_reported(
    pool: RankPool,
) -> None:
    (message,) = pool.run(1, train_with_a_nan_in_one_forward)
    assert "in a second run of the step all layers were finite on every rank" in message


def train_with_a_nan_in_one_forward() -> str:
    engine = long_runs.build(config())
    calls = iter(range(1000))
    engine.module[0].layers["2"].register_forward_hook(
        lambda _m, _a, output: (output[0] * float("nan"), output[1]) if next(calls) == 1 else None
    )
    with pytest.raises(long_runs.PipemegaError) as caught:
        engine.train_batch()
    return str(caught.value)


# Policies for inf and nan


BAD = {sample(5, 2): FORWARD + 1}


@pytest.mark.parametrize("sync", ["fenced", "post_validate"])
def test_skip_continues_with_the_next_batch_and_records_the_skipped_step(
    pool: RankPool, tmp_path: Path, sync: str
) -> None:
    settings = config(
        str(tmp_path),
        mesh={"pipeline": 2},
        pipeline={"optimizer_sync": sync, "optimizer_sync_after": 2},
        training={"on_nonfinite": {"policy": "skip"}},
    )
    result, other = pool.run(2, long_runs.fit, settings, BAD)
    assert (result["error"], result["steps"], result["skipped"]) == ("", 8, 1)
    assert result["history"]["spent"] == 1
    assert equal(result, other)
    (event,) = result["events"]
    assert event["text"].startswith(
        "loss is nan at step 5 (gradient norm nan): first in the forward of micro-batch 2, stage 0"
    )
    assert result["losses"][5] == "nan"


def test_post_validation_skips_the_same_steps_as_the_synchronous_step(
    pool: RankPool, tmp_path: Path
) -> None:
    def run(sync: str) -> Any:
        settings = config(
            str(tmp_path / sync),
            mesh={"pipeline": 2},
            pipeline={"optimizer_sync": sync, "optimizer_sync_after": 2},
            training={"on_nonfinite": {"policy": "skip"}},
        )
        return pool.run(2, long_runs.fit, settings, BAD)[0]

    synchronous, validated = run("fenced"), run("post_validate")
    assert equal(synchronous, validated)
    assert synchronous["losses"] == validated["losses"]


def test_post_validation_by_a_replica_check_records_the_origin(
    pool: RankPool, tmp_path: Path
) -> None:
    # The loss of step 5 is finite, its gradients are not: the replica check after it validates it.
    settings = config(
        str(tmp_path),
        mesh={"pipeline": 2},
        pipeline={"optimizer_sync": "post_validate", "optimizer_sync_after": 2},
        training={"on_nonfinite": {"policy": "skip"}, "check_replicas_every": 5},
    )
    result, _ = pool.run(2, long_runs.fit, settings, {sample(5, 2): BACKWARD + 1})
    assert (result["error"], result["steps"], result["skipped"]) == ("", 8, 1)
    (event,) = result["events"]
    assert "in the backward of micro-batch 2, stage 0" in event["text"]


@pytest.mark.parametrize("sync", ["fenced", "post_validate"])
def test_rollback_continues_from_the_newest_checkpoint_with_the_data_after_the_batch(
    pool: RankPool, tmp_path: Path, sync: str
) -> None:
    settings = config(
        str(tmp_path),
        mesh={"pipeline": 2},
        pipeline={"optimizer_sync": sync, "optimizer_sync_after": 2},
        training={"on_nonfinite": {"policy": "rollback"}},
    )
    result, _ = pool.run(2, long_runs.fit, settings, BAD)
    assert (result["error"], result["steps"], result["skipped"]) == ("", 8, 0)
    assert result["history"]["rollbacks"] == 1
    # From step 5 back to step 3; the next five batches are those after the fifth. The loss is
    # known in its own step, also with post-validation.
    assert result["consumed"] == (8 + 2) * GAS * MICRO
    assert sorted(result["losses"]) == list(range(1, 9)), "each step once"
    (event,) = result["events"]
    assert event["text"].startswith("rolled back from step 5 to step 3: loss is nan at step 5")


def test_zero_skips_and_rolls_back_to_the_same_parameters_as_without(
    pool: RankPool, tmp_path: Path
) -> None:
    marks = {sample(5, 2, 1, 2): BACKWARD + 1}
    for policy in ("skip", "rollback"):
        ended = [
            pool.run(
                2,
                long_runs.fit,
                config(
                    str(tmp_path / f"{policy}{stage}"),
                    mesh={"data": 2},
                    training={"on_nonfinite": {"policy": policy}},
                    zero_optimization={"stage": stage},
                ),
                marks,
            )[0]
            for stage in (0, 1)
        ]
        for result in ended:
            assert (result["error"], result["steps"], result["history"]["spent"]) == ("", 8, 1)
        assert equal(*ended)


def test_a_used_up_budget_ends_the_run_with_all_skipped_steps(
    pool: RankPool, tmp_path: Path
) -> None:
    settings = config(
        str(tmp_path),
        training={"on_nonfinite": {"policy": "skip", "budget": 2}},
    )
    marks = {sample(step, 0): FORWARD + 2 for step in (2, 4, 6)}
    (result,) = pool.run(1, long_runs.fit, settings, marks)
    assert result["steps"] == 6
    first, *lines = result["error"].splitlines()
    assert first == (
        "NonFiniteError: 3 steps of this run had inf or nan, and training.on_nonfinite.budget is 2:"
    )
    for line, step in zip(lines, (2, 4, 6), strict=False):
        assert line.startswith(f"  loss is nan at step {step} (gradient norm nan): first in the")


def test_a_rollback_without_a_checkpoint_is_an_error(pool: RankPool, tmp_path: Path) -> None:
    settings = config(str(tmp_path), training={"on_nonfinite": {"policy": "rollback"}})
    (result,) = pool.run(1, long_runs.fit, settings, {sample(2, 0): FORWARD})
    assert (
        "has no complete checkpoint of this run yet: lower checkpoint.interval" in (result["error"])
    )


def test_a_rollback_never_loads_a_checkpoint_of_an_earlier_run(
    pool: RankPool, tmp_path: Path
) -> None:
    settings = config(str(tmp_path), training={"on_nonfinite": {"policy": "rollback"}})
    (before,) = pool.run(1, long_runs.fit, settings, {})
    assert (before["error"], before["steps"]) == ("", 8)
    settings["checkpoint"] |= {"overwrite": True}
    (result,) = pool.run(1, long_runs.fit, settings, {sample(2, 0): FORWARD})
    assert "has no complete checkpoint of this run yet" in result["error"]


def test_bf16_skips_by_default_and_names_the_layer(pool: RankPool, tmp_path: Path) -> None:
    settings = config(str(tmp_path), bf16={"enabled": True})
    (result,) = pool.run(1, long_runs.fit, settings, BAD)
    assert (result["error"], result["skipped"], result["history"]["spent"]) == ("", 1, 0)
    assert "stage 0, layer 1 'layers.1' (Marked)" in result["events"][0]["text"]
    settings["training"] = settings["training"] | {"on_nonfinite": {"policy": "stop"}}
    settings["checkpoint"] |= {"overwrite": True}
    (result,) = pool.run(1, long_runs.fit, settings, BAD)
    assert result["error"].startswith("NonFiniteError: loss is nan at step 5")


def test_the_policy_applies_to_a_nan_loss_with_fp16(pool: RankPool, tmp_path: Path) -> None:
    settings = config(
        str(tmp_path),
        fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 4},
        training={"on_nonfinite": {"policy": "rollback"}},
    )
    (result,) = pool.run(1, long_runs.fit, settings, BAD)
    assert (result["error"], result["history"]["rollbacks"]) == ("", 1)
    assert result["history"]["nan_steps"] == 1
    assert "rolled back from step 5 to step 3: loss is nan at step 5" in str(result["events"])


def test_an_overflow_at_the_smallest_loss_scale_names_the_layer(pool: RankPool) -> None:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 0, "hysteresis": 1}
    (message,) = pool.run(
        1, long_runs.error_of_training, config(fp16=fp16), {sample(1, 1): FORWARD + 3}
    )
    assert message.startswith("LossScaleError: fp16 gradients overflowed at step ")
    assert f"; first in the forward of micro-batch 1, stage 0, {layer(3)}" in message


# Signals and time


@pytest.mark.parametrize(
    ("number", "rank", "mesh"),
    some_cases(
        [
            (signal.SIGUSR1, 1, {"pipeline": 2}),
            (signal.SIGTERM, 0, {"data": 2}),  # with ZeRO
            (signal.SIGINT, 1, {"pipeline": 2}),
        ],
        1,
    ),
    ids=["SIGUSR1", "SIGTERM", "Ctrl-C"],
)
def test_a_signal_to_one_rank_ends_all_after_the_same_step_and_the_next_run_is_bitwise_equal(
    pool: RankPool, tmp_path: Path, number: int, rank: int, mesh: dict[str, int]
) -> None:
    changes: dict[str, Any] = {
        "mesh": mesh,
        "pipeline": {
            "optimizer_sync": "post_validate" if number == signal.SIGINT else "fenced",
            "optimizer_sync_after": 2,
        },
        "zero_optimization": {"stage": 1 if number == signal.SIGTERM else 0},
    }
    training = {"resume": "auto"}
    whole = pool.run(2, long_runs.fit, config(str(tmp_path / "whole"), **changes))
    settings = config(str(tmp_path / "parts"), training=training, **changes)
    first = pool.run(2, long_runs.fit_with_a_signal, settings, number, rank, 5)
    for result in first:
        assert (result["error"], result["steps"]) == ("", 5)
        assert result["stopped"] == f"{signal.Signals(number).name} on rank {rank}"
    second = pool.run(2, long_runs.fit, settings)
    for result, expected in zip(second, whole, strict=True):
        assert (result["stopped"], result["history"]["resumes"]) == ("", 1)
        assert equal(result, expected)
        assert result["losses"] == expected["losses"]


def test_a_run_ends_after_exit_after_minutes_with_a_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    settings = config(str(tmp_path), mesh={"data": 2}, training={"exit_after_minutes": 1e-6})
    for result in pool.run(2, long_runs.fit, settings):
        assert (result["steps"], result["stopped"]) == (1, "training.exit_after_minutes is 1e-06")
    assert (tmp_path / "global_step1").is_dir()


def test_the_end_of_the_data_ends_the_run_with_a_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    settings = config(str(tmp_path), mesh={"pipeline": 2})
    for result in pool.run(2, long_runs.fit_until_the_data_ends, settings, 4):
        assert (result["error"], result["steps"]) == ("", 4)
        assert result["stopped"] == "the training data ended"
    assert (tmp_path / "global_step4").is_dir()


# Resuming


def test_a_run_without_own_checkpoint_starts_from_checkpoint_load(
    pool: RankPool, tmp_path: Path
) -> None:
    older, newer = str(tmp_path / "older"), str(tmp_path / "newer")
    pool.run(1, long_runs.fit, config(older, training={"train_steps": 4}))
    settings = config(newer, checkpoint={"load": older}, training={"resume": "auto"})
    (result,) = pool.run(1, long_runs.fit, settings)
    assert sorted(result["losses"]) == [5, 6, 7, 8]
    (again,) = pool.run(
        1, long_runs.fit, {**settings, "training": {"train_steps": 9, "resume": "auto"}}
    )
    assert max(again["losses"]) == 9, "it resumed from its own checkpoint"
    assert again["history"]["resumes"] == 2


def test_a_run_resumes_with_fewer_and_with_more_data_ranks(pool: RankPool, tmp_path: Path) -> None:
    def settings(folder: str) -> dict[str, Any]:
        batch = {"train_batch_size": 16, "gradient_accumulation_steps": None}
        return config(str(tmp_path / folder), training={"resume": "auto"}, **batch)

    (whole, _) = pool.run(2, long_runs.fit, settings("whole"))
    pool.run(2, long_runs.fit_with_a_signal, settings("parts"), signal.SIGUSR1, 1, 3)
    # One rank runs twice as many micro-batches per step.
    (second,) = pool.run(1, long_runs.fit_with_a_signal, settings("parts"), signal.SIGUSR1, 0, 4)
    assert (second["steps"], second["stopped"]) == (5, "SIGUSR1")
    (third, _) = pool.run(2, long_runs.fit, settings("parts"))
    assert third["history"]["resumes"] == 2
    losses = [third["losses"][step] for step in range(1, 9)]
    assert losses == pytest.approx([whole["losses"][step] for step in range(1, 9)], rel=1e-5)


def test_the_counters_of_a_run_continue_over_restarts(pool: RankPool, tmp_path: Path) -> None:
    def settings(steps: int) -> dict[str, Any]:
        training = {"train_steps": steps, "resume": "auto", "on_nonfinite": {"policy": "skip"}}
        return config(str(tmp_path), training=training)

    marks = {sample(step, 0): FORWARD + 1 for step in (2, 6)}
    pool.run(1, long_runs.fit, settings(4), marks)
    (result,) = pool.run(1, long_runs.fit, settings(8), marks)
    history = result["history"]
    assert (history["spent"], history["nan_steps"], result["skipped"]) == (2, 2, 2)
    assert [line[:21] for line in history["nonfinite"]] == [
        "loss is nan at step 2", "loss is nan at step 6",
    ]  # fmt: skip


# Copies of parameters


@pytest.mark.parametrize(
    ("mesh", "kind", "name", "rank", "words"),
    [
        ({"data": 4}, "", "layers.3.weight", 2, "differs from ranks 0, 1, 3: on rank 2"),
        ({"data": 2, "pipeline": 2}, "zero", "layers.4.weight", 3, "from rank 2: on rank 3"),
        ({"tensor": 2}, "", "layers.1.weight", 1, "from rank 0: on rank 1"),
        ({"pipeline": 2}, "tied", "layers.0.weight", 1, "from rank 0: on rank 1"),
    ],
    ids=["data", "data and pipeline", "tensor", "tied"],
)
def test_a_flipped_bit_in_one_copy_is_named_with_parameter_and_rank(
    pool: RankPool, mesh: dict[str, int], kind: str, name: str, rank: int, words: str
) -> None:
    world = numpy.prod(list(mesh.values()))
    settings = config(mesh=mesh, zero_optimization={"stage": int(kind == "zero")})
    messages = pool.run(int(world), long_runs.flip_a_bit, settings, name, rank, kind)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"ReplicaError: parameter {name} ")
    assert words in messages[0]
    assert "in 1 of 16 elements, by up to" in messages[0]


def test_a_shard_of_a_parameter_is_compared_with_the_same_shard(pool: RankPool) -> None:
    mesh = {"data": 2, "tensor": 2}
    messages = pool.run(4, flip_in_a_shard, training_runs.settings(mesh=mesh))
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        "ReplicaError: parameter layers.2.mlp.up.weight (its shard on tensor rank 1) differs "
        "from rank 1: on rank 3 in 1 of"
    )


def flip_in_a_shard(settings: dict[str, Any]) -> str:
    engine = training_runs.build(settings)
    engine.train_batch(training_runs.data(engine, 0))
    engine.check_replicas()
    if engine.mesh.rank == 3:
        weight = engine.steps.model.parameters["layers.2.mlp.up.weight"]
        weight.data.view(-1)[0] += 1.0
    with pytest.raises(long_runs.PipemegaError) as caught:
        engine.check_replicas()
    return f"{type(caught.value).__name__}: {caught.value}"


# Stragglers and spikes


def test_a_loss_spike_is_recorded_and_training_continues(pool: RankPool, tmp_path: Path) -> None:
    settings = config(str(tmp_path), training={"train_steps": 30})
    (result,) = pool.run(1, long_runs.fit, settings, {sample(25, 0): long_runs.FAR_LABEL})
    assert (result["error"], result["steps"], result["history"]["spikes"]) == ("", 30, 1)
    (event,) = result["events"]
    assert (event["name"], event["step"]) == ("loss_spike", 25)
    assert "at step 25 is a spike: the median of the previous steps is" in event["text"]


def test_a_slow_rank_is_named_with_its_stage(pool: RankPool, tmp_path: Path) -> None:
    settings = config(
        str(tmp_path),
        mesh={"pipeline": 2, "data": 2},
        training={"stragglers": {"interval": 2, "checks": 2}},
    )
    # 0.2 s per step: more than a busy machine delays the other ranks.
    result, *_ = pool.run(4, long_runs.fit_with_a_slow_rank, settings, 3, 0.05)
    (event,) = result["events"]
    assert event["name"] == "straggler"
    assert event["text"].startswith("rank 3 (")
    assert "stage 1, data rank 1) takes" in event["text"]
    assert event["values"]["work_slowest_rank"] == 3
    assert result["rows"][3]["extra"]["work_slowest_rank"] == 3


def test_ranks_of_different_stages_are_not_reported(pool: RankPool, tmp_path: Path) -> None:
    settings = config(
        str(tmp_path), mesh={"pipeline": 2}, training={"stragglers": {"interval": 1, "checks": 1}}
    )
    result, _ = pool.run(2, long_runs.fit_with_a_slow_rank, settings, 1, 0.02)
    assert result["events"] == []
    assert result["rows"][3]["extra"]["work_stage_imbalance"] >= 1
    assert result["rows"][3]["extra"]["work_seconds_rank1"] > 0


def test_all_ranks_refuse_a_folder_that_another_process_uses(
    pool: RankPool, tmp_path: Path
) -> None:
    settings = config(str(tmp_path), mesh={"pipeline": 2})
    with start_holder(tmp_path) as holder:
        results = pool.run(2, long_runs.fit, settings)
        holder.kill()
    for result in results:
        assert result["error"].startswith(f"FolderLockedError: another run uses {tmp_path}: ")
        assert f"process {holder.pid} on" in result["error"]
    results = pool.run(2, long_runs.fit, settings)
    assert [(result["error"], result["steps"]) for result in results] == [("", 8)] * 2

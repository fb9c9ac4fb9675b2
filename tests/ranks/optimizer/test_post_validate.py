"""Post-validated steps equal synchronous steps ("fenced") bit for bit."""

import math
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.ranks.injected_faults import Fault, run_with
from tests.ranks.optimizer import post_validate_runs
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training_runs import MICRO, settings
from tests.sampling import some_cases

ALWAYS = {"optimizer_sync_after": 0}
NUM_MICROBATCHES = 8


def config_of(schedule: str, mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    batch = {"train_batch_size": NUM_MICROBATCHES * MICRO}
    return settings(**batch, mesh=mesh, pipeline={"schedule": schedule}, **changes)


def both(
    pool: RankPool, config: dict[str, Any], sync: dict[str, Any] = ALWAYS, **how: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(synchronous, not synchronous) of the first rank, after every rank was found to agree."""
    num_ranks = math.prod(config["mesh"].values())
    results = pool.run(num_ranks, _both, config, sync, how)
    for synchronous, validated in results:
        assert_same(synchronous, validated)
    return results[0]


def _both(config: Any, sync: Any, how: Any) -> Any:
    return post_validate_runs.train_both(config, sync, **how)


def assert_same(synchronous: dict[str, Any], validated: dict[str, Any]) -> None:
    assert validated["loss"] == synchronous["loss"]
    assert validated.get("reports") == synchronous.get("reports")
    assert validated.get("eval") == synchronous.get("eval")
    assert_same_state(synchronous["state"], validated["state"])


def assert_same_state(synchronous: dict[str, Any], validated: dict[str, Any]) -> None:
    assert set(validated) == set(synchronous)
    for name, value in synchronous.items():
        if isinstance(value, numpy.ndarray):
            assert numpy.array_equal(validated[name], value), name
        else:
            assert validated[name] == value, name


MESHES = [
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "data": 2},
    {"pipeline": 2, "tensor": 2},
]
# The model has layers for two ranks of two stages.
ONE_STAGE_PER_RANK = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
TWO_STAGES_PER_RANK = ["interleaved", "looped-bfs", "interleaved-zb", "zb-v", "v-min", "dualpipe-v"]
CASES = [
    (schedule, mesh)
    for mesh in MESHES
    for schedule in ONE_STAGE_PER_RANK + TWO_STAGES_PER_RANK * (mesh["pipeline"] == 2)
]
SHORT = [("zb-h1", 1), ("zb-v", 2)]


@pytest.mark.parametrize(("schedule", "mesh"), [(s, MESHES[m]) for s, m in SHORT], ids=str)
def test_post_validated_steps_equal_synchronous_steps(
    pool: RankPool, schedule: str, mesh: dict[str, int]
) -> None:
    check_one(pool, schedule, mesh)


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "mesh"), CASES, ids=str)
def test_every_schedule_trains_the_same_with_post_validation(
    pool: RankPool, schedule: str, mesh: dict[str, int]
) -> None:
    check_one(pool, schedule, mesh)


def check_one(pool: RankPool, schedule: str, mesh: dict[str, int]) -> None:
    # Tied embeddings, dropout, micro-batches of unequal weight; steps 1 and 4 are clipped.
    config = config_of(schedule, mesh, gradient_clipping=50.0)
    synchronous, validated = both(pool, config, pushes={1: 1e4, 4: 1e4})
    assert synchronous["waited"] == [True] * 6
    assert validated["waited"] == [False] * 6
    assert validated["rollbacks"] == 2
    norms = [float(report["grad_norm"]) for report in validated["reports"]]
    assert [norm > 50.0 for norm in norms] == [False, True, False, False, True, False]


def test_after_a_clipped_step_the_next_steps_wait_for_the_norm(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 2}, gradient_clipping=50.0)
    _, validated = both(pool, config, {"optimizer_sync_after": 2}, pushes={3: 1e4}, steps=8)
    assert validated["waited"] == [True, True, False, False, True, True, False, False]
    assert validated["rollbacks"] == 1


def test_clipping_in_every_step_causes_no_rollback(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 2}, gradient_clipping=0.01)
    _, validated = both(pool, config, {"optimizer_sync_after": 1})
    assert validated["waited"] == [True] * 6
    assert validated["rollbacks"] == 0


@pytest.mark.parametrize(
    "precision",
    [
        {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1,
                  "loss_scale_window": 1}},
        pytest.param(
            {"bf16": {"enabled": True, "check_grad_overflow": True}}, marks=pytest.mark.sweep
        ),
    ],
    ids=["fp16", "bf16"],
)  # fmt: skip
@pytest.mark.parametrize(
    "mesh",
    [pytest.param({"pipeline": 4}, marks=pytest.mark.sweep), {"pipeline": 2, "data": 2}],
    ids=str,
)
def test_an_overflow_is_skipped_and_the_loss_scale_is_updated(
    pool: RankPool, mesh: dict[str, int], precision: dict[str, Any]
) -> None:
    config = config_of("zb-h1", mesh, **precision)
    _, validated = both(pool, config, pushes={2: float("inf"), 5: float("nan")})
    assert validated["rollbacks"] == 2
    skipped = [report["skipped_steps"] for report in validated["reports"]]
    assert skipped == ["0", "0", "1", "1", "1", "2"]
    if "fp16" in precision:
        scales = [float(report["loss_scale"]) for report in validated["reports"]]
        # Grows after the second step; the overflow of the third halves it.
        assert scales[:4] == [256, 256, 512, 256]


def test_evaluating_saving_and_loading_settle_the_last_step(pool: RankPool, tmp_path: Path) -> None:
    config = config_of("zb-v", {"pipeline": 2}, gradient_clipping=50.0, bf16={"enabled": True})
    # The steps before the evaluation, before the save and before the load.
    pushes = {2: 1e4, 3: 1e4, 4: 1e4}
    _, validated = both(pool, config, pushes=pushes, folder=str(tmp_path))
    assert validated["saved"] == "global_step4"
    assert validated["rollbacks"] >= 3


def test_a_single_rank_may_read_the_norm(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 4}, gradient_clipping=50.0)
    _, validated = both(pool, config, pushes={1: 1e4, 3: 1e4, 5: 1e4}, read_norm=True)
    assert validated["rollbacks"] == 3


def test_buffers_changed_by_discarded_forwards_are_restored(pool: RankPool) -> None:
    synchronous = pool.run(2, post_validate_runs.train_with_buffers, "fenced")
    validated = pool.run(2, post_validate_runs.train_with_buffers, "post_validate")
    for want, got in zip(synchronous, validated, strict=True):
        assert_same(want, got)
        assert got["rollbacks"] == 4


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recompute", "reduction"),
    [("full", "token"), ("none", "micro_batch")],
)
def test_lamb_on_sharded_parameters_is_repeated_by_all_ranks(
    pool: RankPool, recompute: str, reduction: str
) -> None:
    config = config_of(
        "1f1b",
        {"pipeline": 2, "tensor": 2},
        gradient_clipping=50.0,
        optimizer={"type": "Lamb", "params": {"lr": 0.01}},
        model={"recompute": recompute},
        training={"loss_reduction": reduction},
    )
    _, validated = both(pool, config, pushes={1: 1e4}, steps=4)
    assert validated["rollbacks"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    some_cases([
        ({}, "the gradient norm is (inf|nan) at step 2"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4,
                      "hysteresis": 1}},
            "fp16 gradients overflowed at step 1 with the loss scale at fp16.min_loss_scale",
        ),
    ], 1),
    ids=["fp32", "fp16"],
)  # fmt: skip
def test_nonfinite_gradients_raise_the_same_error_and_leave_the_same_state(
    pool: RankPool, changes: dict[str, Any], message: str
) -> None:
    synchronous_config = config_of("zb-h1", {"pipeline": 2}, **changes)
    validated_config = {
        **synchronous_config,
        "pipeline": {"schedule": "zb-h1", "optimizer_sync": "post_validate", **ALWAYS},
    }
    synchronous = pool.run(2, post_validate_runs.overflow, synchronous_config, 1)
    validated = pool.run(2, post_validate_runs.overflow, validated_config, 1)
    for (error, state, losses), (validated_error, validated_state, validated_losses) in zip(
        synchronous, validated, strict=True
    ):
        assert validated_error == error
        assert re.search(message, error)
        assert_same_state(state, validated_state)
        # If the error is caught, training continues as in synchronous mode.
        assert validated_losses == losses


@pytest.mark.parametrize(
    ("what", "rank"),
    [
        ("raise", 0),
        ("raise", 3),
        ("raise in backward", 0),
        pytest.param("kill", 3, marks=pytest.mark.sweep),
    ],
)
def test_a_rank_that_fails_before_validation_stops_all_ranks(
    pool: RankPool, what: str, rank: int
) -> None:
    config = config_of("1f1b", {"pipeline": 4})
    config["pipeline"] |= {
        "optimizer_sync": "post_validate",
        "partition": "parameters",  # the last rank has layer 5
        **ALWAYS,
    }
    # In the first micro-batch of the second step: no rank can end that step, which is the last.
    fault = Fault(what, rank, position={0: 0, 3: 5}[rank], call=NUM_MICROBATCHES + 1)
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, run_with, fault, config, timeout=30.0)
    reports = {r: message for r, (message, _) in caught.value.errors.items()}
    assert set(reports) == {0, 1, 2, 3}
    for other, message in reports.items():
        if what == "kill":
            assert other == rank or "rank" in message
        else:
            assert "injected error" in message


@pytest.mark.parametrize(("what", "rank"), some_cases([("raise", 0), ("raise", 3), ("kill", 1)], 2))
def test_a_rank_that_fails_before_the_norm_all_reduce_stops_all_ranks(
    pool: RankPool, what: str, rank: int
) -> None:
    config = config_of("zb-h1", {"pipeline": 4})
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, post_validate_runs.fail_in_optimizer_step, config, what, rank, timeout=30.0)
    reports = {r: message for r, (message, _) in caught.value.errors.items()}
    assert set(reports) == {0, 1, 2, 3}
    for other, message in reports.items():
        if other != rank:
            assert f"rank {rank}" in message
            assert "injected error" in message or what == "kill"


def test_the_norm_all_reduce_times_out_after_mesh_timeout_seconds(
    pool: RankPool,
) -> None:
    untied = {"untie_embeddings_and_output_weights": True}
    config = config_of("zb-h1", {"pipeline": 4, "timeout_seconds": 2}, model=untied)
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    # Otherwise a rank that is a step ahead waits in the comparison of the data.
    config["data"] = {"compare_every": 0}
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, post_validate_runs.fail_in_optimizer_step, config, "hang", 3, timeout=30.0)
    reports = {r: message for r, (message, _) in caught.value.errors.items()}
    for other in (0, 1, 2):
        assert "the gradient norm of step 2: the all-reduce over all ranks: " in reports[other]
    # The first whose time is over ends, and the others may lose their connection to it before.
    assert any("timed out after mesh.timeout_seconds (2 s)" in reports[r] for r in (0, 1, 2))


def test_the_backup_has_the_size_that_the_docs_state(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 2}, bf16={"enabled": True})
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    for size, parameters in pool.run(2, post_validate_runs.backup_bytes, config):
        # Gradient, master and two moments in fp32; gaps between gradients, and step counters.
        assert 16 * parameters <= size < 16 * parameters + 256 * 60


def test_the_log_has_the_norm_of_each_step_in_its_own_record(
    pool: RankPool, tmp_path: Path
) -> None:
    config = config_of("1f1b", {"pipeline": 2}, gradient_clipping=50.0)
    config |= {"training": {"train_steps": 6, "eval_interval": 4, "eval_steps": 1}}
    lines = {}
    for sync in ("fenced", "post_validate"):
        folder = str(tmp_path / sync)
        lines[sync] = pool.run(
            2, post_validate_runs.log_of, config, sync, folder, {1: 1e4, 5: 1e4}
        )[0]
    assert [line["step"] for line in lines["fenced"]] == [0, 1, 2, 3, 4, 4, 5, 6, 6]
    rollbacks = [line["extra"].pop("rollbacks") for line in lines["post_validate"] if "lr" in line]
    assert rollbacks == [0, 1, 1, 1, 1, 2]
    for synchronous, validated in zip(lines["fenced"], lines["post_validate"], strict=True):
        for line in (synchronous, validated):
            for key in [key for key in line if "second" in key or key == "time"]:
                del line[key]
        assert validated == synchronous

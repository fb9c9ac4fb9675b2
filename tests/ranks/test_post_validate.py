"""The step that does not wait for the norm against the one that does: the same, to the last bit."""

import math
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.ranks import post_validate_run
from tests.ranks.faults import Fault, run_with
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training_run import settings

ALWAYS = {"optimizer_sync_after": 0}


def config_of(schedule: str, mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    return settings(mesh=mesh, pipeline={"schedule": schedule}, **changes)


def both(
    pool: RankPool, config: dict[str, Any], sync: dict[str, Any] = ALWAYS, **how: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fenced, not fenced) of the first rank, after every rank was found to agree."""
    num_ranks = math.prod(config["mesh"].values())
    results = pool.run(num_ranks, _both, config, sync, how)
    for fenced, free in results:
        assert_same(fenced, free)
    return results[0]


def _both(config: Any, sync: Any, how: Any) -> Any:
    return post_validate_run.train_both(config, sync, **how)


def assert_same(fenced: dict[str, Any], free: dict[str, Any]) -> None:
    assert free["loss"] == fenced["loss"]
    assert free.get("reports") == fenced.get("reports")
    assert free.get("eval") == fenced.get("eval")
    assert_same_state(fenced["state"], free["state"])


def assert_same_state(fenced: dict[str, Any], free: dict[str, Any]) -> None:
    assert set(free) == set(fenced)
    for name, value in fenced.items():
        if isinstance(value, numpy.ndarray):
            assert numpy.array_equal(free[name], value), name
        else:
            assert free[name] == value, name


MESHES = [
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "data": 2},
    {"pipeline": 2, "tensor": 2},
]
# The model has layers for two ranks of two stages.
OF_ONE_STAGE = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
OF_TWO_STAGES = ["interleaved", "looped-bfs", "interleaved-zb", "zb-v", "v-min", "dualpipe-v"]
CASES = [
    (schedule, mesh)
    for mesh in MESHES
    for schedule in OF_ONE_STAGE + OF_TWO_STAGES * (mesh["pipeline"] == 2)
]
SHORT = [("1f1b", 0), ("zb-v", 0), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-h1", 2),
         ("zb-v", 2), ("gpipe", 3)]  # fmt: skip


@pytest.mark.parametrize(("schedule", "mesh"), [(s, MESHES[m]) for s, m in SHORT], ids=str)
def test_a_step_that_does_not_wait_is_the_step_that_waits(
    pool: RankPool, schedule: str, mesh: dict[str, int]
) -> None:
    check_one(pool, schedule, mesh)


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "mesh"), CASES, ids=str)
def test_no_schedule_needs_the_fence(pool: RankPool, schedule: str, mesh: dict[str, int]) -> None:
    check_one(pool, schedule, mesh)


def check_one(pool: RankPool, schedule: str, mesh: dict[str, int]) -> None:
    # Tied embeddings, dropout, micro-batches of unequal weight; steps 1 and 4 are clipped.
    config = config_of(schedule, mesh, gradient_clipping=50.0)
    fenced, free = both(pool, config, pushes={1: 1e4, 4: 1e4})
    assert fenced["waited"] == [True] * 6
    assert free["waited"] == [False] * 6
    assert free["rollbacks"] == 2
    norms = [float(report["grad_norm"]) for report in free["reports"]]
    assert [norm > 50.0 for norm in norms] == [False, True, False, False, True, False]


def test_a_rank_waits_until_some_steps_in_a_row_needed_no_clipping(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 2}, gradient_clipping=50.0)
    _, free = both(pool, config, {"optimizer_sync_after": 2}, pushes={3: 1e4}, steps=8)
    assert free["waited"] == [True, True, False, False, True, True, False, False]
    assert free["rollbacks"] == 1


def test_clipping_in_every_step_costs_no_rollback(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 2}, gradient_clipping=0.01)
    _, free = both(pool, config, {"optimizer_sync_after": 1})
    assert free["waited"] == [True] * 6
    assert free["rollbacks"] == 0


@pytest.mark.parametrize(
    "precision",
    [
        {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1,
                  "loss_scale_window": 1}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
    ],
    ids=["fp16", "bf16"],
)  # fmt: skip
@pytest.mark.parametrize("mesh", [{"pipeline": 4}, {"pipeline": 2, "data": 2}], ids=str)
def test_an_overflow_is_skipped_and_the_loss_scale_follows(
    pool: RankPool, mesh: dict[str, int], precision: dict[str, Any]
) -> None:
    config = config_of("zb-h1", mesh, **precision)
    _, free = both(pool, config, pushes={2: float("inf"), 5: float("nan")})
    assert free["rollbacks"] == 2
    skipped = [report["skipped_steps"] for report in free["reports"]]
    assert skipped == ["0", "0", "1", "1", "1", "2"]
    if "fp16" in precision:
        scales = [float(report["loss_scale"]) for report in free["reports"]]
        # Grows after the second step; the overflow of the third halves it.
        assert scales[:4] == [256, 256, 512, 256]


def test_evaluating_saving_and_loading_between_see_steps_that_stand(
    pool: RankPool, tmp_path: Path
) -> None:
    config = config_of("zb-v", {"pipeline": 2}, gradient_clipping=50.0, bf16={"enabled": True})
    # The steps that are evaluated and saved after, and the one that is loaded over.
    pushes = {2: 1e4, 3: 1e4, 4: 1e4}
    _, free = both(pool, config, pushes=pushes, folder=str(tmp_path))
    assert free["saved"] == "global_step4"
    assert free["rollbacks"] >= 3


def test_one_rank_may_ask_for_the_norm_alone(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 4}, gradient_clipping=50.0)
    _, free = both(pool, config, pushes={1: 1e4, 3: 1e4, 5: 1e4}, asking=True)
    assert free["rollbacks"] == 3


def test_what_the_forwards_left_in_buffers_is_taken_back_too(pool: RankPool) -> None:
    fenced = pool.run(2, post_validate_run.train_with_buffers, "fenced")
    free = pool.run(2, post_validate_run.train_with_buffers, "post_validate")
    for with_fence, without in zip(fenced, free, strict=True):
        assert_same(with_fence, without)
        assert without["rollbacks"] == 4


@pytest.mark.parametrize(("recompute", "reduction"), [("full", "token"), ("none", "micro_batch")])
def test_lamb_on_cut_parameters_is_done_again_by_all_ranks(
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
    _, free = both(pool, config, pushes={1: 1e4}, steps=4)
    assert free["rollbacks"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "the gradient norm is (inf|nan) at step 2"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4,
                      "hysteresis": 1}},
            "fp16 gradients overflowed at step 1 with the loss scale at fp16.min_loss_scale",
        ),
    ],
    ids=["fp32", "fp16"],
)  # fmt: skip
def test_gradients_that_end_the_run_end_it_with_the_same_error_and_state(
    pool: RankPool, changes: dict[str, Any], message: str
) -> None:
    fenced_config = config_of("zb-h1", {"pipeline": 2}, **changes)
    free_config = {
        **fenced_config,
        "pipeline": {"schedule": "zb-h1", "optimizer_sync": "post_validate", **ALWAYS},
    }
    fenced = pool.run(2, post_validate_run.overflow, fenced_config, 1)
    free = pool.run(2, post_validate_run.overflow, free_config, 1)
    for (error, state, losses), (free_error, free_state, free_losses) in zip(
        fenced, free, strict=True
    ):
        assert free_error == error
        assert re.search(message, error)
        assert_same_state(state, free_state)
        # Whoever catches it goes on as with the fence.
        assert free_losses == losses


@pytest.mark.parametrize(
    ("what", "rank"), [("raise", 0), ("raise", 3), ("raise in backward", 0), ("kill", 3)]
)
def test_a_rank_that_fails_while_a_verdict_is_out_ends_all(
    pool: RankPool, what: str, rank: int
) -> None:
    config = config_of("1f1b", {"pipeline": 4})
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    # In the first forwards of the second step.
    fault = Fault(what, rank, position={0: 0, 3: 5}[rank], call=13)
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, run_with, fault, config, timeout=30.0)
    reports = {r: message for r, (message, _) in caught.value.errors.items()}
    assert set(reports) == {0, 1, 2, 3}
    for other, message in reports.items():
        if what == "kill":
            assert other == rank or "rank" in message
        else:
            assert "a spark flew" in message


@pytest.mark.parametrize(("what", "rank"), [("raise", 0), ("raise", 3), ("kill", 1)])
def test_a_rank_that_fails_before_its_share_of_the_norm_ends_all(
    pool: RankPool, what: str, rank: int
) -> None:
    config = config_of("zb-h1", {"pipeline": 4})
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, post_validate_run.fail_in_the_step, config, what, rank, timeout=30.0)
    reports = {r: message for r, (message, _) in caught.value.errors.items()}
    assert set(reports) == {0, 1, 2, 3}
    for other, message in reports.items():
        if other != rank:
            assert f"rank {rank}" in message
            assert "a spark flew" in message or what == "kill"


def test_a_share_of_the_norm_that_does_not_come_is_waited_for_no_longer_than_all_else(
    pool: RankPool,
) -> None:
    untied = {"untie_embeddings_and_output_weights": True}
    config = config_of("zb-h1", {"pipeline": 4, "timeout_seconds": 2}, model=untied)
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    with pytest.raises(RanksFailed) as caught:
        pool.run(4, post_validate_run.fail_in_the_step, config, "hang", 3, timeout=30.0)
    reports = {r: message for r, (message, _) in caught.value.errors.items()}
    for other in (0, 1, 2):
        assert "the gradient norm of step 2: the sum over all ranks did not get" in reports[other]
        assert "timed out after mesh.timeout_seconds (2 s)" in reports[other]


def test_the_copy_takes_what_the_docs_say(pool: RankPool) -> None:
    config = config_of("1f1b", {"pipeline": 2}, bf16={"enabled": True})
    config["pipeline"] |= {"optimizer_sync": "post_validate", **ALWAYS}
    for kept, parameters in pool.run(2, post_validate_run.bytes_kept, config):
        # Gradient, master and two moments in fp32; gaps between gradients, and step counters.
        assert 16 * parameters <= kept < 16 * parameters + 256 * 60


def test_the_log_has_the_right_numbers_at_the_right_step(pool: RankPool, tmp_path: Path) -> None:
    config = config_of("1f1b", {"pipeline": 2}, gradient_clipping=50.0)
    config |= {"training": {"train_steps": 6, "eval_interval": 4, "eval_steps": 1}}
    lines = {}
    for sync in ("fenced", "post_validate"):
        folder = str(tmp_path / sync)
        lines[sync] = pool.run(2, post_validate_run.log_of, config, sync, folder, {1: 1e4, 5: 1e4})[
            0
        ]
    assert [line["step"] for line in lines["fenced"]] == [0, 1, 2, 3, 4, 4, 5, 6, 6]
    rollbacks = [line["extra"].pop("rollbacks") for line in lines["post_validate"] if "lr" in line]
    assert rollbacks == [0, 1, 1, 1, 1, 2]
    for fenced, free in zip(lines["fenced"], lines["post_validate"], strict=True):
        for line in (fenced, free):
            for key in [key for key in line if "second" in key or key == "time"]:
                del line[key]
        assert free == fenced

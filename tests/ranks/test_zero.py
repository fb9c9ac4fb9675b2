"""ZeRO stage 1: the same numbers as without it, the state on one data rank, overlap that is right.

The meshes and choices that train like one process with ZeRO are in test_matrix.py.
"""

from functools import partial
from typing import Any

import numpy
import pytest
import torch

from pipemega.pipeline.instructions import Kind
from tests.ranks import post_validate_run, training_run, zero_run
from tests.ranks.pool import RankPool
from tests.ranks.training_run import settings


def zero(bucket: int = 1500, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 1, "reduce_bucket_size": bucket, **keys}}


def config(schedule: str, mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    # Without the warm-up, which leaves the parameters as they are for two steps.
    return settings(mesh=mesh, pipeline={"schedule": schedule}, scheduler=None, **changes)


def assert_equal(mine: Any, theirs: Any, but: tuple[str, ...] = ()) -> None:
    """Of results of `training_run.train`, to the last bit."""
    for key in {"loss", "norm", "eval", "scale", "skipped"} - set(but):
        assert mine[key] == theirs[key], key
    for name, value in theirs["parameters"].items():
        assert numpy.array_equal(mine["parameters"][name], value), name
    for one, other in zip(mine["gradients"], theirs["gradients"], strict=True):
        for name, value in other.items():
            assert numpy.array_equal(one[name], value), name


HALF = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("1f1b", {"training": {"weight_decay_norms_and_biases": False}}),
        ("zb-h1", {"gradient_clipping": 0.05}),
        ("zb-v", HALF),
        ("interleaved", {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
        ("1f1b", HALF | {"communication_data_type": "bf16", "prescale_gradients": True}),
        ("zb-h1", {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_on_two_data_ranks_zero_changes_no_bit_with_overlap_and_without(
    pool: RankPool, schedule: str, changes: dict[str, Any]
) -> None:
    plain = config(schedule, {"pipeline": 2, "data": 2}, **changes)
    cases = [plain, plain | zero(), plain | zero(overlap_comm=True)]
    by_rank = pool.run(4, training_run.train_all, [(case, "float32") for case in cases])
    for off, on, overlapped in by_rank:
        # The norm is a sum in another order, whose last bit may differ.
        assert on["norm"] == pytest.approx(off["norm"], rel=1e-12)
        assert_equal(on, off, but=("norm",))
        assert_equal(overlapped, on)
        if "fp16" in changes:
            assert off["skipped"][0]


@pytest.mark.parametrize("model", ["tied_thrice", "partly_frozen", "choosy"])
def test_ties_frozen_and_unused_parameters_train_as_without_zero(
    pool: RankPool, model: str
) -> None:
    mesh = {"pipeline": 1 if model == "choosy" else 2, "data": 2}
    schedules = ["1f1b"] if model == "choosy" else ["1f1b", "zb-v"]
    base = {"mesh": mesh, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    cases = [
        base | {"pipeline": {"schedule": schedule}} | keys
        for schedule in schedules
        for keys in ({}, zero(64), zero(64, overlap_comm=True))
    ]
    for results in pool.run(mesh["pipeline"] * 2, zero_run.train_small, model, cases):
        for number, result in enumerate(results):
            plain = results[number - number % 3]  # under the same schedule
            assert result["loss"] == plain["loss"]
            for name, value in plain["parameters"].items():
                assert numpy.array_equal(result["parameters"][name], value), name
            for name, value in result["held"].items():
                assert numpy.array_equal(value, result["parameters"][name]), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_no_bucket_leaves_before_the_last_gradient_of_its_stages_is_in(
    pool: RankPool, schedule: str
) -> None:
    mesh = {"pipeline": 2, "data": 2}
    case = config(schedule, mesh, model={"untie_embeddings_and_output_weights": True})
    for seen in pool.run(4, zero_run.departures, case | zero(overlap_comm=True)):
        program = seen["program"]
        assert [number for number, _ in seen["left"]] == list(range(len(seen["stages"])))
        early = [(n, step) for n, step in seen["left"] if not seen["late"][n]]
        assert len(early) > 2
        for number, step in early:
            for stage in seen["stages"][number]:
                last = max(
                    at
                    for at, (kind, of, _) in enumerate(program)
                    if of == stage and kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
                )
                assert program.index(step) >= last
            assert step[0] is (Kind.BACKWARD_WEIGHT if "zb" in schedule else Kind.BACKWARD)
        if schedule in ("zb-v", "interleaved"):
            # A stage that ends first does not wait for the other.
            assert len({step for _, step in early}) == 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_layer_waits_for_its_parameters_however_late_they_come(
    pool: RankPool, schedule: str
) -> None:
    # With a checkpoint that runs layers again, and an embedding that no layer of its own calls.
    case = config(schedule, {"pipeline": 2, "data": 2}, model={"recompute": "full"})
    cases = [case | zero(), case | zero(overlap_comm=True)]
    for on, overlapped in pool.run(4, zero_run.train_with_late_parameters, cases):
        assert_equal(overlapped, on)


def test_the_state_says_which_elements_of_each_parameter_are_here(pool: RankPool) -> None:
    for changes in ({}, HALF):
        case = config("1f1b", {"pipeline": 1, "data": 3}, **changes)
        by_rank = pool.run(3, zero_run.spans_of, case | zero(overlap_comm=True))
        assert any(start == stop for told in by_rank for start, stop, *_ in told.values())
        for name, (_, _, size, _) in by_rank[0].items():
            parts = sorted(told[name][:2] for told in by_rank if told[name][0] < told[name][1])
            assert [element for start, stop in parts for element in range(start, stop)] == [
                *range(size)
            ]


# Pushed from outside, or each step clipped: what is pushed must not be on its way yet.
@pytest.mark.parametrize(
    ("overlap", "clip", "pushes"), [(False, 0.5, {2: 1000.0, 4: float("inf")}), (True, 0.05, {})]
)
def test_a_step_that_did_not_wait_for_its_norm_is_the_fenced_one(
    pool: RankPool, overlap: bool, clip: float, pushes: dict[int, float]
) -> None:
    case = config("zb-v", {"pipeline": 2, "data": 2}, gradient_clipping=clip, **HALF)
    case |= zero(overlap_comm=overlap)
    both = partial(post_validate_run.train_both, pushes=pushes)
    for fenced, free in pool.run(4, both, case, {"optimizer_sync_after": 0}):
        assert free["rollbacks"] >= 2
        assert free["loss"] == fenced["loss"]
        assert free["reports"] == fenced["reports"]
        for name, value in fenced["state"].items():
            assert numpy.array_equal(free["state"][name], value), name


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_owners_add_up_in_the_order_of_ranks(
    pool: RankPool, dtype: torch.dtype | None, window: int
) -> None:
    for got, want in pool.run(3, zero_run.sum_of_buckets, dtype, window):
        assert got == want


@pytest.mark.parametrize("beside", [False, True])
def test_every_rank_gets_every_slice(pool: RankPool, beside: bool) -> None:
    want = [10.0 * number + rank for number in range(3) for rank in (0, 0, 1, 1, 2, 2)]
    assert pool.run(3, zero_run.gathered, beside) == 3 * [want]


def test_a_data_rank_that_stays_away_is_missed_by_the_name_of_the_bucket(pool: RankPool) -> None:
    message, _ = pool.run(2, zero_run.one_rank_stays_away)
    assert message.startswith("gradient bucket 0 (layers.0.weight) did not get through: ")
    assert "imed out" in message

"""ZeRO stage 1: the same numbers as without it, sharded state, correct overlap.

test_matrix.py compares ZeRO on more meshes and options with one process.
"""

from functools import partial
from typing import Any

import numpy
import pytest
import torch

from pipemega.pipeline.plan.instructions import Kind
from tests.ranks.optimizer import post_validate_runs, zero_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some, some_cases


def zero(bucket: int = 1500, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 1, "reduce_bucket_size": bucket, **keys}}


def config(schedule: str, mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    # 16 is no multiple for 3 data ranks; the overflow of fp16 is one of 12 micro-batches.
    batch = {"train_batch_size": 24 if mesh.get("data") == 3 or "fp16" in changes else 16}
    # Without a schedule: its warm-up would not change the parameters for two steps.
    return settings(**batch, mesh=mesh, pipeline={"schedule": schedule}, scheduler=None, **changes)


def assert_equal(mine: Any, theirs: Any, but: tuple[str, ...] = ()) -> None:
    """Compare results of `training_runs.train` bit by bit."""
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
        pytest.param(
            "1f1b",
            {"training": {"weight_decay_norms_and_biases": False}},
            marks=pytest.mark.sweep,
        ),
        pytest.param("zb-h1", {"gradient_clipping": 0.05}, marks=pytest.mark.sweep),
        ("zb-v", HALF),
        pytest.param(
            "interleaved",
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "1f1b",
            HALF | {"communication_data_type": "bf16", "prescale_gradients": True},
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "zb-h1",
            {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_zero_on_two_data_ranks_equals_the_run_without_it_bitwise_with_any_overlap(
    pool: RankPool, schedule: str, changes: dict[str, Any]
) -> None:
    plain = config(schedule, {"pipeline": 2, "data": 2}, **changes)
    cases = [plain, plain | zero(), plain | zero(overlap_comm=True)]
    by_rank = pool.run(4, zero_runs.train_all_and_as_on_a_gpu, cases)
    for off, on, overlapped, as_on_a_gpu in by_rank:
        assert_equal(as_on_a_gpu, on)
        # The norm is summed in another order, so its last bit may differ.
        assert on["norm"] == pytest.approx(off["norm"], rel=1e-12)
        assert_equal(on, off, but=("norm",))
        assert_equal(overlapped, on)
        if "fp16" in changes:
            assert off["skipped"][0]


def test_offloaded_slices_train_as_slices_on_the_device_bitwise(pool: RankPool) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    mesh = {"pipeline": 2, "data": 2}
    cases = [
        config("zb-v", mesh, gradient_clipping=0.05) | zero(overlap_comm=True, **offload),
        config("1f1b", mesh, **HALF) | zero(**offload),
    ]
    for results in pool.run(4, zero_runs.train_with_and_without_offload, cases):
        for on_device, offloaded in zip(results[: len(cases)], results[len(cases) :], strict=True):
            assert_equal(offloaded, on_device)


@pytest.mark.parametrize("model", ["tied_thrice", "partly_frozen", "rank_dependent"])
def test_tied_frozen_and_unused_parameters_train_as_without_zero(
    pool: RankPool, model: str
) -> None:
    mesh = {"pipeline": 1 if model == "rank_dependent" else 2, "data": 2}
    schedules = ["1f1b"] if model == "rank_dependent" else ["1f1b", "zb-v"]
    base = {"mesh": mesh, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    cases = [
        base | {"pipeline": {"schedule": schedule}} | keys
        for schedule in schedules
        for keys in ({}, zero(64), zero(64, overlap_comm=True))
    ]
    for results in pool.run(mesh["pipeline"] * 2, zero_runs.train_small, model, cases):
        for number, result in enumerate(results):
            plain = results[number - number % 3]  # with the same schedule
            assert result["loss"] == plain["loss"]
            for name, value in plain["parameters"].items():
                assert numpy.array_equal(result["parameters"][name], value), name
            for name, value in result["held"].items():
                assert numpy.array_equal(value, result["parameters"][name]), name


@pytest.mark.parametrize("schedule", some(["1f1b", "zb-h1", "zb-v", "interleaved"], 0, 2))
def test_no_bucket_starts_before_the_last_gradient_of_its_stages_is_final(
    pool: RankPool, schedule: str
) -> None:
    mesh = {"pipeline": 2, "data": 2}
    case = config(schedule, mesh, model={"untie_embeddings_and_output_weights": True})
    # Several buckets per rank become final early.
    case["pipeline"] |= {"partition": "parameters"}
    for seen in pool.run(4, zero_runs.bucket_starts, case | zero(overlap_comm=True)):
        program = seen["program"]
        assert [number for number, _ in seen["started"]] == list(range(len(seen["stages"])))
        early = [(n, step) for n, step in seen["started"] if not seen["late"][n]]
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
            # A stage that finishes first does not wait for the other.
            assert len({step for _, step in early}) == 2


@pytest.mark.parametrize("schedule", some(["1f1b", "zb-v"], 1))
def test_every_layer_waits_for_its_parameters_if_they_arrive_late(
    pool: RankPool, schedule: str
) -> None:
    # With recomputation of layers, and an embedding that is called by another layer.
    case = config(schedule, {"pipeline": 2, "data": 2}, model={"recompute": "full"})
    cases = [case | zero(), case | zero(overlap_comm=True)]
    for on, overlapped in pool.run(4, zero_runs.train_with_late_parameters, cases):
        assert_equal(overlapped, on)


def test_the_state_contains_the_span_of_each_parameter_on_this_rank(pool: RankPool) -> None:
    for changes in ({}, HALF):
        case = config("1f1b", {"pipeline": 1, "data": 3}, **changes)
        by_rank = pool.run(3, zero_runs.spans_of, case | zero(overlap_comm=True))
        assert any(start == stop for spans in by_rank for start, stop, *_ in spans.values())
        for name, (_, _, size, _) in by_rank[0].items():
            parts = sorted(s[name][:2] for s in by_rank if s[name][0] < s[name][1])
            assert [element for start, stop in parts for element in range(start, stop)] == [
                *range(size)
            ]


# Gradients changed by the test must not be in flight; with overlap each step is clipped instead.
@pytest.mark.parametrize(
    ("overlap", "clip", "pushes"),
    some_cases([(False, 0.5, {2: 1000.0, 4: float("inf")}), (True, 0.05, {})], 1),
)
def test_a_post_validated_step_equals_the_fenced_step(
    pool: RankPool, overlap: bool, clip: float, pushes: dict[int, float]
) -> None:
    case = config("zb-v", {"pipeline": 2, "data": 2}, gradient_clipping=clip, **HALF)
    case |= zero(overlap_comm=overlap)
    both = partial(post_validate_runs.train_both, pushes=pushes)
    for fenced, free in pool.run(4, both, case, {"optimizer_sync_after": 0}):
        assert free["rollbacks"] >= 2
        assert free["loss"] == fenced["loss"]
        assert free["reports"] == fenced["reports"]
        for name, value in fenced["state"].items():
            assert numpy.array_equal(free["state"][name], value), name


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_owners_sum_in_the_order_of_ranks(
    pool: RankPool, dtype: torch.dtype | None, window: int
) -> None:
    for got, want in pool.run(3, zero_runs.sum_of_buckets, dtype, window):
        assert got == want


@pytest.mark.parametrize("overlap", [False, True])
def test_the_all_gather_brings_every_slice_to_every_rank(pool: RankPool, overlap: bool) -> None:
    want = [10.0 * number + rank for number in range(3) for rank in (0, 0, 1, 1, 2, 2)]
    assert pool.run(3, zero_runs.gathered, overlap) == 3 * [want]


def test_the_error_of_a_missing_data_rank_names_the_bucket(pool: RankPool) -> None:
    message, _ = pool.run(2, zero_runs.one_rank_does_not_join)
    assert message.startswith("gradient bucket 0 (layers.0.weight) over ranks 0, 1: ")
    assert "imed out" in message

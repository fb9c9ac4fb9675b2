"""ResNet with deferred batch norms trains like one process, with the statistics of whole steps."""

from typing import Any

import pytest
import torch

from tests.ranks.engine import batch_norm_runs
from tests.ranks.pool import RankPool

ONE_STAGE = ("sequential", "gpipe", "1f1b")
SPLIT = ("zb-h1", "zb-h2")
TWO_STAGES = (
    "interleaved", "looped-bfs", "interleaved-zb", "zb-v", "v-half", "v-min", "1f1b-v", "dualpipe-v"
)  # fmt: skip


def config(schedule: str = "1f1b", **changes: Any) -> dict[str, Any]:
    section = {"schedule": schedule, **changes.pop("pipeline", {})}
    return {"pipeline": section, **changes}


def assert_like_one_process(got: dict[str, Any], joined: int = 1) -> None:
    """Compare with one torch module; `joined`: micro-batches that share their statistics."""
    torch.set_default_dtype(torch.float64)
    try:
        steps = []
        for step in range(batch_norm_runs.STEPS):
            batches = list(batch_norm_runs.micro_batches(step))
            groups = [batches[i : i + joined] for i in range(0, len(batches), joined)]
            steps.append([tuple(map(torch.cat, zip(*group, strict=True))) for group in groups])
    finally:
        torch.set_default_dtype(torch.float32)
    want = batch_norm_runs.train_plain(got["start"], steps)  # type: ignore[arg-type]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-10)
    for mine, theirs in zip(got["gradients"], want["gradients"], strict=True):
        assert_close(mine, theirs)
    assert_close(got["end"], want["end"])


def assert_close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


def assert_bitwise(results: list[dict[str, Any]]) -> None:
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]
        for name, value in results[0]["end"].items():
            assert torch.equal(other["end"][name], value), name


@pytest.mark.parametrize(
    ("ranks", "data", "schedules"),
    [
        (2, 1, ("1f1b", "zb-h1", "interleaved", "zb-v")),
        (2, 2, ("1f1b", "gpipe")),
        pytest.param(2, 1, ONE_STAGE + SPLIT + TWO_STAGES, marks=pytest.mark.sweep),
        pytest.param(2, 2, ONE_STAGE, marks=pytest.mark.sweep),
        pytest.param(4, 2, ONE_STAGE + SPLIT + TWO_STAGES, marks=pytest.mark.sweep),
        pytest.param(4, 1, ONE_STAGE + SPLIT, marks=pytest.mark.sweep),
    ],
)
def test_a_resnet_trains_like_one_process(
    pool: RankPool, ranks: int, data: int, schedules: tuple[str, ...]
) -> None:
    mesh = {"data": data, "pipeline": ranks // data}
    configs = [config(schedule, mesh=mesh) for schedule in schedules]
    by_rank = pool.run(ranks, batch_norm_runs.train_all, configs, timeout=300.0)
    for results in by_rank:
        assert_bitwise([by_rank[0][0], *results])
    assert_like_one_process(by_rank[0][0])


RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1}}


@pytest.mark.parametrize(
    ("ranks", "data", "changes"),
    [
        (1, 1, RECOMPUTED),
        (2, 1, RECOMPUTED | {"schedule": "zb-h1"}),
        (2, 1, {"pipeline": {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}}),
        (2, 2, {"zero_optimization": {"stage": 1}}),
    ],
    ids=str,
)
def test_statistics_are_counted_once_with_each_setting(
    pool: RankPool, ranks: int, data: int, changes: dict[str, Any]
) -> None:
    mesh = {"data": data, "pipeline": ranks // data}
    results = pool.run(ranks, batch_norm_runs.train, config(mesh=mesh, **changes))
    assert_bitwise(list(results))
    assert_like_one_process(results[0])


@pytest.mark.parametrize(
    ("schedule", "changes"), [("1f1b", {}), ("zb-h1", RECOMPUTED)], ids=["stored", "recomputed"]
)
def test_sync_joins_the_micro_batches_of_the_data_ranks(
    pool: RankPool, schedule: str, changes: dict[str, Any]
) -> None:
    pipeline = 2 if schedule == "zb-h1" else 1
    sizes = {"mesh": {"data": 2, "pipeline": pipeline}, "model": {"sync": True}}
    results = pool.run(2 * pipeline, batch_norm_runs.train, config(schedule, **sizes, **changes))
    assert_bitwise(list(results))
    assert_like_one_process(results[0], joined=2)


@pytest.mark.parametrize("changes", [{}, RECOMPUTED], ids=["stored", "recomputed"])
def test_sync_in_a_partial_step_counts_the_samples_of_each_rank(
    pool: RankPool, changes: dict[str, Any]
) -> None:
    """One rank has 3 samples and the other 1; then both have none."""
    model = {"model": {"sync": True}}
    joined = config(train_micro_batch_size_per_gpu=6, **model, **changes)
    (want,) = pool.run(1, batch_norm_runs.train_epoch, joined)
    for got in pool.run(2, batch_norm_runs.train_epoch, config(**model, **changes)):
        assert_close(got, want)

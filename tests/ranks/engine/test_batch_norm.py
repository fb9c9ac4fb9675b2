"""ResNet with deferred batch norms trains like one process, with the statistics of whole steps."""

import math
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


RECOMPUTED = {"activation_checkpoint_interval": 1}
POST_VALIDATED = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}


def assert_all_like_one_process(
    pool: RankPool, mesh: dict[str, int], configs: list[dict[str, Any]]
) -> None:
    """Train each config: all have the same bits, on all ranks, and are equal to one process."""
    configs = [each | {"mesh": mesh} for each in configs]
    by_rank = pool.run(math.prod(mesh.values()), batch_norm_runs.train_all, configs, timeout=300.0)
    for results in by_rank:
        assert_bitwise([by_rank[0][0], *results])
    assert_like_one_process(by_rank[0][0])


@pytest.mark.parametrize(
    ("mesh", "configs"),
    [
        ({"pipeline": 2}, [config("zb-v"), config("zb-h1", pipeline=RECOMPUTED),
                           config("1f1b", pipeline=POST_VALIDATED)]),
        pytest.param({"data": 2}, [config("1f1b"),
                       config("gpipe", pipeline=RECOMPUTED, zero_optimization={"stage": 1})],
                     marks=pytest.mark.sweep),
    ],
    ids=["pipeline", "data"],
)  # fmt: skip
def test_a_resnet_trains_like_one_process(
    pool: RankPool, mesh: dict[str, int], configs: list[dict[str, Any]]
) -> None:
    assert_all_like_one_process(pool, mesh, configs)


@pytest.mark.sweep
@pytest.mark.parametrize("how", [{}, RECOMPUTED], ids=["stored", "recomputed"])
@pytest.mark.parametrize(
    ("mesh", "schedules"),
    [
        ({"pipeline": 2}, ONE_STAGE + SPLIT + TWO_STAGES),
        ({"data": 2}, ONE_STAGE),
        ({"data": 2, "pipeline": 2}, ONE_STAGE + SPLIT + TWO_STAGES),
        ({"pipeline": 4}, ONE_STAGE + SPLIT),
    ],
    ids=["pipeline 2", "data 2", "data 2 x pipeline 2", "pipeline 4"],
)
def test_a_resnet_trains_like_one_process_under_every_schedule(
    pool: RankPool, mesh: dict[str, int], schedules: tuple[str, ...], how: dict[str, Any]
) -> None:
    assert_all_like_one_process(pool, mesh, [config(name, pipeline=how) for name in schedules])


def test_sync_joins_the_micro_batches_of_the_data_ranks(pool: RankPool) -> None:
    mesh, model = {"data": 2, "pipeline": 2}, {"sync": True}
    given = config("zb-h1", pipeline=RECOMPUTED, mesh=mesh, model=model)
    results = pool.run(4, batch_norm_runs.train, given)
    assert_bitwise(list(results))
    assert_like_one_process(results[0], joined=2)


@pytest.mark.parametrize("how", [{}, RECOMPUTED], ids=["stored", "recomputed"])
def test_sync_in_a_partial_step_counts_the_samples_of_each_rank(
    pool: RankPool, how: dict[str, Any]
) -> None:
    """One rank has 3 samples and the other 1; then both have none."""
    given = config(model={"sync": True}, pipeline=how)
    (want,) = pool.run(
        1, batch_norm_runs.train_epoch, given | {"train_micro_batch_size_per_gpu": 6}
    )
    for got in pool.run(2, batch_norm_runs.train_epoch, given):
        assert_close(got, want)

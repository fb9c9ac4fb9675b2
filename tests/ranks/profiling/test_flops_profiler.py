"""The table of `flops_profiler` covers all stages, and the FLOPs of all tensor ranks."""

import io
from contextlib import redirect_stdout
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.training_runs import MICRO, build, data, settings


def profiled(mesh: dict[str, Any], schedule: str) -> tuple[str, dict[str, Any]]:
    """Return what this rank prints, and the costs of the modules by name."""
    config = settings(
        mesh=mesh,
        # The ranks of the layers are those of this cut.
        pipeline={"schedule": schedule, "partition": "parameters"},
        model={"num_layers": 2, "make_vocab_size_divisible_by": 1},
        flops_profiler={"enabled": True, "profile_step": 2},
        train_batch_size=4 * MICRO * mesh.get("data", 1),
    )
    engine = build(config)
    with redirect_stdout(io.StringIO()) as out:
        for step in range(2):
            engine.train_batch(data(engine, step))
    assert engine._profiler is not None
    profile = engine._profiler.profile
    found = {}
    if profile is not None:
        found = {
            cost.name: (rank, cost.kind, cost.level, cost.parameters, profile.tensor * cost.flops)
            for rank, cost in profile.modules
        }
        assert all(set(rank.seconds) >= {"forward", "backward"} for rank in profile.ranks)
    return out.getvalue(), found


@pytest.mark.parametrize(
    ("mesh", "schedule", "stages"),
    [
        ({"pipeline": 2, "tensor": 2}, "zb-v", [0, 0, 1, 1, 0, 0]),
        pytest.param(
            {"pipeline": 2, "data": 2}, "1f1b", [0, 0, 0, 1, 1, 1], marks=pytest.mark.sweep
        ),
    ],
)
def test_rank_0_prints_one_table_of_all_stages(
    pool: RankPool, mesh: dict[str, Any], schedule: str, stages: list[int]
) -> None:
    ((_, expected),) = pool.run(1, profiled, {}, "1f1b")
    (text, found), *others = pool.run(4, profiled, mesh, schedule)
    assert others == [("", {})] * 3
    assert text.count("flops profile of step 2\n") == 1
    # Equal but for the rank.
    assert [(n, cost[1:]) for n, cost in found.items()] == [
        (n, cost[1:]) for n, cost in expected.items()
    ]
    assert [cost[0] for cost in found.values() if cost[2] == 1] == stages

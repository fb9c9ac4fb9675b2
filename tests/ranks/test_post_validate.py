"""The step that does not wait for the norm against the one that does: the same, to the last bit."""

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
    sizes = config["mesh"].values()
    results = pool.run(int(numpy.prod(list(sizes))), _both, config, sync, how)
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


MESHES = [{"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "data": 2}, {"pipeline": 2, "tensor": 2}]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_that_does_not_wait_is_the_step_that_waits(
    pool: RankPool, mesh: dict[str, int], schedule: str
) -> None:
    if schedule == "zb-v" and mesh["pipeline"] == 4:
        schedule = "zb-h2"  # the model has layers for two ranks of two stages
    # Tied embeddings, dropout, micro-batches of unequal weight; steps 1 and 4 are clipped.
    config = config_of(schedule, mesh, gradient_clipping=50.0)
    fenced, free = both(pool, config, pushes={1: 1e4, 4: 1e4})
    assert fenced["waited"] == [True] * 6
    assert free["waited"] == [False] * 6
    assert free["rollbacks"] == 2
    norms = [float(report["grad_norm"]) for report in free["reports"]]
    assert [norm > 50.0 for norm in norms] == [False, True, False, False, True, False]

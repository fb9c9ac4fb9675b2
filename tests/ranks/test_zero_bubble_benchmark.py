"""The code of benchmarks/zero_bubble: every schedule runs in the layout with most axes."""

from typing import Any

from benchmarks.zero_bubble.worker import measure
from tests.ranks.pool import RankPool

TASK: dict[str, Any] = {
    "mesh": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    "schedules": ["1f1b", "zb-v"],
    "samples": 4,
    "blocks": 4,
    "block": [2e-3, 2e-3, 2e-3],
    "rounds": 1,
    "hidden": 8,
    "seq": 4,
}


def test_each_rank_sleeps_its_share_of_the_step(pool: RankPool) -> None:
    least = sum(TASK["block"]) * TASK["samples"] * TASK["blocks"] / 4
    for schedules in pool.run(4, measure, TASK):
        assert list(schedules) == TASK["schedules"]
        for steps in schedules.values():
            assert len(steps) == TASK["rounds"]
            assert all(end - start >= least for start, end in steps)

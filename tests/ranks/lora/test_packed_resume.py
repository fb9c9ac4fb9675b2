"""A run with adapters on packed samples resumes bit for bit."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.ranks.engine import finetuning_runs
from tests.ranks.pool import RankPool

LORA = {"r": 4, "alpha": 8.0, "dropout": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "mesh": {"pipeline": 2, "data": 2},
            "pipeline": {"schedule": "zb-v"},
            "zero_optimization": {"stage": 1},
        },
    ],
    ids=str,
)
def test_a_resumed_run_on_packed_samples_equals_the_uninterrupted_one(
    pool: RankPool, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = finetuning_runs.write_records(tmp_path)
    changes = {**changes, "lora": LORA}
    whole = pool.run(4, finetuning_runs.train, folder, changes, 4)[0]
    pool.run(4, finetuning_runs.train, folder, changes, 4, 2)
    resumed = pool.run(4, finetuning_runs.train, folder, changes, 4)[0]
    assert len(whole[0]) == 4
    assert resumed[0] == whole[0][2:]
    assert resumed[1] == whole[1]
    assert any(".lora_A." in name for name in whole[2])
    for name, value in whole[2].items():
        assert numpy.array_equal(resumed[2][name], value), name

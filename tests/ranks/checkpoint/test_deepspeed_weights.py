"""Checkpoints that DeepSpeed wrote on 2 x 2 ranks with ZeRO load on 2 x 2 ranks with ZeRO."""

from pathlib import Path

import pytest
import torch

from pipemega.checkpoint.deepspeed import ImportOptions, import_deepspeed
from pipemega.checkpoint.deepspeed.deepspeed_weights import read_deepspeed
from tests.ranks.checkpoint import deepspeed_runs
from tests.ranks.pool import RankPool

FOLDER = Path(__file__).parents[2] / "golden" / "deepspeed_0.19.8" / "pipeline"


@pytest.mark.parametrize("way", ["directly", "universal", "imported"])
def test_each_rank_loads_its_shards_of_the_fp32_master_weights(pool: RankPool, way, tmp_path):
    folder, tag = FOLDER, None
    if way == "imported":
        folder = tmp_path
        import_deepspeed(str(FOLDER), str(folder), ImportOptions())
    elif way == "universal":
        tag = "global_step3_universal"
    stored = read_deepspeed(FOLDER / "global_step3").tensors
    for state, client, scales in pool.run(4, deepspeed_runs.load, str(folder), tag):
        assert client == {"epoch": 3}
        # A universal checkpoint has no buffers; they stay as they are.
        assert scales == [0.0 if way == "universal" else 1.0]
        for name, values in state.items():
            source = name.removeprefix("layers.").replace("6.word", "1.word")
            assert torch.equal(torch.tensor(values), stored[source].full()), name


def test_all_ranks_refuse_another_model_with_the_same_error(pool: RankPool):
    errors = set(pool.run(4, deepspeed_runs.load, str(FOLDER), None, 16))
    assert len(errors) == 1
    assert "parameters/layers.2.lin.weight is [16, 8] in this run and [8, 8] in the" in errors.pop()

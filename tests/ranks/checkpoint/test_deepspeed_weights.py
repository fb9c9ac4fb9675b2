"""Checkpoints that DeepSpeed wrote on 2 x 2 ranks with ZeRO load on 2 x 2 ranks with ZeRO."""

from pathlib import Path

import pytest
import torch

from pipemega.checkpoint.deepspeed.deepspeed_weights import read_deepspeed
from pipemega.checkpoint.deepspeed.weights_loading import ImportOptions, import_deepspeed
from tests.ranks.checkpoint import deepspeed_runs
from tests.ranks.compat.megatron_layers import HIDDEN, RANKS, WIDTH, loaded_from_deepspeed
from tests.ranks.pool import RankPool
from tests.unit.checkpoint.deepspeed_files import write_pipeline

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


def test_each_tensor_rank_of_a_script_loads_the_shard_that_the_same_rank_saved(
    pool: RankPool, tmp_path
):
    """Also if the shards have several parts, whose order in the whole the names do not say."""
    bias = torch.randn(WIDTH)
    shards = [
        {
            "up": torch.randn(HIDDEN // RANKS, WIDTH),
            "down": torch.randn(WIDTH, HIDDEN // RANKS),
            "bias": bias,
        }
        for _ in range(RANKS)
    ]
    info = {
        "tp_replicated_parameter_patterns": [r"\d+\.bias"],
        "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.up"],
        "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
    }
    write_pipeline(tmp_path / "two", {0: shards}, state={"universal_checkpoint_info": info})
    for shard, (loaded, error) in zip(
        shards, pool.run(RANKS, loaded_from_deepspeed, str(tmp_path / "two")), strict=True
    ):
        assert error == ""
        assert all(map(torch.equal, loaded, [t.double() for t in shard.values()]))
    quarters = [
        {"up": s["up"].chunk(2)[i], "down": s["down"].chunk(2, 1)[i], "bias": bias}
        for s in shards
        for i in range(2)
    ]
    write_pipeline(tmp_path / "four", {0: quarters}, state={"universal_checkpoint_info": info})
    (_, first), (_, other) = pool.run(RANKS, loaded_from_deepspeed, str(tmp_path / "four"))
    assert first == other
    assert "each tensor-parallel shard of parameters/layers.0.up in" in first
    assert "each of the 2 tensor ranks of this run needs one consecutive slice" in first

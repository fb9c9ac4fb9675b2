"""Steps on whole batches, outputs of steps, and evaluations of whole data sets, on any mesh."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.engine import batch_runs
from tests.ranks.engine.test_training_data import ranks_of
from tests.ranks.pool import RankPool, RanksFailed


@pytest.mark.parametrize(
    ("mesh", "changes", "loss"),
    [
        ({}, {}, "in place"),
        ({"pipeline": 2}, {"pipeline": {"schedule": "zb-v"}}, "in place"),
        ({"pipeline": 2}, {"pipeline": {"schedule": "interleaved"}}, "mean"),
        ({"pipeline": 3}, {"pipeline": {"activation_checkpoint_interval": 2}}, "mean"),
        (
            {"pipeline": 2},
            {"pipeline": {"optimizer_sync": "post_validate", "optimizer_sync_after": 0},
             "gradient_clipping": 0.1},
            "mean",
        ),
        ({"pipeline": 2, "data": 2}, {"pipeline": {"schedule": "zb-h1"}}, "weighted"),
    ],
    ids=str,
)  # fmt: skip
def test_a_whole_batch_trains_bitwise_like_its_micro_batches_and_returns_their_outputs(
    pool: RankPool, mesh: dict[str, int], changes: dict[str, Any], loss: str
) -> None:
    results = pool.run(ranks_of(mesh), batch_runs.train, {"mesh": mesh} | changes, loss)
    for result in results:
        one, other = result["iterator"], result["batch"]
        assert one["loss"] == other["loss"]
        assert one["samples"] == other["samples"]
        for name, value in one["parameters"].items():
            np.testing.assert_array_equal(value, other["parameters"][name])
    count = 4 // mesh.get("data", 1)
    last_stage_only = {0, count} if mesh.get("pipeline", 1) > 1 else {count}
    assert {n for result in results for n in result["batch"]["outputs"]} == last_stage_only


@pytest.mark.parametrize("mesh", [{}, {"pipeline": 3}, {"pipeline": 2, "data": 2}], ids=str)
def test_an_evaluation_averages_over_all_samples_of_the_data(
    pool: RankPool, mesh: dict[str, int]
) -> None:
    results = pool.run(ranks_of(mesh), batch_runs.evaluate, {"mesh": mesh})
    (expected,) = {r["reference"] for r in results if r["reference"] is not None}
    for result in results:
        for key in ("dataset", "batch", "again"):
            assert result[key] == pytest.approx(expected, rel=1e-10), key
        assert result["stream"] == pytest.approx(results[0]["stream"], rel=1e-10)
        # Three batches of 8 samples: the data repeat.
        assert result["repeated"] != pytest.approx(expected, rel=1e-6)
    seen = [r["seen"] for r in results if r["seen"]]
    assert sum(len(labels) for rank in seen for _, labels in rank) == 13
    if "data" not in mesh:
        (labels,) = [[n for _, part in rank for n in part] for rank in seen]
        valid = batch_runs.pairs(13, seed=1)
        assert labels == [float(y[0]) for _, y in valid]
        assert [r["outputs"] for r in results if r["outputs"] is not None] == [[2] * 6 + [1]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "one rank",
            "batch has 7 samples along dim 0, and needs train_batch_size / mesh.data (8 / 1 = 8), "
            "the samples of one data rank: give it 8, or set train_batch_size to 7; drop a smaller "
            "last batch, or give initialize() the data and set training.epochs",
        ),
        (
            "one rank without a batch",
            "batch: inputs has 7 samples along dim 0, and labels has 8: all tensors of a batch",
        ),
        ("lengths", "batch: inputs['x'] has 8 samples along dim 0, and labels has 7: all tensors"),
        ("no dim", "batch: inputs[1] is a tensor without dims, and a batch is cut along dim 0"),
        ("no pair", "batch is a dict, and must be a pair (inputs, labels)"),
        ("three", "batch is a tuple of 3 members, and must be a pair (inputs, labels)"),
        ("array", "batch: inputs is a numpy array: pass torch.from_numpy(inputs)"),
        ("both", "train_batch() takes an iterator or a batch, not both"),
        (
            "sizes",
            "eval_batch(batch=...): the ranks of data rank 0 have batches of 1 and 3 samples: all "
            "pipeline and tensor ranks of a data rank must pass the same batch",
        ),
        ("nothing to evaluate", "eval_batch() needs either an iterator over micro-batches"),
        (
            "epochs",
            "training.epochs (2) counts passes over the training data of the engine, but "
            "train_batch() got an iterator or a batch: give the data to initialize(), "
            "engine.set_training_data() or Trainer(train=...), or set training.train_steps",
        ),
    ],
)
def test_a_batch_that_cannot_be_used_is_the_same_error_on_every_rank(
    pool: RankPool, kind: str, message: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, batch_runs.wrong_batch, kind, {"mesh": {"pipeline": 3}})
    assert len(caught.value.errors) == 3
    for text, _ in caught.value.errors.values():
        assert message in text


def test_a_batch_that_was_rolled_back_is_not_awaited_by_a_middle_stage(
    pool: RankPool, tmp_path: Path
) -> None:
    """The rank without a batch trained the next step at once, and waited for the others there."""
    first, *others = pool.run(3, batch_runs.roll_back_a_batch, str(tmp_path / "run"))
    assert [math.isnan(loss) for loss in first] == [False, False, True, False]
    assert all(str(other) == str(first) for other in others)

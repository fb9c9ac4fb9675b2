"""Pipelines of stock modules train like the modules themselves."""

from typing import Any

import torch

from tests.ranks import traced_models
from tests.ranks.pool import RankPool

ON_TWO = {"mesh": {"pipeline": 2}}
ZB_V = ON_TWO | {"pipeline": {"schedule": "zb-v"}}
# Split backward, where a rank has the first and the last stage and so both copies of a tied weight.
CASES: list[Any] = [
    ("resnet", True, {}, ON_TWO),
    ("resnet", False, {"exec_seq": traced_models.RESNET_SEQUENCE}, ZB_V),
    ("vit", False, {}, ON_TWO),
    ("vit", True, {}, ZB_V),
    ("text", False, {}, ZB_V),
    ("text", True, {}, ON_TWO),
]


def test_a_module_trains_like_itself_with_every_gradient_and_running_statistic(
    pool: RankPool,
) -> None:
    by_rank = pool.run(2, traced_models.train_all, CASES)
    for (model, *_), results in zip(CASES, zip(*by_rank, strict=True), strict=True):
        traced_models.assert_like_the_module(results, model)
    # The layers of the sequence: conv1 bn1 relu layer1.0 layer1.1 | ...
    assert 5 in by_rank[0][1]["bounds"], "a stage starts at SPLIT"


def test_data_ranks_with_zero_train_like_the_module(pool: RankPool) -> None:
    config = {"mesh": {"pipeline": 2, "data": 2}, "zero_optimization": {"stage": 1}}
    cases = [("text", False, {}, config), ("vit", True, {}, config)]
    by_rank = pool.run(4, traced_models.train_all, cases)
    for (model, *_), results in zip(cases, zip(*by_rank, strict=True), strict=True):
        traced_models.assert_like_the_module(results, model, data_ranks=2)


def test_weights_of_a_factory_and_dropout_are_the_same_on_every_mesh(pool: RankPool) -> None:
    options = {"dropout": 0.3}
    config = {"pipeline": {"activation_checkpoint_interval": 2}}
    alone = pool.run(1, traced_models.train, "vit", False, options, config)[0]
    split = pool.run(4, traced_models.train, "vit", False, options, {"mesh": {"pipeline": 4}})
    for result in split:
        assert result["losses"] == alone["losses"]
        for key in ("start", "end"):
            for name, tensor in alone[key].items():
                assert torch.equal(result[key][name], tensor), name

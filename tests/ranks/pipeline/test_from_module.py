"""Pipelines of stock modules train like the modules themselves."""

from typing import Any

import pytest
import torch

from tests.ranks import traced_models
from tests.ranks.pool import RankPool


def assert_like_the_module(results: list[dict[str, Any]], model: str) -> None:
    plain = traced_models.train_plain(model, results[0]["start"])
    for result in results:
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        assert list(result["end"]) == list(plain["end"])
        for name, want in plain["end"].items():
            assert torch.allclose(result["end"][name], want, rtol=1e-10, atol=1e-12), name


ZB_V = {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "zb-v"}}
CASES: list[Any] = [
    ("resnet", True, {}, {"mesh": {"pipeline": 2}}),
    ("resnet", False, {"exec_seq": traced_models.RESNET_SEQUENCE}, ZB_V),
    ("vit", False, {}, {"mesh": {"pipeline": 2}}),
    ("vit", True, {}, ZB_V),
    ("text", False, {}, ZB_V),
    ("text", True, {}, {"mesh": {"pipeline": 2}}),
]


def test_a_module_trains_like_itself_with_every_gradient_and_running_statistic(
    pool: RankPool,
) -> None:
    by_rank = pool.run(2, traced_models.train_all, CASES)
    for (model, *_), results in zip(CASES, zip(*by_rank, strict=True), strict=True):
        assert_like_the_module(list(results), model)

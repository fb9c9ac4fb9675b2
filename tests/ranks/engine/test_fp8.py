"""fp8 linears: the values of torchao's own modules, on every mesh and schedule."""

import importlib.util
from typing import Any

import pytest

from tests.ranks import fp8_runs
from tests.ranks.engine.test_matrix import (
    SCHEDULES,
    SPLIT,
    TWO_STAGES_PER_RANK,
    assert_bitwise,
    largest_difference,
)
from tests.ranks.fp8_runs import OFF, fp8_settings
from tests.ranks.pool import RankPool
from tests.sampling import some

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def run(pool: RankPool, ranks: int, *configs: dict[str, Any]) -> list[dict[str, Any]]:
    return pool.run(ranks, fp8_runs.train_all, list(configs), timeout=300.0)[0]


def on(schedule: str, recipe: str = "tensorwise", **changes: Any) -> dict[str, Any]:
    return fp8_settings(recipe, pipeline={"schedule": schedule}, **changes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpt_has_the_bits_of_the_modules_that_torchao_converts(
    pool: RankPool, recipe: str
) -> None:
    (converted,) = pool.run(1, fp8_runs.train_gpt_of_torchao, recipe)
    ours, plain = run(pool, 1, fp8_settings(recipe), {**fp8_settings(recipe), **OFF})
    assert_bitwise([converted, ours])
    assert ours["loss"] != plain["loss"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_linears_of_user_layers_have_the_bits_of_torchao(pool: RankPool, recipe: str) -> None:
    """A micro-batch has 10 rows, which torchao pads on GPUs; `odd` and the head stay in bf16."""
    ours, plain = fp8_settings(recipe), {**fp8_settings(recipe), **OFF}
    split = on("zb-h1", recipe, mesh={"pipeline": 2})
    ((want, got),) = pool.run(1, fp8_runs.train_layers, [(recipe, plain), ("", ours)])
    ((in_pipeline,), _) = pool.run(2, fp8_runs.train_layers, [("", split)])
    assert_bitwise([want, got, in_pipeline])


@pytest.mark.parametrize("tensor", [1, 2])
def test_all_schedules_give_the_same_bits(pool: RankPool, tensor: int) -> None:
    names = (*SCHEDULES, *SPLIT, *TWO_STAGES_PER_RANK)
    if tensor > 1:
        names = ("1f1b", "zb-h1", "zb-v")
    slices = {"mesh": {"pipeline": 2, "tensor": tensor, "sequence_parallel": tensor > 1}}
    recompute = on("zb-h1", **slices, model={"recompute": "full"})
    results = run(pool, 2 * tensor, *(on(name, **slices) for name in names), recompute)
    assert_bitwise(results)


@pytest.mark.parametrize("recipe", some(RECIPES, 0, 2))
def test_tensor_ranks_train_like_one_process(pool: RankPool, recipe: str) -> None:
    """Each shard has scales of its own, so values differ by the rounding of fp8."""
    (want,) = run(pool, 1, fp8_settings(recipe))
    whole, slices = ({"tensor": 2, "sequence_parallel": s} for s in (False, True))
    split = on("zb-h1", recipe, mesh={"tensor": 2, "pipeline": 2})
    for got in (
        *run(pool, 2, fp8_settings(recipe, mesh=whole), fp8_settings(recipe, mesh=slices)),
        *run(pool, 4, split),
    ):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)
        assert got["norm"] == pytest.approx(want["norm"], rel=0.05)
        assert largest_difference(got["parameters"], want["parameters"]) < 0.05


def test_zero_gives_the_values_of_plain_masters(pool: RankPool) -> None:
    zero = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    meshed = {"mesh": {"data": 2, "pipeline": 2}}
    plain, sharded = run(pool, 4, on("zb-h1", **meshed), on("zb-h1", **meshed, **zero))
    assert sharded["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert largest_difference(sharded["parameters"], plain["parameters"]) < 1e-5


@pytest.mark.parametrize("backend", some(("aot_eager", "inductor"), 0))
def test_compiled_layers_run_in_fp8(pool: RankPool, backend: str) -> None:
    compiled = {"compile": {"enabled": True, "backend": backend}}
    meshed = {"mesh": {"pipeline": 2}}
    (alone,) = run(pool, 1, fp8_settings(**compiled))
    want, first, second = run(
        pool, 2, on("1f1b", **meshed), *(on(s, **meshed, **compiled) for s in ("1f1b", "zb-h1"))
    )
    assert_bitwise([first, second])
    for got in (alone, first):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)


def test_adapters_train_on_frozen_linears_in_fp8(pool: RankPool) -> None:
    lora = {"lora": {"r": 16, "alpha": 16.0}}
    slices = {"mesh": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}}
    one, plain = run(pool, 1, fp8_settings(**lora), {**fp8_settings(**lora), **OFF})
    assert one["loss"] != plain["loss"]
    first, second = run(pool, 4, *(on(s, **lora, **slices) for s in ("1f1b", "zb-h1")))
    assert_bitwise([first, second])
    for got in (plain, first):
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert largest_difference(got["parameters"], one["parameters"]) < 0.05

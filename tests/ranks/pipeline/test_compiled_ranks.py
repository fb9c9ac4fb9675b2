"""Compiled layers on several ranks."""

from typing import Any

import numpy
import pytest

from tests.ranks.pool import RankPool
from tests.ranks.training_runs import build, data, settings, train

TENSOR_RANKS = {"mesh": {"tensor": 2}, "model": {"attention_dropout": 0.1}}


def train_where_rank_1_cannot_compile(config: dict[str, Any]) -> dict[str, Any]:
    import torch._dynamo
    import torch.distributed as dist

    def compile_graph(graph: Any, inputs: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no space left")
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(compile_graph, "fails_on_rank_1")
    result = train(config, steps=2)
    torch._dynamo.reset()
    return result


@pytest.mark.sweep
def test_tensor_ranks_train_alike_if_one_of_them_cannot_compile(pool: RankPool) -> None:
    """With attention dropout a block is two graphs, with collectives in both."""
    (want, *_) = pool.run(2, train, settings(**TENSOR_RANKS), "float64", 2)
    compiled = {"enabled": True, "backend": "fails_on_rank_1"}
    results = pool.run(
        2, train_where_rank_1_cannot_compile, settings(**TENSOR_RANKS, compile=compiled)
    )
    for result in results:
        assert result["loss"] == pytest.approx(want["loss"], rel=1e-12)
        for name, value in want["parameters"].items():
            numpy.testing.assert_allclose(result["parameters"][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.sweep
def test_compiled_layers_train_with_a_cut_vocabulary(pool: RankPool) -> None:
    cut = {"pipeline": {"vocabulary": "parallel"}, "mesh": {"pipeline": 2}}
    (want, *_) = pool.run(2, train, settings(**cut), "float64", 1)
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    (got, *_) = pool.run(2, train, settings(**cut, **compiled), "float64", 1)
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)


def train_with_a_hook_on_one_rank(config: dict[str, Any]) -> list[float]:
    import torch.distributed as dist

    engine = build(config)
    losses = []
    for step in range(3):
        handles = []
        if step != 1 and dist.get_rank() == 0:
            modules = [m for m in engine.module.modules() if type(m).__name__ == "MLP"]
            assert len(modules) == 3
            handles = [module.register_forward_hook(lambda *_: None) for module in modules]
        losses.append(engine.train_batch(data(engine, step)))
        engine.check_replicas()
        for handle in handles:
            handle.remove()
    return losses


@pytest.mark.sweep
def test_layers_with_hooks_on_one_tensor_rank_run_uncompiled_on_all(pool: RankPool) -> None:
    """The other rank compiled them, and waited for the first one until the deadline."""
    meshed = settings(mesh={"tensor": 2, "timeout_seconds": 30})
    want = pool.run(2, train_with_a_hook_on_one_rank, meshed)
    compiled = {**meshed, "compile": {"enabled": True, "backend": "aot_eager"}}
    for losses in pool.run(2, train_with_a_hook_on_one_rank, compiled):
        assert losses == pytest.approx(want[0], rel=1e-6)

"""`training.deterministic_mode` on a GPU: the fused attention and the embeddings too."""

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from tests.gpu import rank_functions
from tests.gpu.devices import ONE_DEVICE, Run, on_meshes, one_gpu, ranks_of
from tests.ranks.training_runs import settings, train

# From the backward thread at its first matrix product.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


def _on_one_gpu(test: Any) -> Any:
    for mark in one_gpu:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the mode of the process."""
    yield
    torch.use_deterministic_algorithms(False)


@on_meshes(
    {"data": 2, "pipeline": 2}, {"pipeline": 2}, {"data": 2}, {"tensor": 2}, {"data": 4},
    {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, {"data": 4, "tensor": 2}, cheap=1,
)  # fmt: skip
def test_two_runs_of_several_ranks_give_the_same_bits(
    run: Run, device: str, mesh: dict[str, Any]
) -> None:
    """With ZeRO, dropout in attention, and clipping, so that the norm changes the parameters."""
    changes = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 500, "overlap_comm": True},
        "model": {"attention_dropout": 0.1},
        "gradient_clipping": 0.05,
    }
    results = run(device, ranks_of(mesh), rank_functions.train_gpt_twice, mesh=mesh, **changes)
    for first, second in results:
        assert first == second


@_on_one_gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
def test_two_runs_give_the_same_bits(precision: str, position: str, recompute: str) -> None:
    changes: dict[str, Any] = {
        "mesh": {"device": ONE_DEVICE},
        "training": {"deterministic_mode": True},
        # Heads of 16 channels, which the fused kernels support.
        "model": {
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "attention_dropout": 0.1,
            "position_embedding_type": position,
            "recompute": recompute,
        },
    }
    if precision != "fp32":
        changes[precision] = {"enabled": True}
    _assert_same_bits([train(settings(**changes), "float32", steps=5) for _ in range(3)])


@_on_one_gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_on_the_host_change_no_bit(recompute: str) -> None:
    changes: dict[str, Any] = {
        "mesh": {"device": ONE_DEVICE},
        "training": {"deterministic_mode": True},
        "model": {"recompute": recompute},
        "pipeline": {"schedule": "gpipe"},
    }
    configs = [
        settings(activation_checkpointing={"cpu_checkpointing": moves}, **changes)
        for moves in (False, True)
    ]
    _assert_same_bits([train(config, "float32", steps=5) for config in configs])


@_on_one_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_graphs_of_layers_change_no_bit(fused: bool) -> None:
    changes: dict[str, Any] = {
        "mesh": {"device": ONE_DEVICE},
        "training": {"deterministic_mode": True},
        "pipeline": {"schedule": "gpipe"},
        "gradient_accumulation_fusion": fused,
    }
    configs = [settings(compile={"cuda_graphs": graphs}, **changes) for graphs in (False, True)]
    _assert_same_bits([train(config, "float32", steps=5) for config in configs])


def _assert_same_bits(results: list[dict[str, Any]]) -> None:
    first, *others = results
    for other in others:
        assert (other["loss"], other["norm"]) == (first["loss"], first["norm"])
        for name, value in first["parameters"].items():
            assert numpy.array_equal(value, other["parameters"][name]), name
        for mine, theirs in zip(other["gradients"], first["gradients"], strict=True):
            for name, value in theirs.items():
                assert numpy.array_equal(mine[name], value), name
